"""What comes in: examples that are checked, human labels, the buffer of an earlier run."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from msgspec import Struct

from strop.core.debate.buffer import Buffer, Entry
from strop.core.debate.labels import normal_query
from strop.core.debate.verdict import VERDICTS
from strop.core.errors import DataError
from strop.core.records import Example, Label, Record
from strop.core.streams import read_records


class _Human(Struct, kw_only=True):
    id: str
    y_human: int
    query: str | None = None


class _Entry(Struct, kw_only=True):
    id: str
    pattern: str
    priority: float
    query: str
    terms: list[str] = []
    used: str | None = None


class Humans:
    """Human labels by example, and the queries that they were given to."""

    def __init__(self, records: Iterable[Record] = ()) -> None:
        """Raises DataError for a label out of range and for an example that is labelled twice."""
        self.labels: dict[str, int] = {}
        self._queries: set[bytes] = set()
        for record in records:
            if record.kind not in ("example", "label"):
                continue
            found = record.view(_Human)
            check_raw(record, "y_human", found.y_human)
            if found.id in self.labels:
                raise record.bad(f"example {found.id!r} was labelled before", "id")
            self.labels[found.id] = found.y_human
            if found.query is not None:
                self._queries.add(_digest(found.query))

    def holds_query(self, query: str) -> bool:
        """Whether a request with the same normalised text is among those of the evaluation."""
        return _digest(query) in self._queries


class Intake:
    """Checks examples and labels as they come: ids once, labels in range, no query in two splits. It keeps hashes."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, str], Any] = {}
        self._splits: dict[bytes, tuple[str, Any]] = {}

    def read(self, record: Record) -> Example:
        """The example of a record. Raises DataError."""
        example = record.view(Example)
        for name in ("id", "query"):
            if not getattr(example, name).strip():
                raise record.bad("empty", name)
        check_raw(record, "y_raw", example.y_raw)
        check_raw(record, "y_human", example.y_human)
        self._note(record, "example", example.id, example.query, example.split)
        return example

    def read_label(self, record: Record) -> Label:
        """The label of a record, checked like an example. Raises DataError."""
        label = record.view(Label)
        check_raw(record, "verdict", label.verdict)
        check_raw(record, "y_raw", label.y_raw)
        check_raw(record, "trace.y_human", label.trace.get("y_human"))
        self._note(record, "label", label.id, label.query, label.split)
        return label

    def _note(self, record: Record, kind: str, name: str, query: str, split: str | None) -> None:
        if (kind, name) in self._ids:
            raise record.bad(f"{kind} {name!r} came before, at {self._ids[kind, name]}", "id")
        if split is not None:
            known, where = self._splits.setdefault(_digest(query), (split, record.where))
            if known != split:
                message = f"the same request is in split {known!r} at {where}: a query must not cross splits"
                raise record.bad(message, "query")
        self._ids[kind, name] = record.where


def check_raw(record: Record, name: str, value: int | None) -> None:
    """Raises DataError for a raw label that is none of 0, 1, 2."""
    if value is not None and value not in VERDICTS:
        raise record.bad(f"{value}, expected a raw label 0, 1 or 2", name)


def read_buffer(path: Path) -> Buffer:
    """The buffer that an earlier run left, empty where there is none yet. Raises DataError."""
    if not path.exists():
        return Buffer()
    buffer = Buffer()
    for record in read_records([str(path)], sys.stdin.buffer):
        if record.kind != "disagreement":
            raise record.bad(f"{record.kind!r}; a buffer holds disagreement records", "kind")
        found = record.view(_Entry)
        gap, slash, direction = found.pattern.partition("/")
        if not gap or not slash or direction not in ("over_accept", "over_reject", "unsettled"):
            raise record.bad(f"{found.pattern!r}, expected GAP/DIRECTION", "pattern")
        entry = Entry(found.id, found.pattern, found.priority, found.query, found.terms, found.used)
        if not buffer.add(entry):
            raise record.bad(f"example {found.id!r} is in the buffer already", "id")
    return buffer


def buffer_records(buffer: Buffer) -> list[Record]:
    """The buffer as records of kind disagreement."""
    return [Record.make("disagreement", asdict(entry)) for entry in buffer.entries.values()]


def read_sections_option(text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    """The names in a comma-separated list. Raises DataError for one that does not exist."""
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise DataError(f"expected some of {','.join(known)}, got {text!r}")
    return names


def _digest(query: str) -> bytes:
    return blake2b(normal_query(query).encode("utf-8", "replace"), digest_size=16).digest()
