"""The envs in which an agent acts over many turns, by name: from a task to an episode.

A room makes the worlds of its env's tasks and holds what they share; it is opened when the first task wants it. Of an
env "NAME:MORE" the room is NAME's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import TYPE_CHECKING, Protocol

from strop.core.envs.dialogue import DialogueEpisode, EpisodeLimits
from strop.core.errors import DataError

if TYPE_CHECKING:
    from strop.core.envs.world import World
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

ENVS = ("shell", "command", "functions", "textworld", "alfworld", "appworld")
# Rooms that need to know nothing of the user's options: module in this package, class.
PLAIN = {
    "command": ("command", "CommandRoom"), "functions": ("functions", "FunctionsRoom"),
    "textworld": ("textworld", "TextWorldRoom"), "alfworld": ("alfworld", "AlfWorldRoom"),
    "appworld": ("appworld", "AppWorldRoom"),
}  # fmt: skip


class Room(Protocol):
    """What all worlds of an env share."""

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer) -> World:
        """The world of one attempt; nothing in it begins yet. Raises DataError, Unavailable."""
        ...

    def seconds(self, record: Record) -> float | None:
        """The time that the task itself allows an attempt; None where it says nothing."""
        ...

    def close(self) -> None:
        """Lets go of everything, worlds in use included."""
        ...


@dataclass(slots=True)
class RoomOptions:
    """What the user said of them. `sandbox`, `image` and `tools` are for the env `shell`.

    `cap` gives the most turns of an episode that begins now, in place of the limit.
    """

    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    sandbox: str = "auto"
    image: str | None = None
    tools: str = "auto"
    cap: Callable[[], int] | None = None


class Rooms:
    """Opens rooms as tasks ask for them."""

    def __init__(self, options: RoomOptions | None = None) -> None:
        self._options = options or RoomOptions()
        self._open: dict[str, Room] = {}

    def episode(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer, context: int) -> DialogueEpisode:
        """An episode of a task whose env is one of ENVS. Raises DataError, Unavailable."""
        room = self._room(task.env)
        world = room.world(record, task, seed, tokenizer)
        limits = self._options.limits
        seconds = min(limits.max_time_s, room.seconds(record) or limits.max_time_s)
        most = context if limits.max_context is None else min(context, limits.max_context)
        turns = limits.max_turns if self._options.cap is None else self._options.cap()
        return DialogueEpisode(tokenizer, world, replace(limits, max_turns=turns, max_context=most, max_time_s=seconds))

    def close(self) -> None:
        """Lets go of all of them."""
        while self._open:
            self._open.popitem()[1].close()

    def _room(self, env: str) -> Room:
        name = env.partition(":")[0]
        if name not in ENVS:
            raise DataError(f"unknown env {env!r}, expected answer or one of {', '.join(ENVS)}", field="env")
        if name not in self._open:
            self._open[name] = _open_plain(*PLAIN[name]) if name in PLAIN else self._open_shell()
        return self._open[name]

    def _open_shell(self) -> Room:
        from strop.core.envs.shell_tasks import ShellRoom
        from strop.core.sandbox.open import open_sandboxes

        kind = self._options.sandbox
        return ShellRoom(lambda: open_sandboxes(kind), self._options.image, self._options.tools)


def _open_plain(module: str, kind: str) -> Room:
    room: Room = getattr(import_module(f"{__package__}.{module}"), kind)()
    return room
