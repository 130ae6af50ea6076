"""strop advantage: rollouts in, the same rollouts with credit out."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop import __version__
from strop.cli import advantage_options as opt
from strop.cli import model_options as models
from strop.cli.session import Session, tool
from strop.core.errors import DataError, UsageError
from strop.core.records import Record

if TYPE_CHECKING:
    from strop.core.credit.stream import CreditStream, Estimator

ESTIMATORS = ("grpo", "gigpo", "gaca", "gae")
NO_CRITIC = "zero"
GAE_ONLY = ("lambda_", "critic_lambda", "length_adaptive", "critic", "model")
STEP_LEVEL = ("discount", "invalid_penalty", "similarity")
GACA_ONLY = (
    "base_weight", "modulation", "score", "map", "scale", "singleton", "control", "nll_span", "invalid_nll", "seed",
)  # fmt: skip


@tool(reads=("rollout",), writes=("rollout", "metric"))
def command(
    io: Session,
    grpo: opt.Grpo = False,
    gigpo: opt.Gigpo = False,
    gaca: opt.Gaca = False,
    gae: opt.Gae = False,
    std: opt.Std = None,
    episode_stats: opt.EpisodeStats = None,
    baseline: opt.Baseline = None,
    dr_grpo: opt.DrGrpo = False,
    discount: opt.Discount = None,
    step_weight: opt.StepWeight = None,
    invalid_penalty: opt.InvalidPenalty = None,
    similarity: opt.Similarity = None,
    base_weight: opt.BaseWeight = None,
    modulation: opt.Modulation = None,
    score: opt.Score = None,
    map: opt.Map = None,
    scale: opt.Scale = None,
    singleton: opt.Singleton = None,
    control: opt.Control = None,
    nll_span: opt.NllSpan = None,
    invalid_nll: opt.InvalidNll = None,
    seed: opt.Seed = None,
    compat: opt.Compat = None,
    lambda_: opt.PolicyLambda = None,
    critic_lambda: opt.CriticLambda = None,
    length_adaptive: opt.LengthAdaptive = None,
    critic: opt.CriticFolder = None,
    model: models.Model = None,
    device: models.Device = "auto",
    dtype: models.Dtype = "auto",
    offline: models.Offline = False,
    keep_zero_variance: opt.KeepZero = None,
    unordered: opt.Unordered = False,
    diagnose: opt.Diagnose = False,
) -> None:
    """Give credit: an advantage for each rollout or step of a group.

    Exactly one of --grpo, --gigpo, --gaca and --gae says how. A group is found by its id (`group`; without one, the
    attempts at a task in its statement version) and leaves when `group_size` members were seen, failed ones included;
    without `group_size` it waits for the end of the input. A rollout with `error` has no reward, passes without an
    advantage and is counted. Rewards that are all equal give exactly 0.

    Small groups seldom carry a signal: all pass or all fail with probability p^G + (1-p)^G, which is 70 % for groups of
    2 at a pass rate of 0.18. The tool warns about groups of 1 and 2 with the number for the pass rate it saw.

    --gigpo and --gaca need `steps` with `reward` and an `anchor` (or an `observation`, which is hashed). Where no step
    has a reward, the rollout's counts for the last one. --gaca reads `nll`, or makes it of the step's span and the
    chunks' log-probabilities; a step with neither takes the base weight.

    --gae needs no groups: each chunk is a trajectory that earns the rollout's reward with its last sampled token, and
    `values` of a critic say what was expected before each (T1): they are in the records, or --critic writes them. The
    critic's targets leave as `returns`.

    \b
    Examples:
      strop rollout --model M -n 8 tasks.jsonl | strop advantage --grpo | strop train --model M --out runs/1
      strop advantage --grpo --baseline rloo --no-std rollouts.jsonl
      strop advantage --gaca --diagnose --only metric rollouts.jsonl
      strop advantage --gae --critic runs/1 rollouts.jsonl \\
        | strop train --model M --from runs/1 --critic --out runs/2

    \b
    Input fields:
      rollout: id, task, group, group_size, sample, statement_version, reward, success, error,
      steps (reward, anchor, observation, valid, nll, span, action_span, chunk, optimal_advantage),
      chunks (only where nll is made from them; with --gae sampled, values)

    \b
    Output fields:
      rollout: advantage (with --gigpo and --gaca its episode part), credit
      steps: return, episode_advantage, step_advantage, anchor_size, advantage;
      with --gaca also nll_score, weight, and nll or anchor where they were made here
      chunks (--gae): advantages, returns, and with --critic values
      metric (--diagnose): zero_variance_group_share, scored_rollouts, failed_rollouts; for steps
      singleton_share, anchor_size_share, corr_nll_step_advantage, corr_nll_tokens; with --gaca
      weight_mean, weight_std, weight_clip_share, score_std, nll_std_within; and where steps
      carry optimal_advantage gamma, score_curvature, best_modulation, best_modulation_gain,
      best_constant_weight, risk_fixed_weight, risk_used_weight, modulation_improves (1 or 0)

    \b
    Memory:
      the open groups and, for the order, what came behind them; --unordered: the open groups.
      The controls mean_matched and shuffle_batch: the whole input. --gae: one rollout; with
      --critic that model and some packs of rollouts.
    """
    # What the user said and nothing else: an option that the chosen estimator has no use for is an error.
    given = {name: value for name, value in locals().items() if value is not None and name != "io"}
    # Imported here and below, so that a usage error does not wait for it.
    from strop.core.credit.views import MAX_REWARD

    for option, value in given.items():
        if isinstance(value, float) and not abs(value) <= MAX_REWARD:
            raise UsageError(f"--{option.replace('_', '-')}: {value} is not a finite number of reasonable size")
    chosen = [name for name in ESTIMATORS if given.pop(name)]
    if len(chosen) != 1:
        raise UsageError("exactly one of --grpo, --gigpo, --gaca, --gae is needed")
    for shared in ("unordered", "diagnose", "device", "dtype", "offline"):
        given.pop(shared)
    if chosen == ["gae"]:
        return _gae(io, given, diagnose, device=device, dtype=dtype, offline=offline)
    from strop.core.credit.stream import CreditStream

    estimator, stamp = _estimator(chosen[0], given, diagnose)
    stream = CreditStream(
        estimator, ordered=not unordered, on_bad=io.reject,
        stamp={"tool": io.tool, "version": __version__, "estimator": estimator.name, "options": stamp},
    )  # fmt: skip
    for record in stream.run(io.records(on_lost=stream.lost_line)):
        io.write(record)
    _say(io, stream, estimator)
    if diagnose:
        _diagnose(io, stream, estimator, stamp)
    return None


def _gae(io: Session, given: dict[str, Any], diagnose: bool, **machine: Any) -> None:
    """Rollout by rollout; with a critic a few packs of them at a time."""
    from dataclasses import asdict

    from strop.core.credit.gae import GaeOptions
    from strop.core.credit.tokens import GaeCredit

    names = {
        "discount": "discount", "lambda_": "policy_lambda", "critic_lambda": "critic_lambda",
        "length_adaptive": "length_scale",
    }  # fmt: skip
    given = {name: value for name, value in given.items() if name != "dr_grpo" or value}
    critic, model = given.pop("critic", None), given.pop("model", None)
    if unused := [name for name in given if name not in names]:
        raise UsageError(f"--{unused[0].replace('_', '-')} does not go with --gae")
    if {"lambda_", "length_adaptive"} <= given.keys():
        raise UsageError("--length-adaptive takes the place of --lambda; give one")
    options = GaeOptions(**{names[name]: value for name, value in given.items()})
    stamp = {name: value for name, value in asdict(options).items() if value is not None}
    credit = GaeCredit(options, {"tool": io.tool, "version": __version__, "estimator": "gae", "options": stamp})
    for record in _valued(io, critic, model, **machine):
        try:
            if record.kind == "rollout":
                credit.credit(record)
        except DataError as error:
            io.reject(error, record)
            continue
        io.write(record)
    if credit.num_errors:
        io.note(f"{credit.num_errors} of {credit.num_rollouts} rollouts failed by the machine and passed as they were")
    if credit.num_empty:
        io.warn(f"{credit.num_empty} of {credit.num_rollouts} rollouts hold no sampled token to credit")
    explained = credit.explained_variance
    if explained is not None and explained < 0:
        io.warn(
            f"the critic's values explain {explained:.3g} of the variance of the returns: below 0 they add noise to "
            "the advantages; train the critic alone first"
        )
    if diagnose:
        for metric in credit.metrics():
            io.emit(Record.make("metric", metric), {"estimator": "gae", **stamp})


def _valued(io: Session, critic: Path | None, model: str | None, **machine: Any) -> Iterator[Record]:
    """The input, with the values of a critic where one is named."""
    if critic is None:
        if model is not None:
            raise UsageError("--model names the base of a --critic")
        return io.records()
    from strop.core.train.values import ValueWriter, critic_opener, zero_critic

    opener = zero_critic if str(critic) == NO_CRITIC else critic_opener(critic, model=model, **machine)
    return ValueWriter(opener, io.reject).run(io.records())


def _estimator(name: str, given: dict[str, Any], diagnose: bool) -> tuple[Estimator, dict[str, Any]]:
    """The estimator, and its options as the records will tell them. Raises UsageError for options it has no use for."""
    from strop.core.credit.stream import GrpoEstimator

    dr_grpo = given.pop("dr_grpo")
    foreign = {
        "grpo": ("step_weight", *STEP_LEVEL, *GACA_ONLY, *GAE_ONLY),
        "gigpo": ("baseline", *GACA_ONLY, *GAE_ONLY),
        "gaca": ("baseline", "step_weight", *GAE_ONLY),
    }[name]
    unused = [*(option for option in foreign if option in given), *(["dr_grpo"] if dr_grpo and name != "grpo" else [])]
    if unused:
        raise UsageError(f"--{unused[0].rstrip('_').replace('_', '-')} does not go with --{name}")
    if dr_grpo and (given.get("std") or given.get("baseline") == "rloo"):
        raise UsageError("--dr-grpo is the mean without a deviation; leave --std and --baseline rloo out")
    std = given.pop("std", not dr_grpo)
    all_rows = given.pop("episode_stats", "trajectories" if name == "grpo" else "rows") == "rows"
    compat = given.pop("compat", None)
    drops_equal = not given.pop("keep_zero_variance", name != "grpo")
    stamp = {"std": std, "episode_stats": "rows" if all_rows else "trajectories", "compat": compat}
    if name == "grpo":
        baseline = given.pop("baseline", "mean")
        stamp |= {"baseline": baseline, "dr_grpo": dr_grpo}
        made: Estimator = GrpoEstimator(
            std=std, baseline=baseline, all_rows=all_rows, raw_single=compat == "verl", drops_equal=drops_equal
        )
    else:
        made, more = _step_estimator(name, given, std, all_rows, compat, drops_equal=drops_equal, diagnose=diagnose)
        stamp |= more
    return made, {key: value for key, value in stamp.items() if value is not None}


def _step_estimator(
    name: str, given: dict[str, Any], std: bool, all_rows: bool, compat: str | None, **how: Any
) -> tuple[Estimator, dict[str, Any]]:
    from dataclasses import asdict

    # numpy is loaded from here on, so not for --grpo.
    from strop.core.credit.gaca import GacaOptions
    from strop.core.credit.gigpo import GigpoOptions
    from strop.core.credit.steps import StepEstimator

    nll_span, similarity = given.pop("nll_span", "step"), given.pop("similarity", None)
    first = {key: given.pop(key) for key in ("discount", "step_weight", "invalid_penalty") if key in given}
    gigpo = GigpoOptions(std=std, all_rows=all_rows, compat_verl=compat == "verl", **first)
    stamp = {"discount": gigpo.discount, "invalid_penalty": gigpo.invalid_penalty, "similarity": similarity}
    if name == "gigpo":
        stamp["step_weight"] = gigpo.step_weight
        return StepEstimator(gigpo, similarity=similarity, **how), stamp
    if given.get("map") == "additive":
        given.setdefault("base_weight", 1.0)
    elif given.get("base_weight", 0) > 1:
        raise UsageError("--base-weight: a mixing share lies in [0, 1] (with --map additive it may be more)")
    gaca = GacaOptions(**given)
    made = StepEstimator(gigpo, gaca, similarity=similarity, nll_span=nll_span, **how)
    return made, {**stamp, **asdict(gaca), "nll_span": nll_span}


def _say(io: Session, stream: CreditStream, estimator: Estimator) -> None:
    """What a person should know of the run."""
    tally = stream.tally
    if tally.dropped_groups:
        io.note(
            f"dropped {tally.dropped_groups} of {tally.groups} groups ({tally.dropped_rollouts} rollouts) whose "
            "rewards are all equal: no signal (--keep-zero-variance keeps them with advantage 0)"
        )
    elif tally.equal_groups:
        io.note(
            f"{tally.equal_groups} of {tally.groups} groups have equal rewards and no signal between attempts; they "
            "stay, and a KL term would still move them (--drop-zero-variance drops them)"
        )
    if tally.errors:
        io.note(f"{tally.errors} of {tally.rollouts} rollouts failed by the machine and passed without an advantage")
    if tally.incomplete:
        io.warn(f"{tally.incomplete} groups were not complete at the end of the input (first {tally.first_incomplete})")
    if tally.ungrouped:
        io.warn(f"{tally.ungrouped} rollouts name no group and were grouped by task and statement version")
    if tally.reward_mismatches:
        io.warn(
            f"{tally.reward_mismatches} rollouts have a reward that their steps' rewards do not add up to: the episode "
            "part takes the first, the step part the others"
        )
    if estimator.name == "gaca" and tally.steps_without_nll:
        io.warn(f"{tally.steps_without_nll} of {tally.steps} steps have no nll to go by and took the base weight")
    for line in tally.small_group_warnings():
        io.warn(line)


def _diagnose(io: Session, stream: CreditStream, estimator: Estimator, stamp: dict[str, Any]) -> None:
    """Metric records of the whole run, and the one line that nobody can print from data alone."""
    for metric in [*stream.tally.metrics(), *estimator.metrics(stream.tally)]:
        io.emit(Record.make("metric", metric), {"estimator": estimator.name, **stamp})
    if estimator.name == "gaca" and not stream.tally.steps_with_optimum:
        io.note(
            "whether the weights help cannot be known from these records: the improvement condition needs each step's "
            "`optimal_advantage`, which only a simulation has"
        )
