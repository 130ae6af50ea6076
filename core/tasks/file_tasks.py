"""The family `file:PATH`: one task a row of a JSONL or CSV file of questions and answers.

A slice, `file:PATH[10:20]`, takes rows 10 to 19, counted from 0 without a CSV's header and without blank lines; either
bound may be left out. Files whose name ends in .csv or .tsv are CSV with a header line, all others JSONL.

`fields` says which column or key holds what: prompt=question (default prompt=prompt), reference=answer (default
reference=reference), id=uid. A name with dots, data.question, reaches into objects. A prompt is a text or chat
messages. Without id= a task is called STEM-ROW after the file's name and the row's number, whatever the slice; the seed
plays no part. Rows are read one after another, so a file of any size takes no memory.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any

import msgspec

from strop.core.errors import DataError, InputMissing, UsageError, Where
from strop.core.records import Task
from strop.core.tasks.families import BadRow, Family, FamilyOptions, one_of
from strop.core.tasks.verifiers import VERIFIERS, open_verifier

SLICE = re.compile(r"(.+)\[([0-9]*):([0-9]*)\]", re.DOTALL)
CSV_DELIMITERS = {".csv": ",", ".tsv": "\t"}
TARGETS = ("prompt", "reference", "id")


@dataclass(frozen=True, slots=True)
class Row:
    """One row: its number in the file (from 0) and its values, or what is wrong with it."""

    number: int
    where: Where
    text: str
    values: dict[str, Any]
    error: str | None = None

    def bad(self, message: str, field: str | None = None) -> BadRow:
        """The error of this row."""
        return BadRow(message, where=self.where, field=field, text=self.text)


class FileTasks(Family):
    """Options: fields, format, template, verifier (default exact) and its options.

    The format "text" leaves a text prompt as it is, "chat" makes it a user's message.
    """

    applies = frozenset({"fields", "format", "template", "verifier", "verifier_options"})
    is_finite = True

    def __init__(self, path: str, options: FamilyOptions) -> None:
        self._path, self._start, self._stop = _parse_slice(path)
        super().__init__(Path(self._path).stem, options)
        has_slice = self._start > 0 or self._stop is not None
        bounds = f"[{self._start}:{'' if self._stop is None else self._stop}]" if has_slice else ""
        self.spec = f"file:{Path(self._path).name}{bounds}"
        self._fields = {"prompt": "prompt", "reference": "reference", **_parse_fields(options.fields)}
        self._is_chat = one_of("format", options.format, ("text", "chat")) == "chat"
        self._template = options.template
        if self._template is not None and "{prompt}" not in self._template:
            raise UsageError("--template holds {prompt} where the question goes")
        name = options.verifier or "exact"
        if name not in VERIFIERS:
            raise UsageError(f"--verifier {name!r}: expected one of {', '.join(VERIFIERS)}")
        self._verifier = {"name": name, **dict(options.verifier_options)}
        self._judge = open_verifier(name)
        self._position = 0
        self._rows = self._admitted()
        self._ids: set[bytes] = set()

    def make(self, index: int, seed: int) -> Task:
        """The task of row `index` of the slice (of those of its rows that the split admits).

        Forward reading is cheap, going back starts the file again. Raises BadRow for a row that makes no task.
        """
        if index < self._position:
            self._rows, self._position = self._admitted(), 0
            self._ids.clear()
        for row in self._rows:
            self._position += 1
            if self._position <= index:
                continue
            if row.error is not None:
                raise row.bad(row.error)
            try:
                return self._task(row)
            except DataError as error:
                raise row.bad(error.message, error.field) from None
        raise IndexError(index)

    def close(self) -> None:
        """Closes the file."""
        self._rows.close()
        self._judge.close()

    def task_id(self, seed: int, index: int) -> str:
        """STEM-ROW: the seed plays no part."""
        return f"{self.name}-{index}"

    def _task(self, row: Row) -> Task:
        prompt = self._prompt(row)
        task_id = self.task_id(0, row.number)
        if "id" in self._fields:
            task_id = str(_look_up(row.values, self._fields["id"], "id"))
            # Digests, not texts: 16 bytes a task is what a duplicate costs to find.
            digest = blake2b(task_id.encode("utf-8", "surrogatepass"), digest_size=16).digest()
            if digest in self._ids:
                raise DataError(f"{task_id!r} came before in this file", field=self._fields["id"])
            self._ids.add(digest)
        source = self._fields["reference"]
        named = "reference" in dict(self.options.fields)
        reference = _look_up(row.values, source, "reference") if named or source in row.values else None
        if self._template is not None and isinstance(prompt, str):
            prompt = self._template.replace("{prompt}", prompt)
        if self._is_chat and isinstance(prompt, str):
            prompt = [{"role": "user", "content": prompt}]
        task = Task(id=task_id, prompt=prompt, verifier=self._verifier, reference=reference)
        try:
            self._judge.check(task)
        except DataError as error:
            # A bad option is the user's, and the same for all rows; a bad reference is the row's.
            if error.field is not None and error.field.startswith("verifier"):
                raise UsageError(f"--verifier {self._verifier['name']}: {error.field}: {error.message}") from None
            raise DataError(error.message, field=source) from None
        return task

    def _prompt(self, row: Row) -> str | list[dict[str, Any]]:
        source = self._fields["prompt"]
        value = _look_up(row.values, source, "prompt")
        if isinstance(value, list) and value and all(isinstance(item, dict) and "role" in item for item in value):
            return value
        if isinstance(value, str) and value.strip():
            return value
        raise DataError("expected a text or chat messages", field=source)

    def _admitted(self) -> Generator[Row]:
        """The rows of the slice that the split admits; a bad row is in every part."""
        for row in _read_rows(self._path):
            if self._stop is not None and row.number >= self._stop:
                return
            if row.number < self._start:
                continue
            if row.error is not None or self.options.split == "all":
                yield row
                continue
            try:
                prompt = self._prompt(row)
            except DataError:
                yield row
                continue
            if self.admits(prompt if isinstance(prompt, str) else msgspec.json.encode(prompt).decode()):
                yield row


def _parse_slice(path: str) -> tuple[str, int, int | None]:
    match = None if Path(path).exists() else SLICE.fullmatch(path)
    if match is None:
        return path, 0, None
    start, stop = int(match[2] or 0), int(match[3]) if match[3] else None
    if stop is not None and stop < start:
        raise UsageError(f"the slice [{match[2]}:{match[3]}] ends before it begins")
    return match[1], start, stop


def _parse_fields(pairs: tuple[tuple[str, str], ...]) -> dict[str, str]:
    for target, _ in pairs:
        if target not in TARGETS:
            raise UsageError(f"--field {target}=...: expected one of {', '.join(TARGETS)} before the equals sign")
    return dict(pairs)


def _look_up(values: dict[str, Any], source: str, target: str) -> Any:
    if source in values:
        return values[source]
    value: Any = values
    for part in source.split("."):
        value = value.get(part, msgspec.UNSET) if isinstance(value, dict) else msgspec.UNSET
    if value is msgspec.UNSET:
        known = ", ".join(values)
        raise DataError(f"missing; --field {target}=NAME names another (there are: {known})", field=source)
    return value


def _read_rows(path: str) -> Iterator[Row]:
    try:
        file = Path(path).open("rb")  # noqa: SIM115
    except OSError as error:
        raise InputMissing(f"{path}: {error.strerror}") from None
    with file:
        delimiter = CSV_DELIMITERS.get(Path(path).suffix.lower())
        try:
            yield from _json_rows(file, path) if delimiter is None else _csv_rows(file, path, delimiter)
        except OSError as error:
            raise InputMissing(f"{path}: {error.strerror}") from None


def _json_rows(file: IO[bytes], path: str) -> Iterator[Row]:
    number = 0
    for line_number, line in enumerate(file, 1):
        if line_number == 1:
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line.strip():
            continue
        where = Where(path, line_number)
        values: Any = {}
        error: str | None = None
        try:
            values = msgspec.json.decode(line)
        except (msgspec.DecodeError, UnicodeDecodeError) as failure:
            error = f"not JSON, or not UTF-8 ({failure}); expected one JSON object a line"
        else:
            if not isinstance(values, dict):
                error = "not a JSON object; expected one a line"
        yield Row(number, where, line.decode("utf-8", "replace"), values if error is None else {}, error)
        number += 1


def _csv_rows(file: IO[bytes], path: str, delimiter: str) -> Iterator[Row]:
    # The default limit of 128 KiB a field is shorter than some questions.
    csv.field_size_limit(sys.maxsize)
    reader = csv.reader(io.TextIOWrapper(file, encoding="utf-8-sig", newline=""), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    number = 0
    while True:
        begin = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except (csv.Error, UnicodeDecodeError) as failure:
            # After this the reader is at no known place; what follows cannot be trusted.
            message = f"not CSV, or not UTF-8 ({failure}); the rest of the file is not read"
            yield Row(number, Where(path, begin), "", {}, message)
            return
        if not cells:
            continue
        where = Where(path, begin)
        if names is None:
            names = cells
            if len(set(names)) != len(names):
                raise DataError("two columns have the same name", where=where)
            continue
        text = delimiter.join(cells)
        if len(cells) == len(names):
            yield Row(number, where, text, dict(zip(names, cells, strict=True)))
        else:
            yield Row(number, where, text, {}, f"{len(cells)} cells under {len(names)} columns")
        number += 1
