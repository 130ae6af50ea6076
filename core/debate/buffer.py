"""Disagreement: how urgent a case is, which wait in the buffer, and when a pattern of them changes a skill.

    p(x) = |y_sem - y_crit| + alpha 1[y_human != y_judge] + beta 1[x triggers an update]     (equation 14 [paper])
    gate(c): freq(c) >= tau_f and mean p over c >= tau_p                                     (equation 15 [paper])

alpha = 1, beta = 0.5, tau_f = 3 [paper]. The paper gives neither tau nor tau_p (ours: 1, options), nor the scale of the
votes (ours: deployed labels, 0 or 1; "raw" takes 0, 1, 2), nor what c is. Ours [inferred]: the kind of gap that the
judge names, and the direction in which a side erred. That "x triggers an update" would be circular if it asked whether
the gate opens; ours asks whether the sides disagree about a pattern that no skill covers yet. freq counts distinct
queries, so that one query of many agents is one piece of evidence [inferred]. The equation's >= is taken, not the
prose's "exceeds".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

ALPHA, BETA = 1.0, 0.5
TAU, TAU_P, TAU_F = 1.0, 1.0, 3
SCALES = ("binary", "raw")


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The constants of priority and gate."""

    alpha: float = ALPHA
    beta: float = BETA
    tau: float = TAU
    tau_p: float = TAU_P
    tau_f: int = TAU_F


@dataclass(slots=True)
class Entry:
    """A disagreement that waits. Of the trace only this is kept: never a text of a role.

    `terms` are words that request and agent share; `query` is a hash of the request, to count distinct ones; `used`
    names the skill that the entry has already changed.
    """

    id: str
    pattern: str
    priority: float
    query: str
    terms: list[str] = field(default_factory=list)
    used: str | None = None


@dataclass(frozen=True, slots=True)
class Gate:
    """What the gate says of one pattern."""

    pattern: str
    freq: int
    mean_priority: float
    opens: bool
    entries: list[Entry]


def priority(
    y_sem: float | None, y_crit: float | None, y_judge: int | None, y_human: int | None, *, triggers: bool,
    thresholds: Thresholds = Thresholds(),
) -> float:  # fmt: skip
    """p(x). A side without a vote adds nothing, and neither does a case without a human label (not audited).

    >>> priority(1, 0, 0, None, triggers=False), priority(1, 0, 1, 0, triggers=True)
    (1.0, 2.5)
    """
    apart = abs(y_sem - y_crit) if y_sem is not None and y_crit is not None else 0.0
    audit = thresholds.alpha * (y_human is not None and y_human != y_judge)
    return apart + audit + thresholds.beta * triggers


def pattern_of(gap: str, y_judge: int | None, y_human: int | None) -> str:
    """The conflict pattern GAP/DIRECTION from deployed labels (0, 1); the human one, where there is one, is the truth.

    over_accept: someone would send the request to an agent that cannot do it; over_reject: someone would not, to one
    that can; unsettled: there is no truth to hold them against.
    """
    truth = y_judge if y_human is None else y_human
    if truth is None:
        return f"{gap}/unsettled"
    return f"{gap}/over_accept" if truth == 0 else f"{gap}/over_reject"


class Buffer:
    """The disagreements by example; each example once, in the order in which they came."""

    def __init__(self, entries: Iterable[Entry] = ()) -> None:
        self.entries = {entry.id: entry for entry in entries}

    def add(self, entry: Entry) -> bool:
        """Takes an entry in; False for an example that is there already."""
        return self.entries.setdefault(entry.id, entry) is entry

    def gates(self, thresholds: Thresholds) -> list[Gate]:
        """What the gate says of each pattern with entries that are not used up, in the order of the patterns' names.

        The mean is over distinct queries, each with the highest priority it has.
        """
        waiting: dict[str, list[Entry]] = {}
        for entry in self.entries.values():
            if entry.used is None:
                waiting.setdefault(entry.pattern, []).append(entry)
        found = []
        for pattern, entries in sorted(waiting.items()):
            best: dict[str, float] = {}
            for entry in entries:
                best[entry.query] = max(entry.priority, best.get(entry.query, entry.priority))
            mean = fmean(best.values())
            opens = len(best) >= thresholds.tau_f and mean >= thresholds.tau_p
            found.append(Gate(pattern, len(best), mean, opens, entries))
        return found
