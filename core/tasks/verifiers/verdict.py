"""What every verifier shares: the verdict, the protocol, options checked against a struct."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, runtime_checkable

import msgspec

from strop.core.errors import DataError

if TYPE_CHECKING:
    from strop.core.records import Record, Task
    from strop.core.tasks.reports import Assertion

O = TypeVar("O", bound="Options")  # noqa: E741

# Enough to see what was compared, without copying a response into its verdict.
SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a verifier found of one response.

    `reward` is in [0, 1] for all verifiers but `command`, whose program decides, and `debate`, up to 1.2. `error`
    says that the verifier or the machine failed, and not the policy: such an attempt has no reward at all, whatever the
    other fields hold. `assertions` are the tests of a report, where there is one.
    """

    reward: float
    success: bool
    details: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    assertions: list[Assertion] | None = None

    @classmethod
    def of(cls, success: bool, **details: Any) -> Verdict:
        """Reward 1 or 0; details that are None are left out."""
        return cls(float(success), success, {key: value for key, value in details.items() if value is not None})

    @classmethod
    def failed(cls, error: str) -> Verdict:
        """The verifier or the machine failed: no reward."""
        return cls(0.0, False, error=error)


class Verifier(Protocol):
    """Judges responses. Nothing of it depends on earlier calls; it may be called from any thread."""

    def check(self, task: Task) -> None:
        """Raises DataError (field, no place) for a task whose options or reference do not fit."""

    def require(self) -> None:
        """Raises Unavailable where a package is missing."""

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """The verdict on `response`; `record` is the task's record as it came, with its unknown fields."""

    def close(self) -> None:
        """Ends child processes. A call that is waiting for one returns an error."""


@runtime_checkable
class ReadsAnswer(Protocol):
    """A verifier whose answers can be compared with each other, where no reference is known."""

    def answer(self, response: str, task: Task) -> str | None:
        """The answer in `response`: equal texts for equal answers; None where there is none. The reference is not read.

        Raises DataError where the task's options do not fit.
        """


class PlainVerifier:
    """Base of the verifiers that need neither packages nor child processes."""

    def require(self) -> None:
        """Nothing is needed."""

    def close(self) -> None:
        """Nothing is held."""


class Options(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Base of a verifier's options: `task.verifier` is {"name": ..., and the options}."""

    name: str


def options_of(task: Task, kind: type[O]) -> O:
    """The options in `task.verifier`. Raises DataError for unknown ones and for values of the wrong type."""
    try:
        return msgspec.convert(task.verifier, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        known = ", ".join(name for name in kind.__struct_fields__ if name != "name")
        if "unknown field" in message:
            message = f"{message}; known options: {known or 'none'}"
        raise DataError(message, field="verifier" + path.rstrip("`")) from None


def shown(text: str | None) -> str | None:
    """`text`, cut where it is long."""
    return text if text is None or len(text) <= SHOWN_CHARS else text[:SHOWN_CHARS] + "..."
