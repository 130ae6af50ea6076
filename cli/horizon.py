"""strop horizon: rollouts in, the track of the cap on their turns out."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from strop.cli.session import Session, tool
from strop.core.errors import DataError, UsageError
from strop.core.records import Record
from strop.core.rollout.horizon import PRESETS, Elastic, Planned, with_changes
from strop.core.rollout.horizon_track import Track

Method = Annotated[
    Literal["elastic", "fixed", "tti", "scaling-inter", "tti-code", "scaling-code"],
    typer.Option(
        "--method", metavar="NAME",
        help="elastic: follow the successes. The others follow the clock: fixed (--start for ever), tti (stages), "
        "scaling-inter (linear from --low to --high), and both as their released code has them (tti-code, "
        "scaling-code).",
    ),
]  # fmt: skip
Preset = Annotated[
    Literal["paper", "code", "code-appworld", "code-bfcl"],
    typer.Option("--preset", help="Whose constants; the options below replace single ones."),
]
Start = Annotated[
    float | None, typer.Option("--start", metavar="TURNS", min=1, help="The first cap. [paper: 15]", show_default=False)
]
Rate = Annotated[
    float | None,
    typer.Option("--rate", metavar="ALPHA", help="How far a step moves the cap to its target. [paper: 0.1]",
                 show_default=False),
]  # fmt: skip
Headroom = Annotated[
    float | None,
    typer.Option("--headroom", metavar="TURNS", help="Turns above the percentile; without any the cap can only "
                 "shrink. [paper: 10]", show_default=False),
]  # fmt: skip
Percentile = Annotated[
    float | None,
    typer.Option("--percentile", metavar="Q", help="Which percentile of successful lengths. [paper: 90]",
                 show_default=False),
]  # fmt: skip
Window = Annotated[
    int | None,
    typer.Option("--window", metavar="N", help="Successes remembered. [paper: 100]", show_default=False),
]
MinSuccesses = Annotated[
    int | None,
    typer.Option("--min-successes", metavar="N", help="Successes needed to move at all. [paper: 20]",
                 show_default=False),
]  # fmt: skip
Low = Annotated[
    int | None, typer.Option("--low", metavar="TURNS", help="No cap below this. [paper: 5]", show_default=False)
]
High = Annotated[
    int | None, typer.Option("--high", metavar="TURNS", help="No cap above this. [paper: 50]", show_default=False)
]
OrderName = Annotated[
    Literal["clip-first", "average-first"] | None,
    typer.Option("--order", help="Clip the target, then average (the paper), or average, then clip the cap (its code).",
                 show_default=False),
]  # fmt: skip
Every = Annotated[
    int, typer.Option("--every", metavar="N", min=0, help="Rollouts a training step; 0: the whole input is one step.")
]
Steps = Annotated[
    int, typer.Option("--steps", metavar="N", min=0, help="For schedules that follow the clock: steps of the run.")
]
Stages = Annotated[str, typer.Option("--stages", metavar="TURNS,...", help="For --method tti: the caps, in turn.")]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="For --method tti-code: epochs in --steps.")]
Replay = Annotated[
    bool,
    typer.Option("--replay", help="Ask what would have been: an episode longer than the cap in force counts as cut off "
                 "there."),
]  # fmt: skip


@tool(reads=("rollout",), writes=("horizon",))
def command(
    io: Session,
    method: Method = "elastic",
    preset: Preset = "paper",
    start: Start = None,
    rate: Rate = None,
    headroom: Headroom = None,
    percentile: Percentile = None,
    window: Window = None,
    min_successes: MinSuccesses = None,
    low: Low = None,
    high: High = None,
    order: OrderName = None,
    every: Every = 0,
    steps: Steps = 0,
    stages: Stages = "15,20,30,50",
    epochs: Epochs = 1,
    replay: Replay = False,
) -> None:
    """Follow the cap on turns that successes ask for.

    Reads rollouts in the order in which they were made, passes them through, and writes a horizon record after each
    training step: the cap before and after it. Elastic Horizon moves the cap a little towards the 90th percentile of
    recent successful lengths plus some headroom, so that it grows while longer episodes succeed and shrinks when they
    are not needed. A success is an episode all of whose assertions passed. Failed ones never count, nor do those that
    the machinery lost.

    With --replay stored rollouts are cut off where the cap in force would have ended them. They were made under a cap
    of their own, and what a larger one would have brought cannot be seen in them: a record counts as `unknown` the
    episodes that ran out of turns below the cap in force, and a warning says how many there were.

    \b
    Examples:
      strop horizon --every 256 --only horizon rollouts.jsonl
      strop horizon --every 256 --start 50 --replay --only horizon rollouts.jsonl
      strop horizon --preset code-appworld --every 128 --only horizon rollouts.jsonl
      strop horizon --method tti --steps 100 --every 256 --replay --only horizon rollouts.jsonl

    \b
    Input fields:
      rollout: turns (or steps), success, reward, error, stop, horizon, chunks (sampled), steps (span)

    \b
    Output fields:
      horizon: step, before, after, applied (whole turns), percentile, target, reason, successes,
      rollouts, errors, success_rate, clipped_share, tokens, tokens_total, buffered; with --replay
      also unknown, tokens_saved_share

    \b
    Memory:
      the last --window successful lengths.
    """
    changes = {
        "start": start, "rate": rate, "headroom": headroom, "percentile": percentile, "window": window,
        "min_successes": min_successes, "low": low, "high": high, "order": order,
    }  # fmt: skip
    rule = with_changes(PRESETS[preset], **changes)
    schedule = (
        Elastic(rule) if method == "elastic" else Planned(method, rule, steps, stages=_stages(stages), epochs=epochs)
    )
    track = Track(schedule, every=every, replay=replay)
    for record in io.records():
        found = None
        try:
            if record.kind == "rollout":
                found = track.add(record)
        except DataError as error:
            io.reject(error, record)
            continue
        io.write(record)
        if found is not None:
            io.emit(Record.make("horizon", found))
    if (found := track.end()) is not None:
        io.emit(Record.make("horizon", found))
    if track.num_unknown:
        io.warn(
            f"{track.num_unknown} episodes had run out of turns below the cap in force; whether they would have "
            "succeeded cannot be seen in them"
        )
    io.note(f"{track.num_steps} steps; the cap is now {schedule.cap:.4g}, {schedule.applied} turns")


def _stages(text: str) -> tuple[int, ...]:
    try:
        stages = tuple(int(part) for part in text.split(","))
    except ValueError:
        stages = ()
    if not stages or min(stages) < 1:
        raise UsageError(f"--stages {text!r}: expected whole numbers of turns, e.g. 15,20,30,50")
    return stages
