"""Families of tasks: what `synth-tasks` can make, by name.

A family is stateless: task i depends on the seed, the family with its options, and i. It does not matter how many tasks
are asked for, where one starts, or what was made before.

A split parts the questions of a family by a hash of the question alone (`draws.is_heldout`), so that tasks made for
training and tasks held out for a test never share a question, even under other seeds, ranges or prompt formats, as long
as `heldout_share` is the same.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal, get_args

from strop.core.errors import DataError, UsageError, Where
from strop.core.records import Record, Task
from strop.core.tasks.draws import is_heldout

Split = Literal["all", "train", "heldout"]
DEFAULT_HELDOUT_SHARE = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class FamilyOptions:
    """What the user said; None (or nothing) leaves it to the family. Ranges are [low, high], both included.

    `fields` and `settings` are pairs of a name and a value, `verifier_options` too. What does not apply to a family is
    refused, not ignored.
    """

    terms: tuple[int, int] | None = None
    range: tuple[int, int] | None = None
    target: tuple[int, int] | None = None
    operators: tuple[str, ...] | None = None
    use_all: bool | None = None
    division: str | None = None
    format: str | None = None
    template: str | None = None
    fields: tuple[tuple[str, str], ...] = ()
    verifier: str | None = None
    verifier_options: tuple[tuple[str, Any], ...] = ()
    settings: tuple[tuple[str, Any], ...] = ()
    split: str = "all"
    heldout_share: float | None = None

    def given(self) -> dict[str, Any]:
        """What differs from the defaults, by name."""
        return {
            field.name: value
            for field in dataclasses.fields(self)
            if (value := getattr(self, field.name)) != field.default
        }


class BadRow(DataError):  # noqa: N818
    """A row of a file that makes no task; `text` is the row as it stands in the file."""

    def __init__(self, message: str, *, where: Where, field: str | None, text: str) -> None:
        super().__init__(message, where=where, field=field)
        self.text = text


FLAGS = {"use_all": "--use-all", "fields": "--field", "verifier_options": "--verifier-option", "settings": "--set"}


def flag_of(name: str) -> str:
    """The command line's spelling of an option."""
    return FLAGS.get(name, "--" + name.replace("_", "-"))


class Family(ABC):
    """Makes tasks.

    `spec` is the family as it was asked for, for provenance: without a file's folder, which is one machine's affair.
    `applies` names the options it obeys beside the split. `is_finite`: whether the tasks come to an end. `num_distinct`
    says how many different questions there are, where that is known. `notices` is what a person should hear; it is
    filled while tasks are made.
    """

    applies: frozenset[str] = frozenset()
    is_finite = False
    num_distinct: int | None = None

    def __init__(self, name: str, options: FamilyOptions) -> None:
        self.name = self.spec = name
        self.options = options
        self.share = DEFAULT_HELDOUT_SHARE if options.heldout_share is None else options.heldout_share
        self.notices: list[str] = []
        self._id_prefix = _id_prefix(name, options)

    @abstractmethod
    def make(self, index: int, seed: int) -> Task:
        """Task `index`, from 0. Raises IndexError beyond the last, BadRow for a bad row of a file."""

    def tasks(self, seed: int, start: int = 0) -> Iterator[Task | Record | BadRow]:
        """The tasks from `start` on; a record is written as it is. A row that makes no task comes as its error."""
        index = start
        while True:
            try:
                yield self.make(index, seed)
            except IndexError:
                return
            except BadRow as error:
                yield error
            index += 1

    def close(self) -> None:  # noqa: B027 (most families hold nothing)
        """Ends child processes, closes files."""

    def admits(self, question: str) -> bool:
        """Whether the question belongs to the part that was asked for."""
        return self.options.split == "all" or is_heldout(question, self.share) == (self.options.split == "heldout")

    def task_id(self, seed: int, index: int) -> str:
        """FAMILY-SEED-INDEX; the split, and a mark of options that are not the defaults, stand behind the family."""
        return f"{self._id_prefix}-{seed}-{index}"


def _id_prefix(name: str, options: FamilyOptions) -> str:
    given = options.given()
    split = given.pop("split", None)
    # Tasks that differ must not share an id: records of several calls meet in one stream.
    mark = blake2b(repr(sorted(given.items())).encode(), digest_size=3).hexdigest() if given else ""
    return ".".join(filter(None, (name, mark))) + (f"-{split}" if split else "")


@dataclass(frozen=True, slots=True)
class Entry:
    """A family in the table: its spelling, what it makes, and what opens it (imported when it is called)."""

    spelling: str
    about: str
    open: Callable[[str, FamilyOptions], Family]


def _arithmetic(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.arithmetic import Arithmetic

    return Arithmetic(options)


def _countdown(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.countdown import Countdown

    return Countdown(options)


def _gym(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.gym import Gym

    return Gym(rest, options)


def _file(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.file_tasks import FileTasks

    return FileTasks(rest, options)


def _harbor(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.harbor import HarborTasks

    return HarborTasks(rest, options)


def _bfcl(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.bfcl import Bfcl

    return Bfcl(rest, options)


def _textworld(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.textworld import TextWorld

    return TextWorld(rest, options)


def _records(rest: str, options: FamilyOptions) -> Family:
    from strop.core.tasks.stored import StoredTasks

    return StoredTasks(rest, options)


FAMILIES = {
    "arithmetic": Entry("arithmetic", "Sums, differences and products of a few numbers.", _arithmetic),
    "countdown": Entry("countdown", "Reach a target with given numbers; every task has a solution.", _countdown),
    "reasoning-gym": Entry("reasoning-gym:NAME", "Any data set of the package reasoning-gym, with its scorer.", _gym),
    "file": Entry("file:PATH", "Questions and answers of a JSONL or CSV file, or of a slice [10:20] of it.", _file),
    "harbor": Entry("harbor:DIR", "Task folders in Harbor's layout, for agents in a terminal.", _harbor),
    "bfcl": Entry("bfcl:CATEGORY", "Conversations of BFCL's multi-turn categories, with functions to call.", _bfcl),
    "textworld": Entry("textworld:GAME", "Text adventures that the package textworld makes.", _textworld),
    "records": Entry("records:PATH", "The tasks of a JSONL file (- is stdin) as they are, for --folders.", _records),
}


def open_family(spec: str, options: FamilyOptions) -> Family:
    """The family that `spec` names, e.g. "arithmetic", "reasoning-gym:chain_sum" or "file:questions.jsonl[0:100]".

    Raises UsageError for an unknown name and for options that do not apply; InputMissing for a file that is not there;
    Unavailable where a package is missing.
    """
    head, colon, rest = spec.partition(":")
    entry = FAMILIES.get(head)
    if entry is None:
        raise UsageError(f"unknown family {spec!r}{_hint(spec)}")
    if (":" in entry.spelling) != bool(colon and rest):
        raise UsageError(f"the family is written {entry.spelling}, not {spec!r}")
    _check_split(options)
    family = entry.open(rest, options)
    for name in options.given():
        if name not in family.applies | {"split", "heldout_share"}:
            family.close()
            raise UsageError(f"{flag_of(name)} does not apply to the family {head}")
    return family


def _hint(spec: str) -> str:
    if Path(spec).exists():
        return f" (did you mean file:{spec}?)"
    near = get_close_matches(spec.partition(":")[0], FAMILIES, n=2)
    known = [FAMILIES[name].spelling for name in near or FAMILIES]
    return f" (did you mean {' or '.join(known)}?)" if near else f" (known: {', '.join(known)})"


def _check_split(options: FamilyOptions) -> None:
    if options.split not in get_args(Split):
        raise UsageError(f"--split {options.split!r}: expected one of {', '.join(get_args(Split))}")
    if options.heldout_share is not None:
        if options.split == "all":
            raise UsageError("--heldout-share goes with --split train or --split heldout")
        if not 0 < options.heldout_share < 1:
            raise UsageError(f"--heldout-share {options.heldout_share}: expected a number between 0 and 1")


# Beyond this integers are read differently by different readers of JSON, and draws lose their evenness.
MOST_INT = 10**15


def bounds(
    name: str, given: tuple[int, int] | None, default: tuple[int, int], least: int | None = None
) -> tuple[int, int]:
    """A range the user gave, checked, or the default. Raises UsageError."""
    low, high = default if given is None else given
    if low > high:
        raise UsageError(f"{flag_of(name)} {low}:{high}: the first bound is above the second")
    if max(-low, high) > MOST_INT:
        raise UsageError(f"{flag_of(name)} {low}:{high}: the bounds lie beyond {MOST_INT}")
    if least is not None and low < least:
        raise UsageError(f"{flag_of(name)} {low}:{high}: the least is {least}")
    return low, high


def one_of(name: str, given: str | None, allowed: tuple[str, ...]) -> str:
    """A choice the user gave, checked, or the first of those allowed. Raises UsageError."""
    if given is None:
        return allowed[0]
    if given not in allowed:
        raise UsageError(f"{flag_of(name)} {given!r}: expected one of {', '.join(allowed)}")
    return given


def operators_from(
    given: tuple[str, ...] | None, default: tuple[str, ...], allowed: tuple[str, ...]
) -> tuple[str, ...]:
    """The operators the user gave, checked, each once, or the default. Raises UsageError."""
    chosen = default if given is None else tuple(dict.fromkeys(given))
    if not chosen or any(operator not in allowed for operator in chosen):
        raise UsageError(f"--operators {','.join(chosen)}: expected some of {','.join(allowed)}")
    return chosen
