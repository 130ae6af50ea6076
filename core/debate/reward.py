"""The reward of a trace: R = R_cls + 0.1 R_sec + 0.1 R_skill, in [0, 1.2] (B4 [paper]).

    R_cls    1 if the verdict is right. On deployed labels, y = 1 iff raw = 2 ("binary"); "raw" compares 0, 1, 2
    R_sec    1 if all required sections are there
    R_skill  1 if every cited skill is valid and was retrieved for the example

Nothing tests whether the text is faithful to the evidence [paper]. A trace that cites nothing has 0 for R_skill, unless
`uncited` says 1 (vacuous truth; the sheet suggests 0 [inferred]). A wrong but tidy trace has at most 0.2.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass
from typing import Any

from strop.core.debate.verdict import collapse

SECTION_WEIGHT = 0.1
SKILL_WEIGHT = 0.1
COMPARISONS = ("binary", "raw")


@dataclass(frozen=True, slots=True)
class Reward:
    """The parts, each 0 or 1, and their weighted sum."""

    cls: int
    sec: int
    skill: int

    @property
    def total(self) -> float:
        """The reward, in [0, 1.2]."""
        return round(self.cls + SECTION_WEIGHT * self.sec + SKILL_WEIGHT * self.skill, 6)

    def fields(self) -> dict[str, Any]:
        """As a record holds it."""
        return {**asdict(self), "total": self.total}


def trace_reward(
    verdict: int | None, gold: int, *, has_sections: bool, cited: Collection[str], retrieved: Collection[str],
    valid: Collection[str] | None = None, compare: str = "binary", uncited: int = 0,
) -> Reward:  # fmt: skip
    """The reward of one trace; `gold` is a raw label. `valid` None: what was retrieved is valid by that.

    >>> trace_reward(2, 2, has_sections=True, cited=["a"], retrieved=["a"]).total
    1.2
    >>> trace_reward(2, 1, has_sections=True, cited=["a"], retrieved=["a"]).total
    0.2
    """
    right = verdict == gold if compare == "raw" else verdict is not None and collapse(verdict) == collapse(gold)
    known = set(retrieved) if valid is None else set(retrieved) & set(valid)
    grounded = set(cited) <= known if cited else bool(uncited)
    return Reward(int(right), int(has_sections), int(grounded))
