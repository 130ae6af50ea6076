"""What `strop distill` reads from files beside the stream; and --sft, which needs no model."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli.session import Session
from strop.core.distill.attempts import TaskBook
from strop.core.errors import DataError, UsageError
from strop.core.records import Record
from strop.core.streams import read_records

if TYPE_CHECKING:
    from strop.core.distill.conditions import StoredCondition


def articles(file: Path | None) -> list[str]:
    """The articles of --condition wiki that are long enough. Raises UsageError, DataError."""
    from strop.core.distill.conditions import MIN_ARTICLE

    if file is None:
        raise UsageError("--condition wiki needs --articles FILE with text records")
    found = [record.get("text", str) for record in read_records([str(file)], sys.stdin.buffer) if record.kind == "text"]
    long = [text for text in found if text is not None and len(text) >= MIN_ARTICLE]
    if not long:
        raise DataError(f"{file}: none of {len(found)} texts has {MIN_ARTICLE} characters")
    return long


def stored_conditions(file: Path | None) -> list[StoredCondition]:
    """The conditions that --conditions holds from earlier runs."""
    from strop.core.distill.writing import read_conditions

    if file is None or not file.exists():
        return []
    return read_conditions(read_records([str(file)], sys.stdin.buffer))


def cold_start(io: Session, tasks: Path | None) -> None:
    """--sft: rollouts in, sft records out; other kinds pass."""
    from strop.core.distill.cold_start import sft_fields, why_not

    book = task_book(tasks)
    made, left = 0, Counter[str]()
    for record in io.records():
        try:
            attempt = book.place(record)
            reason = None if attempt is None else why_not(attempt)
            example = None if attempt is None or reason else Record.make("sft", sft_fields(attempt))
        except DataError as error:
            io.reject(error, record)
            continue
        if attempt is None:
            io.write(record)
        elif example is None:
            left[reason or ""] += 1
        else:
            made += 1
            io.emit(example)
    io.note(f"{made} examples" + (f"; left out: {', '.join(f'{n} {why}' for why, n in left.items())}" if left else ""))


def task_book(file: Path | None) -> TaskBook:
    """A book of tasks, with those of a file that do not travel in the stream."""
    book = TaskBook()
    for record in read_records([str(file)], sys.stdin.buffer) if file else ():
        if record.kind == "task":
            book.place(record)
    return book
