"""The rooms of the envs by name: what makes the world of a task, and holds what episodes share."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from strop.core.envs.world import World
    from strop.core.records import Record, Task

# Name -> (module in this package, class), imported when a task asks for it. What follows a colon is the room's affair.
ROOMS = {
    "command": ("command", "CommandRoom"),
    "functions": ("functions", "FunctionsRoom"),
    "textworld": ("textworld", "TextWorldRoom"),
    "alfworld": ("alfworld", "AlfWorldRoom"),
    "appworld": ("appworld", "AppWorldRoom"),
}


class Room(Protocol):
    """Makes worlds; may be used by several threads."""

    def world(self, record: Record, task: Task, seed: int) -> World:
        """The world of one episode, not yet begun.

        Raises DataError (field, no place) for a task that is not whole, Unavailable for a package or data that are
        not here.
        """
        ...

    def close(self) -> None:
        """Ends and removes what episodes share; those under way get SandboxLost. May be called again."""
        ...


def open_room(env: str) -> Room:
    """The room of an env, e.g. "textworld" or "command:./game.py". Its name, before the colon, is a key of ROOMS."""
    module, kind = ROOMS[env.partition(":")[0]]
    room: Room = getattr(import_module(f"{__package__}.{module}"), kind)()
    return room
