"""The env `textworld`: text adventures of the package textworld, a command a message.

Without tools the policy's whole message is its action: of it the first line that is not empty, without the reasoning in
<think> tags, is the command. What the game does not understand takes no time in it and is marked `valid: false`; so are
commands for the interpreter (save, restart, quit, ...), which it never sees. The episode ends when the game is won or
lost. A step's reward is what the score rose, over the game's highest score; the episode's is the score over the
highest, and success is to have won.

The task's field `world` (see tasks/textworld.py): `game`, its `settings`, its `seed`. A game is made from these, the
same everywhere for one version of the package, in a child process, and kept in a temporary folder until `close`.
"""

from __future__ import annotations

import contextlib
import copy
import shutil
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
from msgspec import Struct

from strop.core.envs.children import Children
from strop.core.envs.textworld_worker import MOST_CHARS, is_meta
from strop.core.envs.tool_calls import split_reasoning
from strop.core.envs.world import Opening, Outcome, ToolResult
from strop.core.errors import DataError
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.textworld import WORKER, require, settings_problem, whole_settings
from strop.core.tasks.verifiers.child import Child, ChildError
from strop.core.tasks.verifiers.verdict import Verdict

if TYPE_CHECKING:
    from strop.core.envs.tool_calls import BadCall, Call
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

NAME = "textworld"
S = TypeVar("S", bound=Struct)
# Processor time of one request; making a large game is the longest.
REQUEST_LIMIT_S = 120.0


class GameSpec(Struct, kw_only=True, forbid_unknown_fields=True):
    """The field `world` of a task. `version` of the package that made the task is kept for the record."""

    game: str
    seed: int
    settings: dict[str, Any] = {}
    version: str | None = None


class TextWorldWorld:
    """One episode: in a game of textworld, or another that its package can play (the env `alfworld`)."""

    def __init__(
        self, children: Children, prompt: list[dict[str, Any]], start: Callable[[], dict[str, Any]], *, name: str = NAME
    ) -> None:
        """`start` gives the child's request that starts the game; `name` of the env is for errors."""
        self._children = children
        self._prompt = prompt
        self._request = start
        self._name = name
        self._child: Child | None = None
        self._commands: list[str] = []
        self._score, self._max_score = 0, 1
        self._won = self._lost = False

    def reset(self) -> Opening:
        """Starts the game. Raises SandboxLost, Unavailable."""
        return self._open([])

    def act(self, text: str, calls: Sequence[Call | BadCall], *, seconds_left: float) -> Outcome:
        """Hands the command to the game. Raises SandboxLost."""
        command = command_in(text)
        if not command or len(command) > MOST_CHARS or is_meta(command):
            words = "Answer with one command." if not command else "That command is not a part of the game."
            return Outcome(results=[ToolResult(words, valid=False)], reward=0.0)
        before = self._score
        said = self._step(command)
        outcome = Outcome(results=[ToolResult(said["observation"], said["valid"])], done=self._won or self._lost)
        outcome.reward = (self._score - before) / self._max_score
        return outcome

    def judge(self) -> Verdict:
        """The score over the highest score; success is to have won."""
        details = {"score": self._score, "max_score": self._max_score, "won": self._won, "lost": self._lost}
        return Verdict(max(self._score, 0) / self._max_score, self._won, details)

    def snapshot(self) -> dict[str, Any]:
        """The episode so far as JSON: the commands that the game has taken."""
        return {"commands": list(self._commands)}

    def restore(self, snapshot: Mapping[str, Any]) -> Opening:
        """Goes on from a snapshot, by playing it again; the opening shows what the game said last."""
        return self._open(snapshot["commands"])

    def close(self) -> None:
        """Gives the child back; may be called again."""
        child, self._child = self._child, None
        if child is not None:
            self._children.give(child)

    def _open(self, commands: Sequence[str]) -> Opening:
        if self._child is None:
            self._child = self._children.take()
        self._commands, self._score, self._won, self._lost = [], 0, False, False
        said = self._ask(self._request())
        self._max_score = max(said["max_score"] or 1, 1)
        for command in commands:
            said = self._step(command)
        messages = copy.deepcopy(self._prompt)
        if messages and messages[-1]["role"] == "user" and isinstance(messages[-1]["content"], str):
            messages[-1]["content"] += f"\n\n{said['observation']}"
        else:
            messages.append({"role": "user", "content": said["observation"]})
        return Opening(messages)

    def _step(self, command: str) -> dict[str, Any]:
        said = self._ask({"do": "step", "command": command})
        self._commands.append(command)
        self._score, self._won, self._lost = said["score"], said["won"], said["lost"]
        return said

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        if self._child is None:
            raise SandboxLost(f"env {self._name}: the episode is closed")
        try:
            answer: dict[str, Any] = self._child.call(request)
        except ChildError as error:
            raise SandboxLost(f"env {self._name}: {error}") from None
        return answer


@dataclass(slots=True)
class TextWorldRoom:
    """Makes worlds. Children and compiled games are shared by episodes; `close` ends and removes them."""

    _children: Children = field(default_factory=lambda: Children(WORKER, cpu_limit_s=REQUEST_LIMIT_S, confined=False))
    _folder: Path | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer | None = None) -> TextWorldWorld:
        """The world of a task. Raises DataError for one that is not whole, Unavailable without textworld."""
        require()
        spec = world_of(task, GameSpec, NAME)
        if (problem := settings_problem(spec.game, spec.settings)) is not None:
            raise DataError(problem, field="world")
        settings = whole_settings(spec.game, spec.settings)

        def start() -> dict[str, Any]:
            game = {"game": spec.game, "settings": settings, "seed": spec.seed}
            return {"do": "start", **game, "folder": str(self.folder())}

        return TextWorldWorld(self._children, messages_of(task), start)

    def folder(self) -> Path:
        """Where compiled games are kept."""
        with self._lock:
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp(prefix="strop-textworld-"))
            return self._folder

    def seconds(self, record: Record) -> None:
        """A task allows no time of its own."""

    def close(self) -> None:
        """Ends the child processes and removes the games; may be called again."""
        self._children.close()
        with self._lock:
            folder, self._folder = self._folder, None
        if folder is not None:
            with contextlib.suppress(OSError):
                shutil.rmtree(folder)


def world_of(task: Task, kind: type[S], env: str) -> S:
    """The field `world` of a task as the struct `kind`. Raises DataError."""
    if task.world is None:
        raise DataError(f"missing; a task of the env {env} has it", field="world")
    try:
        return msgspec.convert(task.world, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DataError(message, field="world" + path.rstrip("`")) from None


def messages_of(task: Task) -> list[dict[str, Any]]:
    """The prompt of a task as chat messages; [] where it has none."""
    prompt = task.prompt or []
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def command_in(text: str) -> str:
    """The command in a message: its first line that is not empty, without reasoning and the prompt's `>`.

    Games know printable ASCII only; all else becomes a question mark, which no game understands.
    """
    said = split_reasoning(text)[1]
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    first = lines[0].removeprefix(">").strip() if lines else ""
    return "".join(letter if " " <= letter <= "~" else "?" for letter in first)
