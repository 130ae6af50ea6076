r"""GACA: how much of a step's credit is the step's own, set by how unsure the policy was there (Liang et al., 2026).

    A_{i,t} = (1 - w_{i,t}) A^E_i + w_{i,t} A^S_{i,t}

u is the mean negative log-probability (nats) of a step's own tokens as sampled. A step above its attempt's mean leans
on the step part, one below on the episode part; no critic, no further rollouts, no further forward pass [paper].

The published text fixes no formula for w. It says: two hand-set numbers, a base weight and a modulation strength;
strength 0 is fixed mixing; the effect is linear in the strength at first order; a control matches the mean weight. The
simplest form that meets all of this is the default here [inferred, sheet gaca.md 2.3]:

    z = (u - mean_i u) / std_i u        population deviation over the steps of attempt i; 0 below 1e-8 or for one step
    w = clip(w0 + kappa clip(z, -2, 2), 0, 1)          w0 = 0.5, kappa = 0.25

Every other reading is a named option. w carries no gradient: it is a number in a record. Suffixes as in gigpo.py.
"""

# ruff: noqa: N815 (axis suffixes, as in arguments and variables)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.core.credit.gigpo import CreditParts, StepBatch

if TYPE_CHECKING:
    from strop.core.credit.gigpo import Bools, Floats, Ints

SCORES = ("zscore", "ratio")
MAPS = ("linear", "sigmoid", "additive")
SINGLETONS = ("episode", "shrink")
CONTROLS = (
    "none", "fixed", "mean_matched", "shuffle_traj", "shuffle_batch", "invert", "episode_only", "step_only",
)  # fmt: skip
# These need all scores or weights of a batch before the first advantage: the whole input is one batch.
BATCH_CONTROLS = ("mean_matched", "shuffle_batch")
INVALID_NLL = ("keep", "exclude")
_CHOICES = {
    "score": SCORES, "map": MAPS, "singleton": SINGLETONS, "control": CONTROLS, "invalid_nll": INVALID_NLL,
}  # fmt: skip

MAX_SCORE = 2.0  # [inferred] one odd step must not swing its weight alone
MIN_DEVIATION = 1e-8  # [inferred] below it an attempt's steps are equally sure


@dataclass(frozen=True, slots=True)
class GacaOptions:
    """The weight's form; all defaults [inferred] (sheet, 2.3).

    base_weight: w0 (omega0 of the additive map).   modulation: kappa; 0 is fixed mixing.
    score: "zscore", or "ratio" (u - mean)/max(mean, 1e-8).
    map: "linear"; "sigmoid" s(logit(w0) + kappa z); "additive" A^E + max(0, w0 (1 + kappa z)) A^S, which is GiGPO at
    kappa = 0.   scale: a factor on the advantage; 2 makes the convex mix at w = 0.5 equal to GiGPO with omega = 1.
    singleton: a step whose anchor nobody else visited has A^S = 0. "episode" gives it w = 0, "shrink" takes the
    formula literally, so that the mix shrinks to (1 - w) A^E, most where the policy was unsure.
    control: the ablations (sheet, 2.8).   invalid_nll: "keep", or "exclude" invalid actions from an attempt's mean and
    deviation, since malformed outputs often are unlikely ones.   seed: for the shuffles.
    """

    base_weight: float = 0.5
    modulation: float = 0.25
    score: str = "zscore"
    map: str = "linear"
    scale: float = 1.0
    singleton: str = "episode"
    control: str = "none"
    invalid_nll: str = "keep"
    seed: int = 0

    def __post_init__(self) -> None:
        """Raises ValueError for a choice that does not exist."""
        for name, known in _CHOICES.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {getattr(self, name)!r}, expected one of {', '.join(known)}")


@dataclass(frozen=True, slots=True)
class Weights:
    """score_R: z as it acted (after shuffling, inverting and clipping).   weight_R: w (omega_t of the additive map).

    base_R: what the weight is at kappa = 0, 0 where the singleton rule took over.   is_clipped_R: cut at a bound.
    """

    score_R: Floats
    weight_R: Floats
    base_R: Floats
    is_clipped_R: Bools


def relative_scores(
    nll_R: Floats, trajectory_R: Ints, num_trajectories: int, *, score: str = "zscore", counts_R: Bools | None = None
) -> Floats:
    """How unsure the policy was at each step, against the mean of the step's own attempt.

    A step without nll (NaN) scores 0 and stays out of its attempt's statistics, as do steps that `counts_R` rules out.
    """
    import numpy as np

    present = ~np.isnan(nll_R)
    used = present if counts_R is None else present & counts_R
    count = np.maximum(np.bincount(trajectory_R, used, num_trajectories), 1)
    mean = np.bincount(trajectory_R, np.where(used, nll_R, 0.0), num_trajectories) / count
    apart = np.where(present, nll_R - mean[trajectory_R], 0.0)
    mean += np.bincount(trajectory_R, np.where(used, apart, 0.0), num_trajectories) / count
    apart = np.where(present, nll_R - mean[trajectory_R], 0.0)
    squares = np.bincount(trajectory_R, np.where(used, apart**2, 0.0), num_trajectories)
    deviation = np.sqrt(squares / count)
    if score == "ratio":
        divisor = np.maximum(mean, MIN_DEVIATION)
    else:
        divisor = np.where(deviation < MIN_DEVIATION, np.inf, deviation)
    # With nothing left to compare with, or with a single step, there is no relative score.
    alone = np.bincount(trajectory_R, used, num_trajectories) < 1
    return np.where(alone[trajectory_R], 0.0, apart / divisor[trajectory_R]) + 0.0


def controlled_scores(
    score_R: Floats, nll_R: Floats, trajectory_R: Ints, options: GacaOptions, keys: Sequence[str]
) -> Floats:
    """The scores under `options.control`. Shuffles permute them among steps that have an nll.

    keys: one name for each attempt; a shuffle draws from (seed, name), so that it does not depend on what else is in
    the stream.
    """
    import numpy as np

    if options.control == "invert":
        return -score_R + 0.0
    if options.control not in ("shuffle_traj", "shuffle_batch"):
        return score_R
    from strop.core.seeds import derive_seed

    lengths = np.bincount(trajectory_R, minlength=len(keys))
    draws = [
        np.random.Generator(np.random.Philox(derive_seed(options.seed, "gaca", key))).random(length)
        for key, length in zip(keys, lengths.tolist(), strict=True)
    ]
    draw_R = np.concatenate([*draws, np.empty(0)])
    rows = np.flatnonzero(~np.isnan(nll_R))
    batch_wide = options.control == "shuffle_batch"
    order = np.lexsort((draw_R[rows],) if batch_wide else (draw_R[rows], trajectory_R[rows]))
    shuffled = score_R.copy()
    shuffled[rows] = score_R[rows[order]]
    return shuffled


def step_weights(score_R: Floats, is_singleton_R: Bools, options: GacaOptions) -> Weights:
    """The weight of each step under map, singleton rule and control."""
    import numpy as np

    base_R = np.full(len(score_R), options.base_weight)
    score_R, weight_R, is_clipped_R = _mapped(score_R, options)
    if options.control in ("episode_only", "step_only"):
        # Literal controls: step_only is A^S alone, 0 at singletons.
        whole = base_R if options.map == "additive" else np.ones(len(score_R))
        return Weights(score_R, whole * (options.control == "step_only"), base_R, is_clipped_R & False)
    # In the additive form A^S = 0 already leaves a singleton its whole A^E.
    ruled_R = is_singleton_R & (options.singleton == "episode" and options.map != "additive")
    if options.control == "mean_matched" and not ruled_R.all():
        # Over the steps where the weight acts, so that the mean over all steps is matched as well.
        weight_R = np.full(len(weight_R), weight_R[~ruled_R].mean())
    weight_R, base_R, score_R = (np.where(ruled_R, 0.0, values) for values in (weight_R, base_R, score_R))
    return Weights(score_R, weight_R, base_R, is_clipped_R & ~ruled_R)


def _mapped(score_R: Floats, options: GacaOptions) -> tuple[Floats, Floats, Bools]:
    """The score as it acts, the weight, and whether the weight was cut at a bound."""
    import numpy as np

    base, strength = options.base_weight, 0.0 if options.control == "fixed" else options.modulation
    if options.map == "sigmoid":
        return score_R, _sigmoid_about(base, strength * score_R), np.zeros(len(score_R), bool)
    if options.map == "additive":
        free_R = base * (1 + strength * score_R)
        return score_R, np.maximum(free_R, 0.0), free_R < 0
    score_R = np.clip(score_R, -MAX_SCORE, MAX_SCORE)
    free_R = base + strength * score_R
    return score_R, np.clip(free_R, 0.0, 1.0), (free_R < 0) | (free_R > 1)


def _sigmoid_about(base: float, shift_R: Floats) -> Floats:
    """s(logit(base) + shift), without a logarithm of 0: base e^x / (base e^x + 1 - base)."""
    import numpy as np

    ratio = np.exp(np.clip(shift_R, -500, 500))  # exp stays finite in float64
    return base * ratio / (base * ratio + (1 - base))


def mix(parts: CreditParts, weights: Weights, options: GacaOptions) -> Floats:
    """The advantage: scale ((1 - w) A^E + w A^S); additive: scale (A^E + w A^S)."""
    step_share = weights.weight_R * parts.step_R
    if options.map == "additive":
        episode_share = 0.0 if options.control == "step_only" else parts.episode_R
    else:
        episode_share = (1 - weights.weight_R) * parts.episode_R
    return options.scale * (episode_share + step_share) + 0.0


def gaca(
    batch: StepBatch, parts: CreditParts, options: GacaOptions | None = None, keys: Sequence[str] | None = None
) -> tuple[Weights, Floats]:
    """GACA on whole groups, from GiGPO's parts: the weights, and one advantage for each step.

    keys: a name for each attempt, needed by the shuffle controls (default: its place).
    """
    options = options or GacaOptions()
    trajectory_R = batch.trajectory_R
    num = len(batch.length_N)
    counts_R = batch.valid_R if options.invalid_nll == "exclude" else None
    score_R = relative_scores(batch.nll_R, trajectory_R, num, score=options.score, counts_R=counts_R)
    score_R = controlled_scores(
        score_R, batch.nll_R, trajectory_R, options, keys if keys is not None else [str(i) for i in range(num)]
    )
    weights = step_weights(score_R, parts.anchor_size_R == 1, options)
    return weights, mix(parts, weights, options)
