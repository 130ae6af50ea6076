"""The input of an audit: pairs of a right and a wrong answer, or flat labelled texts, out of CSV and JSONL files.

What is read stays beside what it came from, so that a kept pair leaves as it came: a JSON line byte for byte, a CSV row
as an `example` record and, in a report, as the row's own bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from msgspec import Struct

from strop.core.audit.table import read_rows
from strop.core.errors import DataError, UsageError
from strop.core.records import Record

# What a field is called where no option says it: our name, then TruthfulQA's column.
QUESTION = ("question", "Question")
CORRECT = ("correct", "Best Answer")
INCORRECT = ("incorrect", "Best Incorrect Answer")
MIN_PAIRS = 5
KIND = "example"
TRUE = ("1", "true", "correct", "right", "yes")
FALSE = ("0", "false", "incorrect", "wrong", "no")


@dataclass(frozen=True, slots=True)
class FieldNames:
    """The names of the fields; each is a tuple of which the first that a record has counts."""

    question: tuple[str, ...] = QUESTION
    correct: tuple[str, ...] = CORRECT
    incorrect: tuple[str, ...] = INCORRECT
    group: tuple[str, ...] = ("group",)
    text: tuple[str, ...] = ("text",)
    label: tuple[str, ...] = ("label",)
    positive: str | None = None


@dataclass(frozen=True, slots=True)
class Pair:
    """A question (never read by a probe), its right and its wrong answer, and the record they came in."""

    question: str
    correct: str
    incorrect: str
    record: Record
    raw: bytes | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """A flat row: a text with a label, and the group it must not be separated from (None: a group of its own)."""

    text: str
    label: bool
    group: str | None
    record: Record


class PairFields(Struct, kw_only=True, omit_defaults=True):
    """A question with a right and a wrong answer; or, to be audited alone, a flat row: a text and its label.

    The names are the usual ones, which options change. CSV with TruthfulQA's columns is read too.
    """

    question: str | None = None
    correct: str | None = None
    incorrect: str | None = None
    group: str | None = None
    text: str | None = None
    label: bool | int | str | None = None


@dataclass(slots=True)
class Input:
    """All that was read: pairs or rows, never both; the CSV header's bytes where there was one."""

    pairs: list[Pair] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)
    header: bytes | None = None
    num_foreign: int = 0

    def groups(self) -> list[int]:
        """The number of each pair's group: pairs with the same question share one; no question is no group."""
        numbers: dict[str, int] = {}
        found = []
        for index, pair in enumerate(self.pairs):
            key = " ".join(pair.question.split()).casefold() or f"\0{index}"
            found.append(numbers.setdefault(key, len(numbers)))
        return found


def read_input(
    sources: Sequence[str],
    stdin: IO[bytes],
    names: FieldNames,
    *,
    on_bad: Callable[[DataError, bytes], None] | None = None,
    on_foreign: Callable[[Record], None] | None = None,
) -> Input:
    """Reads pairs or flat rows from the files ("-" is `stdin`); CSV and JSONL are told apart by the first byte.

    Records of other kinds go to `on_foreign`. A bad line raises DataError with its place, or goes to `on_bad` with its
    bytes and reading goes on. Raises InputMissing for a file that cannot be read.
    """
    found = Input()
    for record, raw, header in read_rows(sources, stdin, on_bad):
        if record.kind != KIND:
            found.num_foreign += 1
            if on_foreign is not None:
                on_foreign(record)
            continue
        try:
            item = _item(record, raw, names)
            if (found.rows and isinstance(item, Pair)) or (found.pairs and isinstance(item, Row)):
                raise record.bad("pairs and flat rows in one input; expected one of the two", None)
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(error, raw if raw is not None else record.encode())
            continue
        found.header = found.header or header
        if isinstance(item, Pair):
            found.pairs.append(item)
        else:
            found.rows.append(item)
    return found


def _item(record: Record, raw: bytes | None, names: FieldNames) -> Pair | Row:
    has = record.fields.keys()
    if not any(name in has for name in names.correct + names.incorrect) and any(name in has for name in names.text):
        return _row(record, names)
    answers = [_text(record, wanted, is_csv=raw is not None) for wanted in (names.correct, names.incorrect)]
    question = next((name for name in names.question if name in has), None)
    asked = "" if question is None else record.get(question, str | None) or ""
    return Pair(asked, answers[0], answers[1], record, raw)


def _text(record: Record, wanted: tuple[str, ...], *, is_csv: bool) -> str:
    name = next((name for name in wanted if name in record.fields), None)
    if name is None:
        raise record.bad(f"missing; expected an answer under {' or '.join(map(repr, wanted))}", wanted[0])
    text: str | None = record.get(name, str | None)
    if text is None:
        raise record.bad("null; expected an answer (an empty one is \"\")", name)
    if is_csv and not text.strip():
        raise record.bad("an empty cell; expected an answer (a truly empty one can be said in JSONL)", name)
    return text


def _row(record: Record, names: FieldNames) -> Row:
    text = _text(record, names.text, is_csv=False)
    name = next((name for name in names.label if name in record.fields), None)
    if name is None:
        raise record.bad(f"missing; a flat row has {names.text[0]} and {names.label[0]}", names.label[0])
    value: Any = record.get(name)
    spelled = ("true" if value else "false") if isinstance(value, bool) else str(value)
    if names.positive is not None:
        label = spelled == names.positive
    elif spelled.casefold() in TRUE or spelled.casefold() in FALSE:
        label = spelled.casefold() in TRUE
    else:
        raise record.bad(f"{spelled!r}; expected 1 or 0, true or false, or --positive LABEL", name)
    group = next((name for name in names.group if name in record.fields), None)
    key = None if group is None else record.get(group)
    return Row(text, label, None if key in (None, "") else str(key), record)


def check_pairs(found: Input) -> None:
    """Raises DataError unless there are enough pairs to audit, and of enough questions."""
    where = found.pairs[-1].record.where if found.pairs else None
    if len(found.pairs) < MIN_PAIRS:
        raise DataError(f"{len(found.pairs)} pairs; expected at least {MIN_PAIRS}, one for each fold", where=where)
    if (questions := len(set(found.groups()))) < MIN_PAIRS:
        raise DataError(
            f"{questions} different questions; expected at least {MIN_PAIRS}, one for each fold", where=where,
            field="question",
        )  # fmt: skip


def check_rows(found: Input) -> None:
    """Raises DataError unless flat rows have both labels, five of each (or five groups)."""
    rows = found.rows
    labels = {row.label for row in rows}
    where = rows[-1].record.where if rows else None
    if len(labels) < 2:
        only = "right" if True in labels else "wrong"
        raise DataError(f"every text is labelled {only}; expected both labels", where=where, field="label")
    for label in (True, False):
        count = sum(row.label == label for row in rows)
        if count < MIN_PAIRS:
            raise DataError(
                f"{count} texts labelled {'right' if label else 'wrong'}; expected at least {MIN_PAIRS}", where=where
            )
    if is_grouped(rows) and len({row.group for row in rows}) < MIN_PAIRS:
        raise DataError(f"fewer than {MIN_PAIRS} groups, one for each fold", where=where, field="group")


def refuse_to_prune(rows: Iterable[Row]) -> None:
    """Flat rows are for audits only: raises DataError at the first group that is no pair, else UsageError."""
    members: dict[str, list[Row]] = {}
    for row in rows:
        members.setdefault(row.group or "", []).append(row)
    for key, group in members.items():
        if key and sorted(row.label for row in group) != [False, True]:
            raise group[-1].record.bad(
                f"group {key!r} has {sum(row.label for row in group)} right and "
                f"{sum(not row.label for row in group)} wrong texts; pruning takes pairs, one of each "
                "(--audit-only takes any group)",
                "group",
            )
    raise UsageError("flat rows can be audited (--audit-only), not pruned; give pairs: question, correct, incorrect")


def is_grouped(rows: Sequence[Row]) -> bool:
    """Whether any two rows belong together."""
    named = [row.group for row in rows if row.group is not None]
    return len(set(named)) < len(named)


def field_names(**given: str | None) -> FieldNames:
    """The names with those that options give in place of the usual ones."""
    usual = FieldNames()
    chosen = {name: (value,) for name, value in given.items() if value is not None and name != "positive"}
    return FieldNames(
        **{**{name: getattr(usual, name) for name in ("question", "correct", "incorrect", "group", "text", "label")},
           **chosen},
        positive=given.get("positive"),
    )  # fmt: skip


def names_of(sources: Sequence[str]) -> str:
    """The inputs as a report names them: without folders, which differ between machines."""
    return ", ".join("<stdin>" if source == "-" else Path(source).name for source in sources)


