"""The cap on an episode's turns, as a schedule: Elastic Horizon (EMNLP 2026) and the schedules it is compared with.

Elastic Horizon, section 3.2 of its sheet: after each training step the lengths of the step's successful episodes enter
a buffer of the last N; with at least N_min of them the cap moves by the rate alpha towards their 90th percentile plus
a headroom Delta. Failures never enter. Since a success is no longer than its cap, only the headroom makes it grow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from strop.core.errors import UsageError

Order = Literal["clip-first", "average-first"]


@dataclass(frozen=True, slots=True)
class Rule:
    """The constants. The defaults are the paper's (section 3.3 of the sheet); `PRESETS` holds those of its code.

    `rate` (alpha) is how far the cap moves to its target in one step, `headroom` (Delta) the turns above the
    percentile, `window` (N) the successes remembered, `min_successes` (N_min) those needed to move at all, `low` and
    `high` the bounds. `order`: the paper clips the target and then averages, its code averages and then clips the cap.
    """

    start: float = 15.0
    rate: float = 0.1
    headroom: float = 10.0
    window: int = 100
    min_successes: int = 20
    low: int = 5
    high: int = 50
    percentile: float = 90.0
    order: Order = "clip-first"

    def __post_init__(self) -> None:
        """Raises UsageError for constants that make no schedule."""
        if not 1 <= self.low <= self.high:
            raise UsageError(f"the bounds of the horizon are {self.low} and {self.high}; expected 1 <= low <= high")
        if not 0 < self.rate <= 1:
            raise UsageError(f"the rate of the horizon is {self.rate}; it lies in (0, 1]")
        if not 0 <= self.percentile <= 100:
            raise UsageError(f"the percentile of the horizon is {self.percentile}; it lies in [0, 100]")
        if not 1 <= self.min_successes <= self.window:
            raise UsageError(
                f"{self.min_successes} successes are needed to move the horizon and {self.window} remembered; "
                "expected 1 <= needed <= remembered"
            )
        if not (math.isfinite(self.headroom) and math.isfinite(self.start) and self.start >= 1):
            raise UsageError(f"the horizon starts at {self.start} with headroom {self.headroom}; expected turns")


# What the released code holds: its dataclass, and the settings it ships for two environments.
PRESETS = {
    "paper": Rule(),
    "code": Rule(rate=0.2, headroom=2, min_successes=10, low=1, high=64, order="average-first"),
    "code-appworld": Rule(start=10, rate=0.2, headroom=3, min_successes=10, order="average-first"),
    "code-bfcl": Rule(start=50, rate=0.2, headroom=10, min_successes=10, order="average-first"),
}


@dataclass(frozen=True, slots=True)
class Move:
    """One step of a schedule. `percentile` and `target` are None where the cap was held; `reason` says why it moved."""

    before: float
    after: float
    percentile: float | None
    target: float | None
    reason: str


def percentile(values: Sequence[float], q: float) -> float:
    """The q-th percentile (0-100) of at least one value, linear between order statistics (numpy's default)."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * q / 100
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def applied_cap(cap: float, low: int, high: int) -> int:
    """The whole number of turns an episode gets: rounded half to even as the released code does, within the bounds."""
    return min(max(round(cap), low), high)


def elastic_move(cap: float, lengths: Sequence[int], rule: Rule) -> Move:
    """The cap after one step, of the cap before it and the buffer of successful lengths (sheet, 3.2, steps 4 to 7)."""
    if len(lengths) < rule.min_successes:
        return Move(cap, cap, None, None, "too few successes")
    found = percentile(lengths, rule.percentile)
    target = found + rule.headroom
    aim = _clip(target, rule) if rule.order == "clip-first" else target
    after = (1 - rule.rate) * cap + rule.rate * aim
    if rule.order == "average-first":
        after = _clip(after, rule)
    return Move(cap, after, found, target, "followed")


def _clip(value: float, rule: Rule) -> float:
    return min(max(value, rule.low), rule.high)


@dataclass(slots=True)
class Elastic:
    """Elastic Horizon as it runs: the cap (a float) and the buffer of the last successful lengths, oldest first."""

    rule: Rule = field(default_factory=Rule)
    cap: float = 0.0
    lengths: deque[int] = field(default_factory=deque)

    def __post_init__(self) -> None:
        """A cap of 0 is the start."""
        self.cap = self.cap or self.rule.start
        self.lengths = deque(self.lengths, maxlen=self.rule.window)

    @property
    def applied(self) -> int:
        """The turns that an episode gets now."""
        return applied_cap(self.cap, self.rule.low, self.rule.high)

    def step(self, lengths: Iterable[int]) -> Move:
        """Ends a training step whose successful episodes had these lengths, in turns."""
        self.lengths.extend(lengths)
        move = elastic_move(self.cap, self.lengths, self.rule)
        self.cap = move.after
        return move


@dataclass(slots=True)
class Planned:
    """A cap that follows the clock and not experience: what Elastic Horizon is compared with.

    `fixed`: always `start`. `tti`: `stages` in turn, each an equal share of `steps` (the paper gives the stages
    15, 20, 30, 50; the shares are our choice). `scaling-inter`: low + t (high - low) / steps, the paper's
    K_min + delta t. `tti-code`: start (epoch + 1), `epochs` of equal length in `steps`. `scaling-code`: each step adds
    t / steps (high - start) to what is there, which saturates early; both as in the released code, never above high.
    """

    name: Literal["fixed", "tti", "scaling-inter", "tti-code", "scaling-code"]
    rule: Rule
    steps: int
    stages: tuple[int, ...] = (15, 20, 30, 50)
    epochs: int = 1
    cap: float = 0.0
    done: int = 0

    def __post_init__(self) -> None:
        """Raises UsageError for a plan without length."""
        if self.name != "fixed" and self.steps < 1:
            raise UsageError(f"the schedule {self.name} needs the number of steps it is stretched over")
        self.cap = self.cap or self._first()

    @property
    def applied(self) -> int:
        """The turns that an episode gets now."""
        return applied_cap(self.cap, 1, max(self.rule.high, round(self.rule.start)))

    def step(self, lengths: Iterable[int]) -> Move:
        """Ends a training step; what happened in it does not matter."""
        del lengths
        before = self.cap
        self.done += 1
        self.cap = self._next()
        return Move(before, self.cap, None, None, "planned")

    def _first(self) -> float:
        return {"tti": float(self.stages[0]), "scaling-inter": float(self.rule.low)}.get(self.name, self.rule.start)

    def _next(self) -> float:
        share = min(self.done / self.steps, 1.0) if self.steps else 0.0
        if self.name == "tti":
            return float(self.stages[min(int(share * len(self.stages)), len(self.stages) - 1)])
        if self.name == "scaling-inter":
            return self.rule.low + share * (self.rule.high - self.rule.low)
        if self.name == "tti-code":
            epoch = min(int(share * self.epochs), self.epochs - 1)
            return min(self.rule.start * (epoch + 1), float(self.rule.high))
        if self.name == "scaling-code":
            return min(self.cap + share * (self.rule.high - self.rule.start), float(self.rule.high))
        return self.cap


def with_changes(rule: Rule, **changes: Any) -> Rule:
    """The rule with those constants replaced that are not None."""
    return replace(rule, **{name: value for name, value in changes.items() if value is not None})
