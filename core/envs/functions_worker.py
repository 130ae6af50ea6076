"""The child-process side of the env `functions`: the simulated APIs of bfcl-eval, called by name (see functions.py).

Of each class there are two instances: the policy's, and one on which the reference's calls are run. After a turn they
are compared as the package compares them (bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker): their state, and
whether the policy has seen all that the reference's calls answered. The package's own way from a call to its answer
evaluates text as Python and keeps instances in globals by name; here a method is looked up and called, and an instance
shares nothing with another.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable
from importlib import import_module
from typing import Any

from strop.core.tasks.bfcl import parse_call


def worker() -> Callable[[dict[str, Any]], Any]:
    """The handler. Requests: {"do": "open" | "call" | "turn", ...}."""
    backend = import_module("bfcl_eval.constants.executable_backend_config")
    for name, module in backend.CLASS_FILE_PATH_MAPPING.items():
        # The memories and the web need what is not installed, and are no part of the multi-turn cases.
        if not name.startswith(("Memory", "WebSearch")):
            import_module(module)
    checker = import_module("bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker")
    return Functions(backend, checker).handle


class Functions:
    """One episode's instances."""

    def __init__(self, backend: Any, checker: Any) -> None:
        self._backend = backend
        self._checker = checker
        self._policy: dict[str, Any] = {}
        self._reference: dict[str, Any] = {}
        self._answers: list[str] = []

    def handle(self, request: dict[str, Any]) -> Any:
        """One request."""
        if request["do"] == "open":
            self._policy, self._reference = self._instances(request), self._instances(request)
            self._answers = []
            return None
        if request["do"] == "call":
            text, is_run = _run(_method(self._policy, request["name"]), [], request["arguments"])
            self._answers.append(text)
            return [text, is_run]
        return self._turn(request["calls"])

    def _instances(self, request: dict[str, Any]) -> dict[str, Any]:
        made = {}
        for name in request["classes"]:
            instance = getattr(import_module(self._backend.CLASS_FILE_PATH_MAPPING[name]), name)()
            if name not in self._backend.STATELESS_CLASSES:
                config = copy.deepcopy(request["config"].get(name, {}))
                instance._load_scenario(config, long_context=request["long_context"])
            # The long contexts are lists and tables of a module, which instances take in without copying them.
            made[name] = copy.deepcopy(instance)
        return made

    def _turn(self, calls: list[str]) -> dict[str, bool]:
        """Runs the reference's calls of a turn that the policy has ended: are the two where they should be?"""
        answers = []
        for text in calls:
            name, placed, named = parse_call(text)
            answers.append(_run(_method(self._reference, name), placed, named)[0])
        state = self._checker.state_checker(self._policy, self._reference)
        response = self._checker.response_checker(self._answers, answers, 0)
        return {"state": bool(state["valid"]), "response": bool(response["valid"])}


def _method(instances: dict[str, Any], name: str) -> Callable[..., Any] | None:
    """The public method of that name; of two classes that have it, the later one's, as in the package."""
    found = None
    for instance in instances.values():
        methods = dict(inspect.getmembers(instance, predicate=inspect.ismethod))
        if not name.startswith("_") and name in methods:
            found = methods[name]
    return found


def _run(method: Callable[..., Any] | None, placed: list[Any], named: dict[str, Any]) -> tuple[str, bool]:
    """What a call answers, in the package's words and spelling, and whether it could be run."""
    if method is None:
        return "Error during execution: there is no such function", False
    try:
        value = method(*placed, **named)
        if isinstance(value, str):
            return value, True
        if isinstance(value, dict):
            try:
                return json.dumps(value), True
            except (TypeError, ValueError):
                return str(value), True
        return str(value), True
    except Exception as error:  # noqa: BLE001 (whatever a simulated function raises is its answer)
        return f"Error during execution: {error}", False
