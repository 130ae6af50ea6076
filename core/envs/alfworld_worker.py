"""The child-process side of the env `alfworld`: games in ALFWorld's format, played by textworld (see alfworld.py)."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from typing import Any


def worker() -> Callable[[dict[str, Any]], Any]:
    """The handler. Requests: {"do": "start", "file", "data"} and {"do": "step", "command"}."""
    import_module("textworld")
    import_module("fast_downward")
    return AlfredGames().handle


class AlfredGames:
    """One game at a time."""

    def __init__(self) -> None:
        self._env: Any = None
        self._commands: list[str] = []

    def handle(self, request: dict[str, Any]) -> Any:
        """One request."""
        return self._start(request) if request["do"] == "start" else self._step(request["command"])

    def _start(self, request: dict[str, Any]) -> dict[str, Any]:
        # At its import the package makes the folder that this names, or one in the home directory.
        os.environ["ALFWORLD_DATA"] = request["data"]
        textworld: Any = import_module("textworld")
        names: Any = import_module("alfworld.agents.environment.alfred_tw_env")
        if self._env is not None:
            self._env.close()
        infos = textworld.EnvInfos(won=True, admissible_commands=True)
        # Things are numbered in one order, as ALFWorld does in its evaluation; in training it may shuffle them.
        self._env = textworld.start(request["file"], infos, [names.AlfredDemangler(shuffle=False)])
        state = self._env.reset()
        self._commands = state.admissible_commands
        return {"observation": state.feedback.strip(), "max_score": 1}

    def _step(self, command: str) -> dict[str, Any]:
        valid = command in self._commands
        state, score, _ = self._env.step(command)
        self._commands = state.admissible_commands
        return {
            "observation": state.feedback.strip(), "score": int(score), "won": bool(state.won),
            "lost": bool(state.lost), "valid": valid,
        }  # fmt: skip
