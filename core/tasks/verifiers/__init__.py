"""Verifiers: a response and a task in, a verdict out.

A task names its verifier: `"verifier": {"name": "number", ...options}`; what is expected stands in `reference`. Each
verifier is one module here, and its docstring says what it accepts. All reward 1 or 0, but `reasoning-gym` (its own
score in [0, 1]), `command` (what the program says) and `debate` (in [0, 1.2]).
"""

from __future__ import annotations

import threading
from importlib import import_module
from types import TracebackType
from typing import TYPE_CHECKING, Self

from strop.core.errors import DataError
from strop.core.tasks.verifiers.verdict import ReadsAnswer, Verdict, Verifier

if TYPE_CHECKING:
    from strop.core.records import Record, Task

__all__ = ["VERIFIERS", "Verdict", "Verifier", "Verifiers", "open_verifier", "open_verifiers"]

# Name -> (module in this package, class), imported when a task asks for it.
VERIFIERS = {
    "number": ("number", "NumberVerifier"),
    "exact": ("exact", "ExactVerifier"),
    "choice": ("choice", "ChoiceVerifier"),
    "regex": ("regex", "RegexVerifier"),
    "math": ("math", "MathVerifier"),
    "countdown": ("countdown", "CountdownVerifier"),
    "reasoning-gym": ("gym", "GymVerifier"),
    "command": ("command", "CommandVerifier"),
    "tests": ("tests", "TestsVerifier"),
    "env": ("env", "EnvVerifier"),
    "debate": ("debate", "DebateVerifier"),
}


def open_verifier(name: str) -> Verifier:
    """The verifier of that name, a key of VERIFIERS. Nothing heavy happens before its first call."""
    module, kind = VERIFIERS[name]
    opened: Verifier = getattr(import_module(f"{__name__}.{module}"), kind)()
    return opened


class Verifiers:
    """All verifiers, opened as tasks ask for them; their child processes live until `close`.

    Used as a context manager. `verify` and `check` may be called from any thread; `close` from another one ends what
    is waited for.
    """

    def __init__(self) -> None:
        self._open: dict[str, Verifier] = {}
        self._lock = threading.Lock()

    def check(self, record: Record, task: Task) -> None:
        """Raises DataError for a task that cannot be judged, and Unavailable where a package is missing.

        It cannot be judged without a verifier, with an unknown one, or with options or a reference that do not fit.
        """
        try:
            verifier = self._verifier(task)
            verifier.check(task)
        except DataError as error:
            raise record.bad(error.message, error.field) from None
        verifier.require()

    def verify(self, response: str, record: Record, task: Task) -> Verdict:
        """The verdict on `response` by the task's verifier; `record` is the task's record. Raises as `check` does."""
        self.check(record, task)
        # What is no text (a lone surrogate) cannot be handed to a child or a program.
        clean = response.encode("utf-8", "replace").decode()
        return self._verifier(task)(clean, task, record)

    def answer(self, response: str, record: Record, task: Task) -> str | None:
        """The answer that the task's verifier would judge, equal texts for equal answers; None where there is none.

        Raises DataError for a task whose verifier takes answers that cannot be compared with each other.
        """
        try:
            verifier = self._verifier(task)
            if not isinstance(verifier, ReadsAnswer):
                name = (task.verifier or {}).get("name")
                raise DataError(f"answers for the verifier {name!r} cannot be compared", field="verifier.name")
            return verifier.answer(response, task)
        except DataError as error:
            raise record.bad(error.message, error.field) from None

    def _verifier(self, task: Task) -> Verifier:
        known = f"known: {', '.join(VERIFIERS)}"
        if task.verifier is None:
            raise DataError(f'missing; a task to judge names its verifier, {{"name": ...}} ({known})', field="verifier")
        name = task.verifier.get("name")
        if not isinstance(name, str) or name not in VERIFIERS:
            raise DataError(f"unknown verifier {name!r} ({known})", field="verifier.name")
        with self._lock:
            verifier = self._open.get(name)
            if verifier is None:
                verifier = self._open[name] = open_verifier(name)
            return verifier

    def close(self) -> None:
        """Ends all child processes."""
        with self._lock:
            opened = list(self._open.values())
        for verifier in opened:
            verifier.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def open_verifiers() -> Verifiers:
    """The verifiers of a run; a context manager."""
    return Verifiers()
