"""The child-process side of TextWorld: makes games, compiles them once into a folder, plays them (see textworld.py).

Games run in an interpreter in C that a process loads for each of them, and their making draws from global sources.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from hashlib import blake2b
from importlib import import_module
from pathlib import Path
from typing import Any

CUSTOM = "custom"
# What a command may not begin with: words for the interpreter, some of which write files, and the compiler's probes.
META = frozenset({
    "quit", "q", "restart", "restore", "save", "undo", "oops", "script", "transcript", "recording", "replay", "verify",
    "version", "notify", "pronouns", "superbrief", "verbose", "brief", "nouns", "purloin", "abstract", "gonear", "goto",
    "showme", "showverb", "tree", "scope", "trace", "actions", "routines", "timers", "changes", "random", "test",
    "rules", "scenes", "relations", "responses",
})  # fmt: skip
# The interpreter cuts longer lines.
MOST_CHARS = 200
_PARTS = re.compile(r"[.;,]|\bthen\b|\band\b")
_BANNER = re.compile(r"\A(?:[ _|\\/$<>+\-]*\n)+")
# The prompt, and the status line that the interpreter prints behind it.
_STATUS = re.compile(r"\s*\n>(?:\s+-= .* =-\S*)?\s*\Z")
_AFTER_END = re.compile(r"\s*\n\s*Would you like to RESTART,.*\Z", re.DOTALL)


def worker() -> Callable[[dict[str, Any]], Any]:
    """The handler. Requests: {"do": "make" | "start" | "step", ...}."""
    import_module("textworld.challenges")
    return TextGames().handle


class TextGames:
    """One game at a time."""

    def __init__(self) -> None:
        self._textworld: Any = import_module("textworld")
        self._challenges = import_module("textworld.challenges.registration").CHALLENGES
        self._env: Any = None
        self._moves = 0

    def handle(self, request: dict[str, Any]) -> Any:
        """One request."""
        if request["do"] == "make":
            return self._describe(request)
        if request["do"] == "start":
            return self._start(self._compiled(request, Path(request["folder"])))
        return self._step(request["command"])

    def _game(self, request: dict[str, Any], path: Path | None = None) -> tuple[Any, Any]:
        """A game and the options it was made with: the same for the same settings and seed."""
        self._textworld.g_rng.set_seed(request["seed"])
        options = self._textworld.GameOptions()
        options.seeds = request["seed"]
        if path is not None:
            options.path = str(path)
        settings = dict(request["settings"])
        if request["game"] != CUSTOM:
            return self._challenges[request["game"]][1](settings, options), options
        options.nb_rooms, options.nb_objects = settings["rooms"], settings["objects"]
        options.nb_parallel_quests = settings["quests"]
        options.quest_length, options.quest_breadth = settings["quest_length"], settings["quest_breadth"]
        return self._textworld.generator.make_game(options), options

    def _describe(self, request: dict[str, Any]) -> dict[str, Any]:
        game, _ = self._game(request)
        return {"objective": game.objective, "walkthrough": game.metadata["walkthrough"], "max_score": game.max_score}

    def _compiled(self, request: dict[str, Any], folder: Path) -> Path:
        """The compiled game, made if it is not there; several children may make it at once, and one of them wins."""
        # An interpreter that writes a file where it runs writes it there.
        os.chdir(folder)
        key = repr((request["game"], sorted(request["settings"].items()), request["seed"]))
        place = folder / blake2b(key.encode(), digest_size=12).hexdigest()
        if not place.exists():
            making = folder / f"{place.name}.{os.getpid()}"
            making.mkdir()
            game, options = self._game(request, making / "game.z8")
            self._textworld.generator.compile_game(game, options)
            with contextlib.suppress(OSError):
                making.rename(place)
            shutil.rmtree(making, ignore_errors=True)
        return place / "game.z8"

    def _start(self, file: Path) -> dict[str, Any]:
        if self._env is not None:
            self._env.close()
        infos = self._textworld.EnvInfos(score=True, max_score=True, won=True, lost=True, moves=True)
        self._env = self._textworld.start(str(file), infos)
        state = self._env.reset()
        self._moves = state.moves
        return {"observation": _said(_BANNER.sub("", state.feedback)), "max_score": state.max_score}

    def _step(self, command: str) -> dict[str, Any]:
        """`valid`: the game understood, and time passed in it."""
        state, score, done = self._env.step(command)
        valid, self._moves = done or state.moves > self._moves, state.moves
        return {
            "observation": _said(state.feedback), "score": score, "won": bool(state.won), "lost": bool(state.lost),
            "valid": valid,
        }  # fmt: skip


def is_meta(command: str) -> bool:
    """Whether a command, or a part of it, is for the interpreter and not for the game."""
    heads = [words[0] for part in _PARTS.split(command.lower()) if (words := part.split())]
    return any(head in META or head.startswith("tw-") for head in heads)


def _said(feedback: str) -> str:
    return _STATUS.sub("", _AFTER_END.sub("", feedback)).strip()
