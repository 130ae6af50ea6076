"""The env `alfworld`: ALFWorld's household tasks as text, a command a message, as in the env `textworld`.

The task's field `world` is {"game": FILE}, a game file (game.tw-pddl) below $ALFWORLD_DATA, such as
json_2.1.1/valid_seen/.../game.tw-pddl, or anywhere as a whole path. A command that does nothing ("Nothing happens.")
is `valid: false`; the task done brings a reward of 1 and ends the episode.

Written against alfworld 0.4.2 and textworld 1.7.0. Not run with ALFWorld's data: what the tests play is a small game of
our own in its format, with the package's own rules and words.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from strop.core.envs.children import Children
from strop.core.envs.textworld import TextWorldWorld, messages_of, world_of
from strop.core.errors import DataError, Unavailable, missing_extra

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

NAME = "alfworld"
WORKER = "strop.core.envs.alfworld_worker:worker"
REQUEST_LIMIT_S = 120.0
SUFFIX = ".tw-pddl"
PROMPT = (
    "You are in a household. Each of your messages is one command and nothing else, such as: look, inventory, go to "
    "desk 1, open drawer 2, take mug 1 from drawer 2, move mug 1 to desk 1, use desklamp 1, clean mug 1 with sinkbasin "
    "1, heat apple 1 with microwave 1, cool apple 1 with fridge 1."
)


class Household(Struct, kw_only=True, forbid_unknown_fields=True):
    """The field `world` of a task."""

    game: str


@dataclass(slots=True)
class AlfWorldRoom:
    """Makes worlds; the child processes are shared by the episodes that follow one another. `close` ends them."""

    _children: Children = field(default_factory=lambda: Children(WORKER, cpu_limit_s=REQUEST_LIMIT_S, confined=False))

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer | None = None) -> TextWorldWorld:
        """The world of a task. Raises DataError for one without a game, Unavailable without the package or its data."""
        require()
        game = world_of(task, Household, NAME).game
        data = data_folder()
        file = Path(game) if Path(game).is_absolute() else data / game
        if file.suffix != SUFFIX:
            raise DataError(f"{game!r} is no game file (game{SUFFIX})", field="world.game")
        if not file.is_file():
            if not data.is_dir():
                how = "fetch them with: alfworld-download, and name their folder in ALFWORLD_DATA"
                raise Unavailable(f"ALFWorld's data are missing (no folder {data}); {how}")
            raise DataError(f"no such game: {file}", field="world.game")
        prompt = messages_of(task) or [{"role": "user", "content": PROMPT}]
        request: dict[str, Any] = {
            "do": "start",
            "file": str(file),
            "data": str(data if data.is_dir() else file.parent),
        }
        return TextWorldWorld(self._children, prompt, lambda: request, name=NAME)

    def seconds(self, record: Record) -> None:
        """A task allows no time of its own."""

    def close(self) -> None:
        """Ends the child processes."""
        self._children.close()


def require() -> None:
    """Raises Unavailable without the packages."""
    if find_spec("alfworld") is None or find_spec("fast_downward") is None:
        raise missing_extra("alfworld", "alfworld")


def data_folder() -> Path:
    """Where ALFWorld keeps its data: $ALFWORLD_DATA, or the folder of its own choice. It may not be there."""
    return Path(os.environ.get("ALFWORLD_DATA") or "~/.cache/alfworld").expanduser().absolute()
