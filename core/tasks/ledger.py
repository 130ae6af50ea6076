"""The attempts of a stream, counted task by task, while its records wait for the verdicts.

A verdict needs all attempts at a task, which may come in any order and in several groups. So records are held, tasks in
memory and lines in a file once they are many, until the end of the input, or, where the input promises to hold each
task together with its attempts, until the next task begins.
"""

from __future__ import annotations

import tempfile
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from msgspec import Struct

from strop.core.records import Record
from strop.core.tasks.calibration import ACCEPT, FIRST_VERSION, Rule, Tally, calibration_fields, policy_of, read_attempt
from strop.core.tasks.verdicts import Verdicts

# Held lines beyond this leave memory for a temporary file.
HELD_IN_MEMORY_BYTES = 16 << 20
# What makes two task records with one id and one statement version the same task.
STATEMENT_FIELDS = ("prompt", "env", "verifier", "reference")


class TaskFields(Struct, kw_only=True):
    """What calibration reads of a task."""

    id: str
    statement_version: int = FIRST_VERSION


@dataclass(slots=True, eq=False)
class Entry:
    """One task: its records by statement version (none: it never came as a record), its attempts by version."""

    id: str
    place: int
    records: dict[int, Record] = field(default_factory=dict)
    tallies: dict[int, Tally] = field(default_factory=dict)
    policies: dict[int, set[bytes]] = field(default_factory=dict)
    rollout_ids: set[str] = field(default_factory=set)

    @property
    def version(self) -> int:
        """The statement version whose attempts count: the newest record's, or the newest attempt's without a record."""
        return max(self.records or self.tallies)

    def tally(self) -> Tally:
        """The attempts that count; those at other versions are stale: they say nothing of this statement."""
        found = self.tallies.get(self.version, Tally())
        others = [tally for version, tally in self.tallies.items() if version != self.version]
        stale = sum(tally.attempts + tally.errors for tally in others)
        return Tally(found.outcomes, found.errors, stale, found.caps)


def superseded_fields(entry: Entry, version: int, rule: Rule) -> dict[str, Any]:
    """The `calibration` of a task record whose statement has a newer version in the stream: nothing of it counts."""
    old = entry.tallies.get(version, Tally())
    return calibration_fields(Tally(stale=old.attempts + old.errors), rule) | {"superseded_by": entry.version}


@dataclass(frozen=True, slots=True)
class Given:
    """A record on its way out; `accepted` is None for one that belongs to no task."""

    record: Record
    made: bool = False
    accepted: bool | None = None


class Ledger:
    """Takes a stream's records in, gives them back in order with their tasks decided.

    A task leaves where it was first heard of, be it by its own record or by an attempt; one that never came as a record
    leaves as a stub, its id and calibration. `contiguous` input is released task by task; `is_next` says when.
    """

    def __init__(self, *, contiguous: bool = False, hold_rollouts: bool = True) -> None:
        self._contiguous = contiguous
        self._hold_rollouts = hold_rollouts
        self._entries: dict[str, Entry] = {}
        self._closed: set[str] = set()
        self._held = _Held()
        self._slots: list[tuple[Entry, int | None]] = []
        self.num_repeats = 0

    def is_next(self, record: Record) -> bool:
        """Whether this record begins another task, so that a contiguous input's last one is complete."""
        if not self._contiguous or not self._entries or record.kind not in ("task", "rollout"):
            return False
        name = record.get("id" if record.kind == "task" else "task")
        return isinstance(name, str) and name not in self._entries

    def add(self, record: Record) -> None:
        """Takes one record. Raises DataError for a bad one, which then is not held."""
        if record.kind == "task":
            self._add_task(record)
        elif record.kind == "rollout":
            self._add_attempt(record)
        else:
            self._held.add(record, None)

    def _entry(self, name: str, record: Record) -> Entry:
        if name in self._closed:
            raise record.bad(f"task {name!r} came before and has left (--contiguous promised otherwise)", "task")
        entry = self._entries.get(name)
        if entry is None:
            entry = self._entries[name] = Entry(name, len(self._slots))
            self._hold_slot(entry, None)
        return entry

    def _hold_slot(self, entry: Entry, version: int | None) -> None:
        self._held.add_slot(len(self._slots))
        self._slots.append((entry, version))

    def _add_task(self, record: Record) -> None:
        task = record.view(TaskFields)
        entry = self._entry(task.id, record)
        before = entry.records.get(task.statement_version)
        if before is not None:
            if any(before.get(name) != record.get(name) for name in STATEMENT_FIELDS):
                raise record.bad(
                    f"task {task.id!r} came before ({before.where}) with another statement, but the same version", "id"
                )
            self.num_repeats += 1
            return
        if entry.records:
            self._hold_slot(entry, task.statement_version)
        else:
            self._slots[entry.place] = (entry, task.statement_version)
        entry.records[task.statement_version] = record

    def _add_attempt(self, record: Record) -> None:
        attempt = read_attempt(record)
        policy = policy_of(record)
        entry = self._entry(attempt.task, record)
        if attempt.id in entry.rollout_ids:
            raise record.bad(f"{attempt.id!r} came before among the attempts at task {attempt.task!r}", "id")
        entry.rollout_ids.add(attempt.id)
        entry.tallies.setdefault(attempt.version, Tally()).add(attempt.outcome, attempt.horizon)
        if policy is not None and attempt.error is None:
            entry.policies.setdefault(attempt.version, set()).add(policy)
        if self._hold_rollouts:
            self._held.add(record, entry.place)

    def release(self, verdicts: Verdicts) -> Iterator[Given]:
        """All that is held, in order, decided."""
        decided = {
            name: verdicts.decide(entry.tally(), entry.policies.get(entry.version, set()))
            for name, entry in self._entries.items()
        }
        for place, record in self._held.release():
            if place is None:
                assert record is not None
                yield Given(record)
                continue
            entry, version = self._slots[place]
            fields = decided[entry.id]
            if record is not None:
                yield Given(record, accepted=fields["verdict"] == ACCEPT)
            else:
                yield self._task(entry, version, fields, verdicts.rule)
        self._closed.update(self._entries if self._contiguous else ())
        self._entries.clear()
        self._slots.clear()

    def _task(self, entry: Entry, version: int | None, fields: dict[str, Any], rule: Rule) -> Given:
        if version is None:
            told = {"statement_version": entry.version} if entry.version != FIRST_VERSION else {}
            stub = Record.make("task", {"id": entry.id, **told, "calibration": fields})
            return Given(stub, made=True, accepted=fields["verdict"] == ACCEPT)
        if version != entry.version:
            fields = superseded_fields(entry, version, rule)
        record = entry.records[version]
        record.set(calibration=fields)
        return Given(record, accepted=fields["verdict"] == ACCEPT)


class _Held:
    """Lines in order, and among them places for tasks. Lines go to a temporary file once they are many."""

    def __init__(self) -> None:
        self._file: IO[bytes] = self._open()
        self._kinds: list[str] = []
        # For each held thing: the index of its kind (-1 for a task's place), and its task's place (-1 for none).
        self._kind_of = array("q")
        self._place_of = array("q")

    @staticmethod
    def _open() -> IO[bytes]:
        return tempfile.SpooledTemporaryFile(max_size=HELD_IN_MEMORY_BYTES, prefix="strop-")

    def add(self, record: Record, place: int | None) -> None:
        """Holds a line, which may belong to the task at `place`."""
        if record.kind not in self._kinds:
            self._kinds.append(record.kind)
        self._kind_of.append(self._kinds.index(record.kind))
        self._place_of.append(-1 if place is None else place)
        self._file.write(record.encode() + b"\n")

    def add_slot(self, place: int) -> None:
        """Holds a task's place."""
        self._kind_of.append(-1)
        self._place_of.append(place)

    def release(self) -> Iterator[tuple[int | None, Record | None]]:
        """(place, None) for a task, (its task's place or None, record) for a line; then holds nothing any more."""
        self._file.seek(0)
        for kind, place in zip(self._kind_of, self._place_of, strict=True):
            if kind < 0:
                yield place, None
            else:
                line = self._file.readline().decode()
                yield (None if place < 0 else place), Record(self._kinds[kind], {}, None, line)
        self._file.close()
        self._file = self._open()
        self._kind_of = array("q")
        self._place_of = array("q")
