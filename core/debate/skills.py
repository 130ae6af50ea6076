"""The bank of skills, and the rules by which repeated disagreement changes it.

A skill is (title, principle, condition, tags) [paper] with an id, since rewards check ids. Where a pattern passes the
gate: if no skill covers it, one is added; else that skill is refined in its principle, condition or tags (equation 16
[paper]). Both follow from rules; raw traces are never stored [paper]. The paper gives no texts and no rule of coverage.
Ours [inferred]: a skill covers a pattern if its tags hold both the gap and the direction; the texts are those below; a
condition is made of words that requests and agents share in half of the evidence and more, TERMS at most, so that no
refinement makes a skill that fits everything.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from typing import Any

from msgspec.structs import asdict, replace

from strop.core.debate.buffer import Gate
from strop.core.records import Record, Skill

ID = re.compile(r"[\w.-]{1,64}")
TERMS = 12
SUPPORT_TERMS = 0.5

SEEDS = (
    Skill(
        id="seed-act-or-advise",
        title="Acting is more than advising",
        principle="An agent can execute a request only if one of its tools performs the act that is asked for. To know "
        "the subject, to explain or to recommend is not to do it.",
        when_to_apply="The request asks for something to be done, booked, changed, sent or looked up.",
        tags=["boundary"],
        origin="seed",
    ),
    Skill(
        id="seed-access-and-authority",
        title="Access and authority must be stated",
        principle="Do not assume access to live data, accounts or orders, or permission to change them, that the "
        "agent's profile does not state.",
        when_to_apply="The request needs current data, somebody's account, or a decision on somebody's behalf.",
        tags=["access"],
        origin="seed",
    ),
    Skill(
        id="seed-topic-first",
        title="Another subject is another agent",
        principle="If neither the profile nor any tool of the agent is about the subject of the request, it is off "
        "topic, however capable the agent is elsewhere.",
        when_to_apply="The words of the request do not occur in the agent's profile.",
        tags=["topic"],
        origin="seed",
    ),
)  # fmt: skip

GAP_WORDS = {
    "tools": "no tool of the agent performs the act that is asked for",
    "authority": "the agent may not decide or change what is asked for",
    "realtime": "the agent has no access to the current data that is asked for",
    "scope": "the request lies outside of what the agent's service covers",
    "topic": "the request is about another subject than the agent",
    "none": "nothing that the request needs is missing",
    "unknown": "it is not settled what the agent lacks",
}
DIRECTION_WORDS = {
    "over_accept": "A shared subject was repeatedly taken for the ability to act. Accept only if the tool that does it "
    "can be named",
    "over_reject": "Agents that can do it were repeatedly turned down. Do not object where a tool that does it can be "
    "named",
    "unsettled": "The sides repeatedly differed and nothing settled it. Name the tool that does it, or its absence",
}
REFINED_WORDS = "Seen again in {count} requests: check each act of the request against the list of tools by itself."


class Bank:
    """The skills by id. `log` tells how the bank changed, for people and for records."""

    def __init__(self, skills: Iterable[Skill] = SEEDS) -> None:
        self.skills = {skill.id: skill for skill in skills}
        if not any(skill.origin == "seed" for skill in self.skills.values()):
            self.skills = {skill.id: skill for skill in SEEDS} | self.skills

    def texts(self) -> list[tuple[str, str, bool]]:
        """Id, text and whether it is a seed, as retrieval takes them."""
        return [(skill.id, skill_text(skill), skill.origin == "seed") for skill in self.skills.values()]

    def covering(self, pattern: str) -> Skill | None:
        """The skill whose tags hold the pattern's gap and direction; of several the first by id."""
        wanted = set(pattern.split("/"))
        found = sorted((s for s in self.skills.values() if wanted <= set(s.tags)), key=lambda s: s.id)
        return found[0] if found else None

    def update(self, gate: Gate) -> tuple[Skill, dict[str, Any]]:
        """Adds or refines the skill of a pattern whose gate is open, marks its entries as used, says what was done."""
        before = self.covering(gate.pattern)
        skill = _added(gate, self.skills) if before is None else _refined(before, gate)
        self.skills[skill.id] = skill
        for entry in gate.entries:
            entry.used = skill.id
        told = {
            "pattern": gate.pattern, "freq": gate.freq, "mean_priority": gate.mean_priority,
            "covered": before is not None, "action": "add" if before is None else "refine",
            "before": None if before is None else asdict(before),
        }  # fmt: skip
        return skill, told


def skill_text(skill: Skill) -> str:
    """What of a skill is compared with an example: title, principle, condition, tags [paper]."""
    return "\n".join([skill.title, skill.principle, skill.when_to_apply, " ".join(skill.tags)])


def read_bank(records: Iterable[Record]) -> Bank:
    """The bank in records of kind skill; others are left out. Raises DataError for what cannot be cited, or twice."""
    found: dict[str, Skill] = {}
    places: dict[str, Any] = {}
    for record in records:
        if record.kind != "skill":
            continue
        skill = record.view(Skill)
        if not ID.fullmatch(skill.id):
            message = f"{skill.id!r}; an id that can be cited is 1 to 64 letters, digits, '.', '_' or '-'"
            raise record.bad(message, "id")
        if skill.origin not in ("seed", "added", "refined"):
            raise record.bad(f"{skill.origin!r}, expected seed, added or refined", "origin")
        if skill.id in found:
            raise record.bad(f"skill {skill.id!r} came before, at {places[skill.id]}", "id")
        found[skill.id], places[skill.id] = skill, record.where
    return Bank(found.values() if found else SEEDS)


def _terms(gate: Gate) -> list[str]:
    """The words that at least half of the distinct queries' entries hold, the most frequent first."""
    by_query: dict[str, set[str]] = {}
    for entry in gate.entries:
        by_query.setdefault(entry.query, set()).update(entry.terms)
    counts = Counter(term for terms in by_query.values() for term in terms)
    often = [(-count, term) for term, count in counts.items() if count >= SUPPORT_TERMS * len(by_query)]
    return [term for _, term in sorted(often)][:TERMS]


def _added(gate: Gate, taken: dict[str, Skill]) -> Skill:
    gap, _, direction = gate.pattern.partition("/")
    stem = name = f"{gap}-{direction}".replace("_", "-")
    number = 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}"
    return Skill(
        id=name, title=f"{gap} gap, {direction.replace('_', ' ')}",
        principle=f"{DIRECTION_WORDS[direction]}: otherwise {GAP_WORDS[gap]}.",
        when_to_apply=_condition(_terms(gate)), tags=[gap, direction], origin="added", support_count=gate.freq,
    )  # fmt: skip


def _refined(skill: Skill, gate: Gate) -> Skill:
    """The principle's last sentence counts the evidence anew, the condition gets its words; both stay bounded."""
    count = skill.support_count + gate.freq
    base = skill.principle.partition(REFINED_WORDS.partition("{")[0])[0].rstrip()
    known = skill.when_to_apply.removeprefix(CONDITION).rstrip(".").split(", ")
    known = known if skill.when_to_apply.startswith(CONDITION) else []
    condition = skill.when_to_apply
    if known or not condition:
        condition = _condition(list(dict.fromkeys([*_terms(gate), *known]))[:TERMS])
    return replace(
        skill, principle=f"{base} {REFINED_WORDS.format(count=count)}", when_to_apply=condition,
        origin="seed" if skill.origin == "seed" else "refined", version=skill.version + 1, support_count=count,
    )  # fmt: skip


CONDITION = "Request and agent share words like: "


def _condition(terms: list[str]) -> str:
    return f"{CONDITION}{', '.join(terms)}." if terms else ""
