"""Rows of CSV and lines of JSONL as records, with the place and the bytes of each."""

from __future__ import annotations

import csv
import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO

from strop.core.errors import DataError, InputMissing, Where
from strop.core.records import Record

OnBad = Callable[[DataError, bytes], None]
# (record, the CSV row's bytes or None, the CSV header's bytes or None)
Item = tuple[Record, bytes | None, bytes | None]
BOM = b"\xef\xbb\xbf"


def read_rows(sources: Sequence[str], stdin: IO[bytes], on_bad: OnBad | None) -> Iterator[Item]:
    """Every row of the files; a line that opens with a brace makes a file JSONL, anything else CSV.

    A JSON object without "kind" is an `example`. Raises DataError (or hands it to `on_bad`) and InputMissing.
    """
    for source in sources:
        if source == "-":
            yield from _read_one(stdin, source, on_bad)
            continue
        try:
            file = Path(source).open("rb")  # noqa: SIM115
        except OSError as error:
            raise InputMissing(f"{source}: {error.strerror}") from None
        with file:
            yield from _read_one(file, source, on_bad)


def _read_one(file: IO[bytes], source: str, on_bad: OnBad | None) -> Iterator[Item]:
    lines = Lines(file, source)
    try:
        first = lines.skip_blank()
        if first is None:
            return
        yield from (_json_lines if first.lstrip().startswith((b"{", b"[")) else _csv_rows)(lines, on_bad)
    except OSError as error:
        name = "<stdin>" if source == "-" else source
        raise InputMissing(f"{name}: {(error.strerror or str(error)).lower()}") from None


class Lines:
    """Lines of a file as text, with the number and the bytes of those taken; an iterator that survives a bad line."""

    def __init__(self, file: IO[bytes], source: str) -> None:
        self._lines: Iterator[bytes] = iter(file)
        self.source = source
        self.number = 0
        self.taken = b""

    def skip_blank(self) -> bytes | None:
        """The first line that is not blank, still to come; None at the end."""
        for line in self._lines:
            text = line.removeprefix(BOM) if self.number == 0 else line
            if text.strip():
                self._lines = itertools.chain([text], self._lines)
                return text
            self.number += 1
        return None

    def __iter__(self) -> Lines:
        return self

    def __next__(self) -> str:
        line = next(self._lines)
        self.number += 1
        self.taken += line
        try:
            return line.decode()
        except UnicodeDecodeError:
            raise DataError("not UTF-8", where=Where(self.source, self.number)) from None


def _json_lines(lines: Lines, on_bad: OnBad | None) -> Iterator[Item]:
    while True:
        lines.taken = b""
        try:
            text = next(lines)
            if not text.strip():
                continue
            yield Record.parse(text, Where(lines.source, lines.number), "example"), None, None
        except StopIteration:
            return
        except DataError as error:
            if on_bad is None:
                raise
            on_bad(error, lines.taken)


def _csv_rows(lines: Lines, on_bad: OnBad | None) -> Iterator[Item]:
    reader = csv.reader(lines, strict=True)
    header: list[str] | None = None
    header_bytes = b""
    while True:
        lines.taken, start = b"", lines.number + 1
        where = Where(lines.source, start)
        try:
            try:
                cells = next(reader)
            except csv.Error as error:
                raise DataError(f"not CSV: {error}", where=where) from None
            if header is None:
                header, header_bytes = cells, lines.taken
                if len(set(header)) < len(header):
                    raise DataError("two columns have one name", where=where)
                continue
            if not cells:
                continue
            if len(cells) != len(header):
                raise DataError(f"{len(cells)} cells; the header names {len(header)} columns", where=where)
            values = dict(zip(header, cells, strict=True))
            values.pop("kind", None)
            record = Record.make("example", values)
            record.where = where
            yield record, lines.taken, header_bytes
        except StopIteration:
            return
        except DataError as error:
            if on_bad is None or header is None:
                raise
            on_bad(error, lines.taken)
