r"""GiGPO: credit for a step from its episode and from the other visits of the same state (arXiv:2505.10978).

    A_{i,t} = A^E_i + omega A^S_{i,t}

The episode part compares whole attempts of a group (paper eq. 3); the step part compares discounted returns from the
same *anchor*, an equal observation anywhere in the group, across attempts and across time (eqs. 5-7). Facts that the
paper leaves open are those of the authors' code, as the sheet records them (gaca.md, section 2.2).

Suffixes: R steps of a batch (steps of an attempt stand together, in time order), N attempts, L labels. Arithmetic is
float64 numpy over whole batches; there is no loop over steps. numpy is imported when called, never before.
"""

# ruff: noqa: N802, N815 (axis suffixes, as in arguments and variables)

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from strop.core.credit.grpo import EPSILON

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Floats: TypeAlias = NDArray[np.float64]
    Ints: TypeAlias = NDArray[np.int64]
    Bools: TypeAlias = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The numbers of some whole groups. Every attempt of the batch counts, also one without steps.

    group_N: the group of each attempt, 0 ... num_groups - 1.   reward_N: episode rewards, undiscounted.
    length_N: steps of each attempt.   reward_R, valid_R, nll_R: per step; nll_R is NaN where it is missing.
    anchor_R: equal numbers, all below R, where steps share group and anchor (`anchor_labels`).
    """

    group_N: Ints
    reward_N: Floats
    length_N: Ints
    reward_R: Floats
    valid_R: Bools
    anchor_R: Ints
    nll_R: Floats

    @property
    def trajectory_R(self) -> Ints:
        """The attempt of each step."""
        import numpy as np

        return np.repeat(np.arange(len(self.length_N)), self.length_N)


@dataclass(frozen=True, slots=True)
class GigpoOptions:
    """discount: gamma of the step returns.   std: divide by deviations (`mean_std_norm`), or not (`mean_norm`).

    all_rows: statistics of the episode part over all steps of a group, so that long attempts weigh more (verl-agent's
    default, `cross_steps`), or over attempts (textbook GRPO).   invalid_penalty: taken off a step's own episode score
    and return when its action is invalid (0.1 in the paper, where success earns 10); never passed to earlier steps.
    step_weight: omega.   compat_verl: a group whose statistics rest on one value keeps the raw score (else 0), and
    statistics over attempts read an attempt's penalised *first* step.
    """

    discount: float = 0.95
    std: bool = True
    all_rows: bool = True
    invalid_penalty: float = 0.1
    step_weight: float = 1.0
    compat_verl: bool = False


@dataclass(frozen=True, slots=True)
class CreditParts:
    """What the advantages are mixed from. `anchor_size_R` is the number of steps that share a step's anchor."""

    return_R: Floats
    episode_R: Floats
    step_R: Floats
    anchor_size_R: Ints
    episode_N: Floats


def discounted_returns(reward_R: Floats, trajectory_R: Ints, discount: Floats | float) -> Floats:
    """R_t = sum over k >= t of discount^(k-t) r_k within each attempt (GiGPO eq. 5).

    `discount` is one number, or one a step, the same for all steps of an attempt.

    Doubles its reach each pass, so a batch takes log2(longest attempt) passes. The order of the additions depends on
    distances alone: steps with equal futures get equal returns to the last bit.

    >>> import numpy as np
    >>> discounted_returns(np.array([0., 0, 10]), np.array([0, 0, 0]), 0.95).tolist()
    [9.025, 9.5, 10.0]
    """
    returns = reward_R.astype(float, copy=True)
    reach, factor = 1, discount
    while reach < len(returns):
        same = trajectory_R[reach:] == trajectory_R[:-reach]
        if not same.any():
            break
        returns[:-reach] += (factor if isinstance(factor, float | int) else factor[:-reach]) * (returns[reach:] * same)
        reach, factor = reach * 2, factor * factor
    return returns


def anchor_labels(group_R: Ints, anchors: Sequence[Hashable]) -> Ints:
    """A number for each step, equal for equal anchors of the same group: the index of the first such step."""
    import numpy as np

    first_seen: dict[tuple[int, Hashable], int] = {}
    keys = zip(group_R.tolist(), anchors, strict=True)
    # setdefault mapped over the steps stays inside the interpreter's C code.
    return np.fromiter(map(first_seen.setdefault, keys, range(len(anchors))), np.int64, len(anchors))


def similar_labels(group_R: Ints, observations: Sequence[str], threshold: float) -> Ints:
    """Labels for observations that are alike: difflib ratio of at least `threshold` (0.95 in verl-agent).

    Greedy, and compared with each cluster's first member only, so the order of steps matters (sheet, 2.2 item 4). Equal
    observations are compared once; upper bounds of the ratio spare most comparisons and change no outcome.
    """
    from difflib import SequenceMatcher

    import numpy as np

    labels = anchor_labels(group_R, observations)
    cluster_R = np.arange(len(labels))
    clusters: dict[int, list[int]] = {}
    matcher = SequenceMatcher(None)
    for row in np.unique(labels).tolist():
        founders = clusters.setdefault(int(group_R[row]), [])
        for founder in founders:
            matcher.set_seqs(observations[row], observations[founder])
            bounds = (matcher.real_quick_ratio, matcher.quick_ratio, matcher.ratio)
            if all(bound() >= threshold for bound in bounds):
                cluster_R[row] = founder
                break
        else:
            founders.append(row)
    return cluster_R[labels]


@dataclass(frozen=True, slots=True)
class Centre:
    """Mean and divisor of each label, for values that carry labels; `is_equal_L`: no signal, all values the same."""

    mean_L: Floats
    scale_L: Floats
    is_equal_L: Bools
    count_L: Ints

    def apply(self, values: Floats, labels: Ints) -> Floats:
        """(value - mean) / divisor; exactly 0 where the label's values are equal."""
        import numpy as np

        return np.where(self.is_equal_L[labels], 0.0, (values - self.mean_L[labels]) / self.scale_L[labels])


def centre(values: Floats, labels: Ints, num_labels: int, *, std: bool, raw_single: bool = False) -> Centre:
    """Statistics per label: mean, and deviation (ddof 1) + 1e-6 with `std`, else 1.

    Equality is judged on the values as they are, before arithmetic. A label with one value counts as equal, unless
    `raw_single` (verl's way for a group of one): mean 0 and deviation 1.
    """
    import numpy as np

    count = np.bincount(labels, minlength=num_labels)
    low, high = np.full(num_labels, np.inf), np.full(num_labels, -np.inf)
    np.minimum.at(low, labels, values)
    np.maximum.at(high, labels, values)
    is_equal = low >= high
    safe = np.maximum(count, 1)
    mean = np.bincount(labels, values, num_labels) / safe
    # A second pass takes out what rounding left in the first.
    mean += np.bincount(labels, values - mean[labels], num_labels) / safe
    scale = np.ones(num_labels)
    if std:
        squares = np.bincount(labels, (values - mean[labels]) ** 2, num_labels)
        scale = np.sqrt(squares / np.maximum(count - 1, 1)) + EPSILON
    if raw_single:
        single = count == 1
        mean = np.where(single, 0.0, mean)
        scale = np.where(single, 1 + EPSILON if std else 1.0, scale)
        is_equal &= ~single
    return Centre(mean, scale, is_equal | (count == 0), count)


def credit_parts(batch: StepBatch, options: GigpoOptions) -> CreditParts:
    """Returns, A^E and A^S of every step, and A^E of every attempt (without step penalties)."""
    import numpy as np

    trajectory_R = batch.trajectory_R
    penalty_R = np.where(batch.valid_R, 0.0, options.invalid_penalty)
    return_R = discounted_returns(batch.reward_R, trajectory_R, options.discount) - penalty_R
    episode_R, episode_N = _episode_parts(batch, trajectory_R, penalty_R, options)
    anchors = centre(return_R, batch.anchor_R, len(return_R), std=options.std)
    # A singleton has mean = own value, so 0 (sheet, 2.2 item 5); `centre` counts it as equal.
    step_R = anchors.apply(return_R, batch.anchor_R)
    return CreditParts(return_R, episode_R, step_R, anchors.count_L[batch.anchor_R], episode_N)


def _episode_parts(
    batch: StepBatch, trajectory_R: Ints, penalty_R: Floats, options: GigpoOptions
) -> tuple[Floats, Floats]:
    """A^E per step and per attempt (GiGPO eq. 3; sheet, 2.2 items 1 and 2)."""
    import numpy as np

    group_R = batch.group_N[trajectory_R]
    score_R = batch.reward_N[trajectory_R] - penalty_R
    num_groups = int(batch.group_N.max(initial=-1)) + 1
    how: dict[str, Any] = {"std": options.std, "raw_single": options.compat_verl}
    if options.all_rows:
        stats = centre(score_R, group_R, num_groups, **how)
        episode_R = stats.apply(score_R, group_R)
        if not options.compat_verl:
            # One attempt has nothing to be compared with, whatever its own steps' penalties (sheet, 2.3).
            episode_R = np.where((np.bincount(batch.group_N) == 1)[group_R], 0.0, episode_R)
        return episode_R, stats.apply(batch.reward_N, batch.group_N) * (stats.count_L > 0)[batch.group_N]
    value_N = batch.reward_N
    if options.compat_verl:
        first_N = np.cumsum(batch.length_N) - batch.length_N
        has_steps = batch.length_N > 0
        value_N = value_N.copy()
        value_N[has_steps] -= penalty_R[first_N[has_steps]]
    stats = centre(value_N, batch.group_N, num_groups, **how)
    episode_R = stats.apply(score_R, group_R)
    # Attempts may tie while their steps' own penalties differ: those still count, in the units of the rewards.
    tied_R = stats.is_equal_L[group_R]
    return np.where(tied_R, -penalty_R, episode_R) + 0.0, stats.apply(batch.reward_N, batch.group_N)


def gigpo_advantages(parts: CreditParts, options: GigpoOptions) -> Floats:
    """A = A^E + omega A^S (GiGPO eq. 8)."""
    return parts.episode_R + options.step_weight * parts.step_R + 0.0


def gigpo(batch: StepBatch, options: GigpoOptions | None = None) -> tuple[CreditParts, Floats]:
    """GiGPO on whole groups: the parts, and one advantage for each step."""
    options = options or GigpoOptions()
    parts = credit_parts(batch, options)
    return parts, gigpo_advantages(parts, options)
