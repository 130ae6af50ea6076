r"""From what a verifier found to the reward of an attempt.

`pass` is the outcome b itself. The graded rewards count assertions (T1, section 2.2): with P of T passed

    assertions         P / S, the scale S fixed for a whole run (20), so that hard tasks can bring more than 1
    assertions-ratio   max(b, 0.4 P / T), within [0, max(1, b)]: T1's variant for comparison

Where there is no usable report the reward is b, and its cause is kept: a solved task is never worth nothing. FrogNano's
shaping (section 1.6 of its sheet) is for outcomes: a success costs the logarithm of its length beyond N_free, and one
whose episode was cut off is worth 0.5.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import quantiles
from typing import Literal

from strop.core.errors import UsageError
from strop.core.tasks.reports import Assertion, count

Kind = Literal["pass", "assertions", "assertions-ratio"]
# T1's, near the 90th percentile of assertions per task of its data.
SCALE = 20.0
RATIO_SHARE = 0.4
TRUNCATED = 0.5
# Ends of an episode that the policy did not choose.
TRUNCATED_STOPS = ("length", "max_turns", "max_context", "max_tokens_per_turn", "max_time")


@dataclass(frozen=True, slots=True)
class RewardRule:
    """How attempts are rewarded.

    `length_penalty` (alpha) and `free_tokens` (N_free) are FrogNano's, which does not disclose them: 0 is no shaping.
    `truncated` is what a success that was cut off is worth; None leaves it whole.
    """

    kind: Kind = "pass"
    scale: float = SCALE
    length_penalty: float = 0.0
    free_tokens: int = 0
    truncated: float | None = None

    def __post_init__(self) -> None:
        """Raises UsageError for rules that contradict themselves."""
        if not self.scale > 0:
            raise UsageError(f"the scale of the reward is {self.scale}; it divides a count and must be above 0")
        if (self.length_penalty > 0) != (self.free_tokens > 0):
            raise UsageError("the length penalty and the free tokens go together; FrogNano discloses neither")
        if self.kind != "pass" and (self.length_penalty or self.truncated is not None):
            raise UsageError("length and truncation shape the outcome; they go with the reward `pass`")


@dataclass(frozen=True, slots=True)
class Reward:
    """A reward and where it comes from: the "report", or the "outcome" with the cause if a report was wanted."""

    value: float
    source: Literal["report", "outcome"]
    cause: str | None = None
    passed: int | None = None
    total: int | None = None


def reward_of(
    rule: RewardRule, success: bool, assertions: list[Assertion] | None, *, cause: str | None = None,
    tokens: int = 0, stop: str | None = None,
) -> Reward:  # fmt: skip
    """The reward of an attempt.

    `assertions` are those of its report, None where there was none (`cause` says why), `tokens` what the policy
    sampled, `stop` why the episode ended.
    """
    if rule.kind == "pass":
        return Reward(_shaped(rule, success, tokens, stop), "outcome")
    if not assertions:
        return Reward(float(success), "outcome", cause or ("missing" if assertions is None else "empty"))
    counts = count(assertions)
    if rule.kind == "assertions":
        value = counts.passed / rule.scale
    else:
        value = min(max(float(success), RATIO_SHARE * counts.passed / counts.total), 1.0)
    return Reward(value, "report", passed=counts.passed, total=counts.total)


def _shaped(rule: RewardRule, success: bool, tokens: int, stop: str | None) -> float:
    if not success:
        return 0.0
    # Our choice: the order of the two rules is not told; a success that was cut off is worth 0.5 whatever its length.
    if rule.truncated is not None and stop in TRUNCATED_STOPS:
        return rule.truncated
    if rule.length_penalty and tokens > rule.free_tokens:
        return 1.0 - rule.length_penalty * math.log(tokens / rule.free_tokens)
    return 1.0


def recommended_scale(totals: Iterable[int]) -> float | None:
    """The 90th percentile of assertions a task, T1's way to choose S, linear between tasks; None of nothing."""
    known = list(totals)
    if len(known) < 2:
        return float(known[0]) if known else None
    return quantiles(known, n=10, method="inclusive")[8]
