r"""GRPO and its relatives: one advantage for a whole attempt, from the rewards of its group.

    A_i = (r_i - b_i) / (s + eps)        eps = 1e-6

b_i is the group's mean (GRPO, DeepSeekMath arXiv:2402.03300, section 4.1; Dr. GRPO, arXiv:2503.20783, leaves out s) or
the mean of the *other* members (RLOO, arXiv:2402.14740); s is the group's deviation with ddof 1, or 1 - eps without
`std`. Standard library only: the tool must start without numpy. Sums are exactly rounded (math.fsum).

Two traps that neighbours fell into are closed here. Equal rewards are found on the raw values (max == min) before any
arithmetic, so they give exactly 0 and never a rounding residue over eps. The deviation is taken from differences to the
mean, never as E[x^2] - E[x]^2, and over the whole group, never leave-one-out: without one member the others may all
agree, and the quotient is then meaningless (our choice: the RLOO paper divides by nothing).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

EPSILON = 1e-6
BASELINES = ("mean", "rloo")


def zero_variance(rewards: Sequence[float]) -> bool:
    """Whether a group carries no signal: all rewards equal, as raw values; true of a group of one and of none.

    >>> zero_variance([0.3] * 8), zero_variance([0.3, 0.1 + 0.2])
    (True, False)
    """
    return not rewards or max(rewards) == min(rewards)


def group_advantages(
    rewards: Sequence[float],
    *,
    std: bool = True,
    baseline: str = "mean",
    weights: Sequence[float] | None = None,
    raw_single: bool = False,
) -> list[float]:
    """The advantage of each member of one group.

    Args:
        rewards: [G] finite rewards; members without a reward are left out by the caller.
        std: divide by the deviation plus 1e-6.
        baseline: "mean" of the group, or "rloo", the mean of the others.
        weights: [G] how often a member counts in mean and deviation; the number of its steps gives the all-row
            statistics of verl-agent (sheet gaca, 2.2 item 2), None counts each once (textbook).
        raw_single: a group whose statistics rest on a single value keeps mean 0 and deviation 1, so that its
            advantage is the raw reward, as in verl (`--compat verl`); otherwise it is 0.

    Returns:
        [G] advantages; all exactly 0 where the rewards are equal.

    >>> [round(a, 4) for a in group_advantages([10, 0, 0], std=False)]
    [6.6667, -3.3333, -3.3333]
    """
    if baseline not in BASELINES:
        raise ValueError(f"unknown baseline {baseline!r}, expected one of {', '.join(BASELINES)}")
    counts = [1.0] * len(rewards) if weights is None else list(weights)
    total = math.fsum(counts)
    if raw_single and len(rewards) == 1 and total == 1:
        return [reward / (1 + EPSILON) if std else float(reward) for reward in rewards]
    if zero_variance(rewards) or total == 0:
        return [0.0] * len(rewards)
    mean = math.fsum(count * reward for count, reward in zip(counts, rewards, strict=True)) / total
    centred = [reward - mean for reward in rewards]
    # One more pass: what rounding left in the mean comes out, so that the advantages of a group sum to 0.
    rest = math.fsum(count * value for count, value in zip(counts, centred, strict=True)) / total
    centred = [value - rest for value in centred]
    scale = 1.0
    if std:
        squares = math.fsum(count * value * value for count, value in zip(counts, centred, strict=True))
        scale = math.sqrt(squares / (total - 1)) + EPSILON if total > 1 else 1 + EPSILON
    if baseline == "rloo":
        # r_i - mean of the others = (r_i - mean) * W / (W - w_i). One member with all the weight has no others.
        others = [total - count for count in counts]
        centred = [value * total / other if other > 0 else 0.0 for value, other in zip(centred, others, strict=True)]
    return [value / scale + 0.0 for value in centred]


def share_without_signal(pass_rate: float, group_size: int) -> float:
    """The share of groups whose members all pass or all fail, p^G + (1-p)^G, at independent passes of rate p.

    >>> round(share_without_signal(0.18, 2), 2)
    0.7
    """
    return float(pass_rate**group_size + (1 - pass_rate) ** group_size)
