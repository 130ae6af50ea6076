"""Calibration: from attempts at a task to a pass rate with its interval and a verdict on the task. No arrays, no numpy.

The admission rules are those of FrogNano's TaskPilot (method sheet frognano, 1.3 and 1.11) and a plain band; the Wilson
interval and the learnability p(1-p) are those of sections 1.11 and 1.13 there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
from msgspec import Struct

from strop.core.errors import UsageError
from strop.core.records import Record

# Two-sided 95 % point of the standard normal distribution.
Z_95 = 1.959963984540054

TOO_HARD, TOO_EASY, ACCEPT, INVALID = "too_hard", "too_easy", "accept", "invalid"
VERDICTS = (ACCEPT, TOO_HARD, TOO_EASY, INVALID)
DEFAULT_BAND = (0.2, 0.8)
# A statement that says nothing of its version is in its first one, as in records.Task.
FIRST_VERSION = 1


def wilson_interval(successes: int, attempts: int, z: float = Z_95) -> tuple[float, float]:
    """Wilson's score interval for a proportion (Wilson 1927): the p for which |p_hat - p| <= z sqrt(p(1-p)/n).

    `attempts` >= 1 and 0 <= `successes` <= `attempts`; ValueError otherwise. The ends lie in [0, 1]; with no success
    the lower one is exactly 0, with no failure the upper one is exactly 1.

    >>> [round(end, 4) for end in wilson_interval(4, 8)]
    [0.2152, 0.7848]
    """
    if not 0 <= successes <= attempts or attempts < 1:
        raise ValueError(f"{successes} successes of {attempts} attempts")
    rate, z2 = successes / attempts, z * z
    shrink = 1 + z2 / attempts
    middle = (rate + z2 / (2 * attempts)) / shrink
    half = z / shrink * math.sqrt(rate * (1 - rate) / attempts + z2 / (4 * attempts * attempts))
    low = 0.0 if successes == 0 else max(0.0, middle - half)
    high = 1.0 if successes == attempts else min(1.0, middle + half)
    return low, high


def learnability(pass_rate: float) -> float:
    """p(1-p), the variance of one attempt: 0 where a task teaches nothing, 1/4 at p = 1/2 (frognano sheet, 1.13).

    >>> learnability(0.25)
    0.1875
    """
    return pass_rate * (1 - pass_rate)


@dataclass(frozen=True, slots=True)
class Rule:
    """An admission rule: `accepted(n)` = (first, last) numbers of successes of n attempts that it accepts.

    Fewer than `first` is too hard, more than `last` too easy. Where no number of successes is acceptable, as in a
    narrow band with few attempts, first = last + 1. `band` is set where the rule is about the true rate, so that a
    probability of being right can be stated.
    """

    name: str
    accepted: Callable[[int], tuple[int, int]]
    band: tuple[float, float] | None = None

    def verdict(self, successes: int, attempts: int) -> str:
        """One of `VERDICTS`; "invalid" without attempts."""
        if attempts == 0:
            return INVALID
        first, last = self.accepted(attempts)
        if successes < first:
            return TOO_HARD
        return TOO_EASY if successes > last else ACCEPT

    def admits(self, attempts: int) -> tuple[float, float] | None:
        """The smallest and the largest pass rate that `attempts` attempts can show and the rule accepts, or None."""
        if attempts == 0:
            return None
        first, last = self.accepted(attempts)
        return (first / attempts, last / attempts) if first <= last else None


def band_rule(low: float, high: float) -> Rule:
    """Accepts low <= p_hat <= high (closed at both ends). Raises UsageError unless 0 <= low <= high <= 1.

    >>> band_rule(0.2, 0.8).verdict(1, 5)
    'accept'
    """
    if not 0 <= low <= high <= 1:
        raise UsageError(f"--band {low}:{high}: expected 0 <= LO <= HI <= 1")

    @lru_cache(maxsize=4096)
    def accepted(attempts: int) -> tuple[int, int]:
        # s/n is rounded as the decimal on the command line is, so 1 of 5 lies in 0.2:0.8.
        inside = [s for s in range(attempts + 1) if low <= s / attempts <= high]
        below = sum(1 for s in range(attempts + 1) if s / attempts < low)
        return (inside[0], inside[-1]) if inside else (below, below - 1)

    return Rule(f"band {low:g}:{high:g}", accepted, (low, high))


def _half(attempts: int) -> tuple[int, int]:
    # With one attempt the nearest rates are 0 and 1, which no rule of the paper admits: nothing is accepted.
    return (1, 0) if attempts == 1 else (attempts // 2, (attempts + 1) // 2)


RULES: dict[str, Rule] = {
    # p_hat = 1/2 (rounds 1-4). With an odd number of attempts the two rates nearest to 1/2: the paper is silent.
    "frognano-half": Rule("frognano-half", _half),
    # 0 < p_hat <= 1/2 (round 5).
    "frognano-round5": Rule("frognano-round5", lambda attempts: (1, attempts // 2)),
    # 0 < p_hat < 1: the learnable region in general.
    "learnable": Rule("learnable", lambda attempts: (1, attempts - 1)),
}


def parse_band(text: str) -> tuple[float, float]:
    """`LO:HI` as two numbers. Raises UsageError."""
    low, _, high = text.partition(":")
    try:
        ends = float(low), float(high)
    except ValueError:
        raise UsageError(f"--band {text}: expected LO:HI, e.g. 0.2:0.8") from None
    if not all(map(math.isfinite, ends)):
        raise UsageError(f"--band {text}: expected LO:HI, e.g. 0.2:0.8")
    return ends


def choose_rule(band: str | None, name: str | None) -> Rule:
    """The rule that the options name; the default band without any. Raises UsageError."""
    if name is None:
        return band_rule(*(DEFAULT_BAND if band is None else parse_band(band)))
    if band is not None:
        raise UsageError("--band and --rule are two ways to say which tasks are admitted; give one")
    if name not in RULES:
        raise UsageError(f"--rule {name}: expected one of {', '.join(RULES)}")
    return RULES[name]


class AttemptFields(Struct, kw_only=True):
    """What calibration reads of a rollout; tokens and text stay unread."""

    id: str
    task: str
    sample: int | None = None
    statement_version: int | None = None
    reward: float | None = None
    success: bool | None = None
    error: str | None = None
    horizon: int | None = None

    @property
    def version(self) -> int:
        """The statement version it was an attempt at."""
        return FIRST_VERSION if self.statement_version is None else self.statement_version

    @property
    def outcome(self) -> bool | None:
        """Whether it succeeded; None where the machine failed, which says nothing of the policy."""
        if self.error is not None:
            return None
        return self.success if self.success is not None else (self.reward or 0.0) >= 1


def read_attempt(record: Record) -> AttemptFields:
    """The fields of a rollout that count. Raises DataError, also for one that has no outcome at all.

    Without `success` an attempt succeeded if its reward is at least 1: partial credit is not a pass.
    """
    attempt = record.view(AttemptFields)
    if attempt.error is None and attempt.success is None and attempt.reward is None:
        raise record.bad("missing, as are reward and error; an attempt needs one of the three to count", "success")
    return attempt


@lru_cache(maxsize=256)
def _canonical(policy: bytes) -> bytes:
    return msgspec.json.encode(msgspec.json.decode(policy), order="sorted")


def policy_of(rollout: Record) -> bytes | None:
    """The policy that made an attempt, as JSON in one spelling; None where it is not told. Raises DataError."""
    raw = rollout.fields.get("policy")
    if raw is None:
        return None
    try:
        policy = _canonical(bytes(raw))
    except msgspec.DecodeError as error:
        raise rollout.bad(str(error), "policy") from None
    return None if policy == b"null" else policy


@dataclass(slots=True)
class Tally:
    """The attempts at one task in one statement version: outcomes in order of arrival, and what does not count.

    `errors` are failures of the machine; `stale` attempts were made at another statement version; `caps` are the
    limits on turns that the others ran under.
    """

    outcomes: bytearray = field(default_factory=bytearray)
    errors: int = 0
    stale: int = 0
    caps: set[int] = field(default_factory=set)

    def add(self, outcome: bool | None, cap: int | None = None) -> None:
        """Counts one attempt, with its cap where it had one; an outcome of None is an error."""
        if outcome is None:
            self.errors += 1
            return
        self.outcomes.append(outcome)
        if cap is not None:
            self.caps.add(cap)

    @property
    def attempts(self) -> int:
        """Attempts that count."""
        return len(self.outcomes)

    @property
    def successes(self) -> int:
        """How many of them succeeded."""
        return self.outcomes.count(1)


def calibration_fields(tally: Tally, rule: Rule) -> dict[str, Any]:
    """The `calibration` field of a task: counts, rate, 95 % Wilson interval, learnability, verdict, and by which rule.

    `admits` is the range of pass rates that the rule accepts with this number of attempts: with an odd number p_hat =
    1/2 cannot be met, and the record says what stood in for it. Numbers are null where nothing counts.
    """
    successes, attempts = tally.successes, tally.attempts
    rate = successes / attempts if attempts else None
    low, high = wilson_interval(successes, attempts) if attempts else (None, None)
    admits = rule.admits(attempts)
    return {
        "successes": successes,
        "attempts": attempts,
        "errors": tally.errors,
        "stale": tally.stale,
        "pass_rate": rate,
        "low": low,
        "high": high,
        "learnability": None if rate is None else learnability(rate),
        "verdict": rule.verdict(successes, attempts),
        "rule": rule.name,
        "admits": None if admits is None else list(admits),
    }
