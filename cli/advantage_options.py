"""The options of `strop advantage`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Grpo = Annotated[bool, typer.Option("--grpo", help="One advantage a rollout, from the rewards of its group.")]
Gigpo = Annotated[bool, typer.Option("--gigpo", help="One a step: episode part plus omega times the step part.")]
Gaca = Annotated[bool, typer.Option("--gaca", help="One a step: both parts mixed by how unsure the policy was there.")]
Gae = Annotated[bool, typer.Option("--gae", help="One a token, from the values of a critic (`chunks` with `values`).")]
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
    typer.Option("--discount", min=0, max=1, help="gamma of the step returns, or with --gae of the tokens. [default: "
                 "0.95; --gae: 1]", show_default=False),
]  # fmt: skip
PolicyLambda = Annotated[
    float | None,
    typer.Option("--lambda", min=0, max=1, help="--gae: lambda of the advantages. [default: 1]", show_default=False),
]
CriticLambda = Annotated[
    float | None,
    typer.Option("--critic-lambda", min=0, max=1, help="--gae: lambda of the critic's targets; VAPO decouples it from "
                 "the policy's. [default: 1]", show_default=False),
]  # fmt: skip
LengthAdaptive = Annotated[
    float | None,
    typer.Option("--length-adaptive", metavar="SCALE", min=1e-6, help="--gae: instead of --lambda 1 - 1/(SCALE l) for "
                 "l sampled tokens, at least 0 (VAPO: 0.05).", show_default=False),
]  # fmt: skip
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
CriticFolder = Annotated[
    Path | None,
    typer.Option("--critic", metavar="DIR", show_default=False,
                 help="--gae: write `values` with the critic of this checkpoint of `train` first; `zero` is a critic "
                 "that expects nothing, to begin with. Unset: the records carry them."),
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
