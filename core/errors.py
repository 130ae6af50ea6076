"""The errors a user can meet, each with the exit status of the house (design, section 3; sysexits)."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Where:
    """A place in the input: file as the user named it ("-" is stdin) and line, counted from one."""

    file: str
    line: int

    def __str__(self) -> str:
        """`FILE:LINE`, as compilers and grep print it."""
        return f"{'<stdin>' if self.file == '-' else self.file}:{self.line}"


class StropError(Exception):
    """Base of the errors that end a tool with one clear line and no traceback."""

    exit_status = 70


class UsageError(StropError):
    """The options do not fit together."""

    exit_status = 2


class DataError(StropError):
    """A record is bad: says where, which field, what is wrong and what was expected."""

    exit_status = 65

    def __init__(self, message: str, *, where: Where | None = None, field: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.where = where
        self.field = field

    def __str__(self) -> str:
        """`FILE:LINE: field: message`, as much of it as is known."""
        parts = [str(part) for part in (self.where, self.field) if part is not None]
        return ": ".join([*parts, self.message])


class InputMissing(StropError):  # noqa: N818 (the name says what happened)
    """An input file cannot be opened."""

    exit_status = 66


class Unavailable(StropError):  # noqa: N818
    """A part or a service is missing: GPU, Docker, a model, a package, a server. Says what brings it."""

    exit_status = 69


class OutputFailed(StropError):  # noqa: N818
    """The output cannot be written: disk full, no permission."""

    exit_status = 74


def missing_extra(package: str, extra: str) -> Unavailable:
    """The error for a package that an extra of strop brings."""
    return Unavailable(f"the package {package} is missing; install it with: pip install 'strop[{extra}]'")
