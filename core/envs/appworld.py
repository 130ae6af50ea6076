"""The env `appworld`: AppWorld's tasks, done by Python code that calls the APIs of nine apps.

The task's field `world` is {"task_id": ID}. Each message of the policy holds a block of Python, which runs in a lasting
session; what it prints is the observation, and code that fails is `valid: false`. `apis.supervisor.complete_task()`
ends the episode, and AppWorld's tests judge the state of the apps: success is that all pass, and they are the
assertions. An episode that ends otherwise is no success. AppWorld's own instruction is the prompt.

The code of the policy runs in AppWorld's process, behind AppWorld's own guard and with the rights of the user: it is
for models you trust, or inside a container.

AppWorld needs pydantic 1 and older typer, rich and httpx than strop itself, so it lives in an environment of its own:
STROP_APPWORLD_PYTHON names its interpreter (unset: the one that runs strop), APPWORLD_ROOT the folder of its data.

Written against appworld 0.1.3.post1, from its documentation and source. Not run with its data.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from strop.core.envs import appworld_worker
from strop.core.envs.command import CommandWorld
from strop.core.envs.programs import Programs
from strop.core.envs.textworld import world_of
from strop.core.errors import DataError, Unavailable

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

NAME = "appworld"
# The apps are loaded at the first request.
REQUEST_S = 300.0
IMPORT_S = 300.0
INSTALL = (
    "python3 -m venv APPWORLD && APPWORLD/bin/pip install appworld && APPWORLD/bin/appworld install && "
    "APPWORLD/bin/appworld download data, then STROP_APPWORLD_PYTHON=APPWORLD/bin/python and APPWORLD_ROOT=(the folder "
    "that now has data/)"
)


class AppTask(Struct, kw_only=True, forbid_unknown_fields=True):
    """The field `world` of a task."""

    task_id: str


@dataclass(slots=True)
class AppWorldRoom:
    """Makes worlds; a program in AppWorld's own environment plays one task after the other. `close` ends them."""

    _programs: Programs = field(default_factory=Programs)
    _python: str | None = None

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer | None = None) -> CommandWorld:
        """The world of a task. Raises DataError for one without an id, Unavailable without AppWorld or its data."""
        task_id = world_of(task, AppTask, NAME).task_id
        if self._python is None:
            self._python = find_python()
        tasks = data_folder() / "tasks"
        if not tasks.is_dir():
            raise Unavailable(f"AppWorld's data are missing (no folder {tasks}); to install it: {INSTALL}")
        if "/" in task_id or not (tasks / task_id).is_dir():
            raise DataError(f"AppWorld has no task {task_id!r}", field="world.task_id")
        arguments = (self._python, "-P", str(Path(appworld_worker.__file__).resolve()))
        line = msgspec.json.encode({"id": task.id, "world": {"task_id": task_id}})
        return CommandWorld(self._programs, arguments, line, seed, request_s=REQUEST_S)

    def seconds(self, record: Record) -> None:
        """A task allows no time of its own."""

    def close(self) -> None:
        """Ends the programs."""
        self._programs.close()


def find_python() -> str:
    """The interpreter that has AppWorld. Raises Unavailable."""
    python = os.environ.get("STROP_APPWORLD_PYTHON") or sys.executable
    if shutil.which(python) is None:
        raise Unavailable(f"STROP_APPWORLD_PYTHON: no such program: {python!r}")
    # Only looked for: importing it takes seconds and reads files.
    look = "import importlib.util, sys; sys.exit(importlib.util.find_spec('appworld') is None)"
    if subprocess.run([python, "-P", "-c", look], capture_output=True, timeout=IMPORT_S, check=False).returncode != 0:
        raise Unavailable(f"the package appworld is missing in {python}; to install it: {INSTALL}")
    return python


def data_folder() -> Path:
    """Where AppWorld has its data: below $APPWORLD_ROOT, or below the current folder. It may not be there."""
    return Path(os.environ.get("APPWORLD_ROOT") or ".").absolute() / "data"
