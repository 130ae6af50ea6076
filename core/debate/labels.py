"""From what was said to a label: verdict, votes, citations, priority, reward, and the trace as one text."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import Any

from strop.core.debate.buffer import Entry, Thresholds, pattern_of, priority
from strop.core.debate.retrieval import folded, tokens, words_of
from strop.core.debate.reward import trace_reward
from strop.core.debate.rounds import Case
from strop.core.debate.skills import SEEDS, skill_text
from strop.core.debate.verdict import (
    SECTIONS,
    Reading,
    collapse,
    has_sections,
    read_citations,
    read_gap,
    read_number,
    read_sections,
    read_vote,
)
from strop.core.records import Label

TITLES = {name: name.capitalize() for name in SECTIONS}
MOST_TERMS = 24
SEED_WORDS = frozenset(token for skill in SEEDS for token in tokens(skill_text(skill)))


@dataclass(frozen=True, slots=True)
class Grading:
    """What makes a label of a case: thresholds, the scale of votes, and how a trace is rewarded."""

    thresholds: Thresholds = Thresholds()  # noqa: RUF009 (frozen)
    scale: str = "binary"
    compare: str = "binary"
    uncited: int = 0
    sections: tuple[str, ...] = SECTIONS


def normal_query(query: str) -> str:
    """A request as it is compared with others: one case and form, no punctuation, single spaces [inferred].

    >>> normal_query("  Rebook my FLIGHT!") == normal_query("rebook my flight")
    True
    """
    kept = "".join(mark if mark.isalnum() else " " for mark in folded(query))
    return " ".join(kept.split())


def make_label(
    case: Case, variant: str, grading: Grading, y_human: int | None, is_covered: Callable[[str], bool]
) -> tuple[Label, Entry | None]:
    """The label of a case that was debated to its end, and the entry for the buffer if it is urgent enough.

    `is_covered` says whether a skill covers a pattern. A gold label (`y_human`, else the example's own) makes the
    reward; it reaches nothing that a role reads.
    """
    example = case.example
    text = trace_text(case, variant)
    if variant == "no-debate":
        votes = [read_vote(read_sections(text).get(side, "")) for side in ("support", "objection")]
    else:
        votes = [read_vote(case.of(side)[-1]["text"]) for side in ("support", "objection")]
    reading = read_verdict(case, variant)
    verdict = reading.value
    y_sem, y_crit = (vote if grading.scale == "raw" else collapse(vote) for vote in votes)
    y_judge = collapse(verdict)
    human = example.y_human if y_human is None else y_human
    truth = collapse(human)
    gap = read_gap(text)
    pattern = pattern_of(gap, y_judge, truth)
    apart = y_sem is not None and y_crit is not None and y_sem != y_crit
    triggers = apart and not is_covered(pattern)
    urgent = priority(y_sem, y_crit, y_judge, truth, triggers=triggers, thresholds=grading.thresholds)
    gold = example.y_raw if human is None else human
    cited, retrieved = read_citations(text), [found.id for found in case.retrieved]
    whole = has_sections(text, grading.sections)
    reward = None
    if gold is not None:
        reward = trace_reward(
            verdict, gold, has_sections=whole, cited=cited, retrieved=retrieved, compare=grading.compare,
            uncited=grading.uncited,
        ).fields()  # fmt: skip
    trace: dict[str, Any] = {
        "variant": variant, "retrieved": [asdict(found) for found in case.retrieved], "fallback": case.fallback,
        "first": case.first, "replies": case.said, "text": text, "cited": cited, "gap": gap, "y_sem": y_sem,
        "y_crit": y_crit, "y_judge": y_judge, "y_human": human, "valid_sections": whole, "fault": reading.fault,
        "pattern": pattern, "triggers": triggers,
    }  # fmt: skip
    label = Label(
        id=example.id, query=example.query, agent=example.agent, trace=trace, verdict=verdict, priority=urgent,
        reward=reward, split=example.split, y_raw=example.y_raw,
    )  # fmt: skip
    return label, entry_of(label, grading.thresholds)


def entry_of(label: Label, thresholds: Thresholds) -> Entry | None:
    """The entry of a label that is urgent enough (p >= tau), without any text of the debate."""
    if label.error is not None or label.priority is None or label.priority < thresholds.tau:
        return None
    query = blake2b(normal_query(label.query).encode("utf-8", "replace"), digest_size=8).hexdigest()
    agent = set(tokens("\n".join(words_of(label.agent))))
    shared = sorted({word for word in tokens(label.query) if word in agent and _says_something(word)})
    return Entry(label.id, str(label.trace["pattern"]), label.priority, query, shared[:MOST_TERMS])


def _says_something(word: str) -> bool:
    """Words of the seeds and short ones (but pairs of CJK characters) tell nothing of a subject [inferred]."""
    return not word.isdigit() and word not in SEED_WORDS and (len(word) > 3 or not word.isascii())


def failed_label(case: Case, variant: str) -> Label:
    """The label of a case in which the machine failed: what was said until then, and no verdict."""
    example = case.example
    trace = {
        "variant": variant, "retrieved": [asdict(found) for found in case.retrieved], "fallback": case.fallback,
        "first": case.first, "replies": case.said,
    }  # fmt: skip
    return Label(
        id=example.id, query=example.query, agent=example.agent, trace=trace, split=example.split,
        y_raw=example.y_raw, error=case.error,
    )  # fmt: skip


def read_verdict(case: Case, variant: str) -> Reading:
    """The verdict: the judge's (or the router's) last reply; without a judge the vote spoken last."""
    if variant == "no-judge":
        said = case.dialogue[-1]["text"]
        vote = read_vote(said)
        return Reading(vote) if vote is not None else read_number(said, "vote")
    return read_number(case.of("router" if variant == "no-debate" else "verdict")[-1]["text"])


def trace_text(case: Case, variant: str) -> str:
    """The complete trace as one text with headings, the response that a student learns; the verdict stands last.

    A router's own reply is left as it is.
    """
    if variant == "no-debate":
        return str(case.of("router")[-1]["text"])
    several = len(case.first) > 1
    parts = []
    for one in case.dialogue:
        title = TITLES.get(one["role"], "Guidance")
        parts.append((f"{title} (round {one['round']})" if several else title, one["text"]))
    if variant == "full":
        parts.append((TITLES["judgement"], case.of("verdict")[-1]["text"]))
    verdict = read_verdict(case, variant).value
    parts.append((TITLES["verdict"], "" if verdict is None else f"Verdict: {verdict}"))
    return "\n".join(f"## {title}\n{_quiet(text.strip())}" for title, text in parts)


def _quiet(text: str) -> str:
    """A reply inside of a trace: its own headings would be taken for the trace's."""
    return "\n".join(f" {line}" if line.startswith("##") else line for line in text.split("\n"))
