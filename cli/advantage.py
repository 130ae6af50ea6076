"""strop advantage: rollouts in, the same rollouts with credit out."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer

from strop import __version__
from strop.cli.session import Session, tool
from strop.core.credit.stream import CreditStream, Estimator, GrpoEstimator
from strop.core.credit.views import MAX_REWARD
from strop.core.errors import UsageError
from strop.core.records import Record

Grpo = Annotated[bool, typer.Option("--grpo", help="One advantage a rollout, from the rewards of its group.")]
Gigpo = Annotated[bool, typer.Option("--gigpo", help="One a step: episode part plus omega times the step part.")]
Gaca = Annotated[bool, typer.Option("--gaca", help="One a step: both parts mixed by how unsure the policy was there.")]
Std = Annotated[
    bool | None,
    typer.Option(
        "--std/--no-std",
        help="Divide by the group's deviation, or not. [default: std] Dividing makes every group count alike, whatever "
        "the scale of its rewards, and so weighs up the groups that are nearly all right or nearly all wrong; without, "
        "the middling ones weigh most and the scale of the rewards is that of the updates.",
        show_default=False,
    ),
]
EpisodeStats = Annotated[
    Literal["rows", "trajectories"] | None,
    typer.Option(
        "--episode-stats",
        help="Mean and deviation of a group over all steps (long attempts weigh more) or over attempts. [default: "
        "trajectories with --grpo (textbook), rows with --gigpo and --gaca (verl-agent)]",
        show_default=False,
    ),
]
Baseline = Annotated[
    Literal["mean", "rloo"] | None,
    typer.Option(
        "--baseline", help="--grpo: compare with the group's mean, or with the mean of the others. [default: mean]",
        show_default=False,
    ),
]  # fmt: skip
DrGrpo = Annotated[
    bool,
    typer.Option(
        "--dr-grpo",
        help="--grpo in the form of Dr. GRPO: the reward less the mean, no deviation. Its other half is a loss that "
        "does not divide by a response's length: train with --denominator constant.",
    ),
]
Discount = Annotated[
    float | None,
    typer.Option("--discount", min=0, max=1, help="gamma of the step returns. [default: 0.95]", show_default=False),
]
StepWeight = Annotated[
    float | None,
    typer.Option("--step-weight", help="--gigpo: omega, the weight of the step part. [default: 1]", show_default=False),
]
InvalidPenalty = Annotated[
    float | None,
    typer.Option(
        "--invalid-penalty", min=0, show_default=False,
        help="Taken off a step whose `valid` is false, and off no other; 0 for none. [default: 0.1, made for rewards "
        "of 10]",
    ),
]  # fmt: skip
Similarity = Annotated[
    float | None,
    typer.Option(
        "--similarity", min=0, max=1, show_default=False,
        help="Anchor steps whose observations (text) are at least this alike (difflib; verl-agent: 0.95), the first "
        "one seen deciding. Unset: equal anchors only.",
    ),
]  # fmt: skip
BaseWeight = Annotated[
    float | None,
    typer.Option("--base-weight", min=0, help="--gaca: w0, the mean weight of the step part. [default: 0.5; with "
                 "--map additive omega0, 1]", show_default=False),
]  # fmt: skip
Modulation = Annotated[
    float | None,
    typer.Option("--modulation", min=0, help="--gaca: kappa, how far uncertainty moves the weight; 0 is fixed mixing. "
                 "[default: 0.25]", show_default=False),
]  # fmt: skip
Score = Annotated[
    Literal["zscore", "ratio"] | None,
    typer.Option("--score", help="--gaca: a step's nll against its attempt's mean, in deviations or as a share of the "
                 "mean. [default: zscore]", show_default=False),
]  # fmt: skip
Map = Annotated[
    Literal["linear", "sigmoid", "additive"] | None,
    typer.Option("--map", help="--gaca: clip(w0 + kappa z), s(logit(w0) + kappa z), or GiGPO's sum with omega "
                 "max(0, w0 (1 + kappa z)). [default: linear]", show_default=False),
]  # fmt: skip
Scale = Annotated[
    float | None,
    typer.Option("--scale", help="--gaca: a factor on all advantages; at 2 fixed mixing by halves equals --gigpo. "
                 "[default: 1]", show_default=False),
]  # fmt: skip
Singleton = Annotated[
    Literal["episode", "shrink"] | None,
    typer.Option("--singleton", help="--gaca: a state nobody else saw gets the episode part whole, or (literal "
                 "formula) only 1 - w of it. [default: episode]", show_default=False),
]  # fmt: skip
Control = Annotated[
    Literal[
        "none", "fixed", "mean_matched", "shuffle_traj", "shuffle_batch", "invert", "episode_only", "step_only"
    ] | None,
    typer.Option("--control", help="--gaca: an ablation. mean_matched and shuffle_batch take the whole input as one "
                 "batch and hold it. [default: none]", show_default=False),
]  # fmt: skip
NllSpan = Annotated[
    Literal["step", "action"] | None,
    typer.Option("--nll-span", help="--gaca: nll of all sampled tokens of a step, or of its `action_span` alone, "
                 "without the reasoning. [default: step]", show_default=False),
]  # fmt: skip
InvalidNll = Annotated[
    Literal["keep", "exclude"] | None,
    typer.Option("--invalid-nll", help="--gaca: whether steps with `valid` false enter an attempt's mean nll. "
                 "[default: keep]", show_default=False),
]  # fmt: skip
Seed = Annotated[
    int | None, typer.Option("--seed", help="--gaca: for the shuffling controls. [default: 0]", show_default=False)
]
Compat = Annotated[
    Literal["verl"] | None,
    typer.Option("--compat", help="verl: a group of one keeps its raw reward (otherwise 0), and statistics over "
                 "trajectories read the first step's penalised reward.", show_default=False),
]  # fmt: skip
KeepZero = Annotated[
    bool | None,
    typer.Option(
        "--keep-zero-variance/--drop-zero-variance",
        help="Groups whose rewards are all equal: keep them with advantage 0 (they teach nothing but still get the "
        "gradient of a KL term), or drop them, counted. [default: drop with --grpo; keep with --gigpo and --gaca, "
        "whose steps can still differ]",
        show_default=False,
    ),
]
Unordered = Annotated[
    bool, typer.Option("--unordered", help="Write a group when it is complete, not in the order of the input.")
]
Diagnose = Annotated[
    bool, typer.Option("--diagnose", help="Add metric records at the end: what the credit rests on, and whether the "
                       "weights of --gaca can help.")
]  # fmt: skip

STEP_LEVEL = ("discount", "invalid_penalty", "similarity")
GACA_ONLY = (
    "base_weight", "modulation", "score", "map", "scale", "singleton", "control", "nll_span", "invalid_nll", "seed",
)  # fmt: skip


@tool(reads=("rollout",), writes=("rollout", "metric"))
def command(
    io: Session,
    grpo: Grpo = False,
    gigpo: Gigpo = False,
    gaca: Gaca = False,
    std: Std = None,
    episode_stats: EpisodeStats = None,
    baseline: Baseline = None,
    dr_grpo: DrGrpo = False,
    discount: Discount = None,
    step_weight: StepWeight = None,
    invalid_penalty: InvalidPenalty = None,
    similarity: Similarity = None,
    base_weight: BaseWeight = None,
    modulation: Modulation = None,
    score: Score = None,
    map: Map = None,
    scale: Scale = None,
    singleton: Singleton = None,
    control: Control = None,
    nll_span: NllSpan = None,
    invalid_nll: InvalidNll = None,
    seed: Seed = None,
    compat: Compat = None,
    keep_zero_variance: KeepZero = None,
    unordered: Unordered = False,
    diagnose: Diagnose = False,
) -> None:
    """Give credit: an advantage for each rollout or step of a group.

    Exactly one of --grpo, --gigpo and --gaca says how. A group is found by its id (`group`; without one, the attempts
    at a task in its statement version) and leaves when `group_size` members were seen, failed ones included; without
    `group_size` it waits for the end of the input. A rollout with `error` has no reward, passes without an advantage
    and is counted. Rewards that are all equal give exactly 0.

    Small groups seldom carry a signal: all pass or all fail with probability p^G + (1-p)^G, which is 70 % for groups of
    2 at a pass rate of 0.18. The tool warns about groups of 1 and 2 with the number for the pass rate it saw.

    --gigpo and --gaca need `steps` with `reward` and an `anchor` (or an `observation`, which is hashed). Where no step
    has a reward, the rollout's counts for the last one. --gaca reads `nll`, or makes it of the step's span and the
    chunks' log-probabilities; a step with neither takes the base weight.

    \b
    Examples:
      strop rollout --model M -n 8 tasks.jsonl | strop advantage --grpo | strop train --model M --out runs/1
      strop advantage --grpo --baseline rloo --no-std rollouts.jsonl
      strop advantage --gaca --diagnose --only metric rollouts.jsonl

    \b
    Input fields:
      rollout: id, task, group, group_size, sample, statement_version, reward, success, error,
      steps (reward, anchor, observation, valid, nll, span, action_span, chunk, optimal_advantage),
      chunks (only where nll is made from them)

    \b
    Output fields:
      rollout: advantage (with --gigpo and --gaca its episode part), credit
      steps: return, episode_advantage, step_advantage, anchor_size, advantage;
      with --gaca also nll_score, weight, and nll or anchor where they were made here
      metric (--diagnose): zero_variance_group_share, scored_rollouts, failed_rollouts; for steps
      singleton_share, anchor_size_share, corr_nll_step_advantage, corr_nll_tokens; with --gaca
      weight_mean, weight_std, weight_clip_share, score_std, nll_std_within; and where steps
      carry optimal_advantage gamma, score_curvature, best_modulation, best_modulation_gain,
      best_constant_weight, risk_fixed_weight, risk_used_weight, modulation_improves (1 or 0)

    \b
    Memory:
      the open groups and, for the order, what came behind them; --unordered: the open groups.
      The controls mean_matched and shuffle_batch: the whole input.
    """
    # What the user said and nothing else: an option that the chosen estimator has no use for is an error.
    given = {name: value for name, value in locals().items() if value is not None and name != "io"}
    for option, value in given.items():
        if isinstance(value, float) and not abs(value) <= MAX_REWARD:
            raise UsageError(f"--{option.replace('_', '-')}: {value} is not a finite number of reasonable size")
    chosen = [name for name in ("grpo", "gigpo", "gaca") if given.pop(name)]
    if len(chosen) != 1:
        raise UsageError("exactly one of --grpo, --gigpo, --gaca is needed")
    for shared in ("unordered", "diagnose"):
        given.pop(shared)
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


def _estimator(name: str, given: dict[str, Any], diagnose: bool) -> tuple[Estimator, dict[str, Any]]:
    """The estimator, and its options as the records will tell them. Raises UsageError for options it has no use for."""
    dr_grpo = given.pop("dr_grpo")
    foreign = {
        "grpo": ("step_weight", *STEP_LEVEL, *GACA_ONLY),
        "gigpo": ("baseline", *GACA_ONLY),
        "gaca": ("baseline", "step_weight"),
    }[name]
    unused = [*(option for option in foreign if option in given), *(["dr_grpo"] if dr_grpo and name != "grpo" else [])]
    if unused:
        raise UsageError(f"--{unused[0].replace('_', '-')} does not go with --{name}")
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
