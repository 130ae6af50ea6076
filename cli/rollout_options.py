"""The options of `strop rollout`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Samples = Annotated[int, typer.Option("-n", "--samples", min=1, help="Samples of each task: the size of its group.")]
Seed = Annotated[
    int, typer.Option("--seed", help="Each sample's own seed derives from this, the task's id and its index.")
]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0.0, help="0 is greedy. Unset: the task's hint, else 1.", show_default=False),
]
TopP = Annotated[
    float | None,
    typer.Option(
        "--top-p",
        min=0.0,
        max=1.0,
        help="Keep the smallest set of tokens of this mass; 1 keeps all. Below 1, `train` may refuse (see its help).",
        show_default=False,
    ),
]
TopK = Annotated[
    int | None, typer.Option("--top-k", min=0, help="Keep the K likeliest tokens; 0 keeps all.", show_default=False)
]
MaxTokens = Annotated[
    int | None,
    typer.Option(
        "--max-tokens", min=1, help="Most tokens of a response. Unset: the task's hint, else 256.", show_default=False
    ),
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", help="End a response at this text (several times; \\n is a line end).", show_default=False),
]
Concurrency = Annotated[
    int,
    typer.Option(
        "--concurrency", min=0, help="Samples in flight; 0 lets the engine choose. It changes speed, not samples."
    ),
]
Unordered = Annotated[
    bool, typer.Option("--unordered", help="Write rollouts as they finish, not in the order of the tasks.")
]
Rescore = Annotated[bool, typer.Option("--rescore", help="Sample nothing: verify the rollouts of the input again.")]
TasksFile = Annotated[
    Path | None, typer.Option("--tasks", metavar="FILE", help="With --rescore: tasks that do not travel in the stream.")
]
MetricsFile = Annotated[
    Path | None,
    typer.Option(
        "--metrics",
        metavar="FILE",
        help="Append metric records of the run (tokens, seconds, pass rate, stops) to FILE.",
    ),
]
First = Annotated[
    int,
    typer.Option("--first", metavar="K", min=0, help="Cancel the rest of a group once K of it have finished; long "
                 "attempts are then missing more often than short ones. 0: none."),
]  # fmt: skip
HorizonName = Annotated[
    Literal["elastic", "fixed", "tti", "scaling-inter", "tti-code", "scaling-code"] | None,
    typer.Option("--horizon", metavar="NAME", show_default=False,
                 help="Let the cap on turns follow a schedule (see strop-horizon), in place of --max-turns."),
]  # fmt: skip
HorizonState = Annotated[
    Path | None,
    typer.Option("--horizon-state", metavar="FILE", show_default=False,
                 help="Where the schedule stands; several runs may share it. Made at the first use."),
]  # fmt: skip
HorizonEvery = Annotated[
    int, typer.Option("--horizon-every", metavar="N", min=0, help="Rollouts of a step; 0: those of one run.")
]
HorizonSet = Annotated[
    str,
    typer.Option("--horizon-set", metavar="NAME=VALUE,...", show_default=False,
                 help="Constants of the schedule: preset, start, rate, headroom, percentile, window, min_successes, "
                 "low, high, order, steps, stages (15/20/30), epochs."),
]  # fmt: skip
RewardName = Annotated[
    Literal["pass", "assertions", "assertions-ratio", "majority", "self-certainty"] | None,
    typer.Option(
        "--reward",
        help="pass: 1 for a success. assertions: how many passed, over --reward-scale (T1). assertions-ratio: 0.4 of "
        "the share that passed, 1 for a success. Unset: what the verifier says. With --rescore it grades what is "
        "stored, and there are two that need no label: majority, 1 for the answer most of the group give (TTRL), and "
        "self-certainty, the policy's mean KL(U || p) a token (Intuitor; needs --model).",
        show_default=False,
    ),
]
RewardScale = Annotated[
    float, typer.Option("--reward-scale", metavar="S", min=0, help="For --reward assertions, the same for a whole run.")
]
LengthPenalty = Annotated[
    float,
    typer.Option("--length-penalty", metavar="ALPHA", min=0, help="--reward pass: a success of n tokens is worth "
                 "1 - ALPHA ln(n / --free-tokens) where it is longer (FrogNano, which tells neither)."),
]  # fmt: skip
FreeTokens = Annotated[int, typer.Option("--free-tokens", metavar="N", min=0, help="See --length-penalty.")]
TruncatedReward = Annotated[
    float | None,
    typer.Option("--truncated-reward", metavar="R", show_default=False,
                 help="--reward pass: what a success is worth whose episode was cut off (FrogNano: 0.5)."),
]  # fmt: skip
RoutingFile = Annotated[
    Path | None,
    typer.Option("--routing", metavar="FILE", show_default=False,
                 help="Mixture of experts: append to FILE which experts were used, for `train` to use the same ones."),
]  # fmt: skip
