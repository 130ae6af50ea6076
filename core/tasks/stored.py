"""The family `records:PATH`: task records that are there already, so that they can be written as folders."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from strop.core.errors import DataError, Where
from strop.core.records import Record, Task
from strop.core.streams import read_records
from strop.core.tasks.families import BadRow, Family, FamilyOptions


class StoredTasks(Family):
    """The tasks of a file, in order; "-" is stdin. Records of other kinds are left out."""

    is_finite = True

    def __init__(self, path: str, options: FamilyOptions) -> None:
        super().__init__("records", options)
        self._path = path

    def make(self, index: int, seed: int) -> Task:
        """Never asked for: these tasks are not made."""
        raise IndexError

    def tasks(self, seed: int, start: int = 0) -> Iterator[Task | Record | BadRow]:
        """The records from `start` on. Raises DataError for a line that is none."""
        found = (record for record in read_records([self._path], sys.stdin.buffer) if record.kind == "task")
        for number, record in enumerate(found):
            if number < start:
                continue
            try:
                record.view(Task)
            except DataError as error:
                where = error.where or Where(self._path, number + 1)
                yield BadRow(error.message, where=where, field=error.field, text=record.encode().decode())
                continue
            yield record
