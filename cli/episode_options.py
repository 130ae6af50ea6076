"""The options of what makes attempts of many turns: where agents work, with what, and for how long."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from strop.core.envs.rooms import RoomOptions

MOST_TURNS = 75

SandboxKind = Annotated[
    Literal["auto", "docker", "process"],
    typer.Option("--sandbox", help="Where tasks of the env shell run; auto: Docker where an engine answers, else "
                 "processes of this machine, which are for tasks you trust."),
]  # fmt: skip
Image = Annotated[
    str | None,
    typer.Option("--image", metavar="NAME", help="The image of tasks that name none.", show_default=False),
]
MaxTurns = Annotated[
    int | None,
    typer.Option("--max-turns", min=1, show_default=False,
                 help="Most turns of an episode (FrogNano: 75, then 150). [default: 75]"),
]  # fmt: skip
MaxTime = Annotated[float, typer.Option("--max-time", metavar="SECONDS", min=1, help="Most seconds of an episode.")]
ToolsName = Annotated[
    Literal["auto", "leaf", "bash"],
    typer.Option("--tools", help="Tools of the env shell: Read, Write, Edit, Glob and Bash (leaf), or blocks of bash; "
                 "auto: leaf for models whose chat template knows tools."),
]  # fmt: skip
Compact = Annotated[
    float | None,
    typer.Option("--compact", metavar="SHARE", min=0.05, max=0.95, show_default=False,
                 help="Let the policy sum up an episode that fills this share of its context (FrogNano)."),
]  # fmt: skip


def room_options(
    *, sandbox: str, image: str | None, tools: str, max_turns: int | None, max_time: float, compact: float | None,
    cap: Callable[[], int] | None = None,
) -> RoomOptions:  # fmt: skip
    """The options together; `cap` gives the most turns of an episode that begins, in place of `max_turns`."""
    from strop.core.envs.dialogue import EpisodeLimits
    from strop.core.envs.rooms import RoomOptions

    limits = EpisodeLimits(max_turns or MOST_TURNS, max_time_s=max_time, compact_at=compact)
    return RoomOptions(limits, sandbox, image, tools, cap)
