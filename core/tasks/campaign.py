"""Making the attempts that calibration needs: many tasks at once, each in rounds, let out in the order of the input."""

from __future__ import annotations

import io
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from msgspec import Struct

from strop.core.errors import DataError
from strop.core.records import Record, Task
from strop.core.rollout.intake import ReadAhead, Signal
from strop.core.streams import read_records
from strop.core.tasks.adaptive import Attempts, Plan, Progress
from strop.core.tasks.calibration import FIRST_VERSION, AttemptFields, policy_of, read_attempt

# Tasks that may wait for a slower one before them, as a multiple of the tasks in work. It bounds memory.
REORDER_WINDOW = 4


@dataclass(slots=True, eq=False)
class Case:
    """One task in work: its attempts so far. `resumed` says that some of them, or the task itself, were written before.

    `missing` are sample indices of attempts that a killed run counted but did not write.
    """

    record: Record
    task: Task
    progress: Progress = field(default_factory=Progress)
    rollouts: list[Record] = field(default_factory=list)
    next_sample: int = 0
    missing: list[int] = field(default_factory=list)
    policies: set[bytes] = field(default_factory=set)
    is_done: bool = False
    is_bad: bool = False
    resumed: bool = False
    was_written: bool = False

    @property
    def key(self) -> tuple[str, int]:
        """The task in its statement version."""
        return self.task.id, self.task.statement_version


@dataclass(slots=True)
class Earlier:
    """What a killed run wrote of one task: its attempts, and how many its calibration counts (None: not written)."""

    attempts: list[AttemptFields] = field(default_factory=list)
    policies: set[bytes] = field(default_factory=set)
    num_made: int | None = None


def read_earlier(path: Path) -> dict[tuple[str, int], Earlier]:
    """What a killed run of calibrate wrote to `path`: its own attempts, and the tasks that it had finished.

    Rollouts that it only passed through are not its own; their provenance says so.
    """
    found: dict[tuple[str, int], Earlier] = {}
    for record in read_records([str(path)], io.BytesIO()):
        if record.kind == "rollout":
            maker = record.get("provenance", _Provenance | None)
            if maker is not None and maker.tool == "calibrate":
                attempt = read_attempt(record)
                earlier = found.setdefault((attempt.task, attempt.version), Earlier())
                earlier.attempts.append(attempt)
                earlier.policies |= _policies(record, attempt)
        elif record.kind == "task":
            task = record.view(_Calibrated)
            if task.calibration is not None:
                made = task.calibration.attempts + task.calibration.errors
                found.setdefault((task.id, task.statement_version), Earlier()).num_made = made
    return found


def _policies(rollout: Record, attempt: AttemptFields) -> set[bytes]:
    policy = policy_of(rollout) if attempt.error is None else None
    return set() if policy is None else {policy}


class _Provenance(Struct):
    tool: str | None = None


class _Counts(Struct):
    attempts: int
    errors: int


class _Calibrated(Struct):
    id: str
    statement_version: int = FIRST_VERSION
    calibration: _Counts | None = None


@dataclass(frozen=True, slots=True)
class FixedNumber:
    """So many attempts at each task, errors of the machine included."""

    num_attempts: int

    def next_round(self, progress: Progress) -> int:
        """How many attempts a task gets next; 0 ends it."""
        return max(0, self.num_attempts - progress.made)


class Campaign:
    """Attempts at a stream of tasks by one maker under one schedule; at most `window` tasks are in work at a time.

    Records of other kinds keep their places. A task that cannot be attempted goes to `on_bad`; so does one that came
    before. `earlier` is what a resumed file holds, by task and statement version.
    """

    def __init__(
        self, maker: Attempts, schedule: Plan | FixedNumber, *, window: int,
        on_bad: Callable[[DataError, Record], None],
        earlier: dict[tuple[str, int], Earlier] | None = None,
        check: Callable[[Record, Task], None] | None = None,
    ) -> None:  # fmt: skip
        self._maker = maker
        self._schedule = schedule
        self._window = window
        self._on_bad = on_bad
        self._earlier = earlier or {}
        self._check = check
        self._slots: deque[Case | Record] = deque()
        self._open: list[Case] = []
        self._seen: set[tuple[str, int]] = set()

    def run(self, records: Iterable[Record]) -> Iterator[Case | Record]:
        """Finished tasks and foreign records, in order. An error of the input comes after all that was begun."""
        source = ReadAhead(records, self._window)
        failure: Exception | None = None
        ended = False
        while True:
            while not ended and len(self._open) < self._window and len(self._slots) < REORDER_WINDOW * self._window:
                try:
                    item = source.take(wait=not self._open and not self._ready())
                except Exception as error:  # noqa: BLE001 (raised again below)
                    failure, ended = error, True
                    break
                if item is Signal.END:
                    ended = True
                elif isinstance(item, Record):
                    self._admit(item)
                else:
                    break
            while self._ready():
                yield self._slots.popleft()
            if self._open:
                self._make_round()
            elif ended and not self._slots:
                break
        if failure is not None:
            raise failure

    def unfinished(self) -> list[Case]:
        """After an interruption: the tasks not let out yet, in order, with the attempts that were made."""
        return [slot for slot in self._slots if isinstance(slot, Case) and not slot.is_bad]

    def _ready(self) -> bool:
        while self._slots and isinstance(self._slots[0], Case) and self._slots[0].is_bad:
            self._slots.popleft()
        return bool(self._slots) and (not isinstance(self._slots[0], Case) or self._slots[0].is_done)

    def _admit(self, record: Record) -> None:
        if record.kind != "task":
            self._slots.append(record)
            return
        try:
            case = Case(record, record.view(Task))
            if case.key in self._seen:
                raise record.bad(f"task {case.task.id!r} came before in this input", "id")
            if self._check is not None:
                self._check(record, case.task)
        except DataError as error:
            self._on_bad(error, record)
            return
        self._seen.add(case.key)
        self._slots.append(case)
        self._take_up(case)
        if case.missing or (not case.was_written and self._schedule.next_round(case.progress)):
            self._open.append(case)
        else:
            case.is_done = True

    def _take_up(self, case: Case) -> None:
        """What a killed run did of this task is not done again."""
        earlier = self._earlier.get(case.key)
        if earlier is None:
            return
        case.resumed = True
        case.was_written = earlier.num_made is not None
        case.policies |= earlier.policies
        for attempt in earlier.attempts:
            case.progress.tally.add(attempt.outcome, attempt.horizon)
        samples = {attempt.sample for attempt in earlier.attempts if attempt.sample is not None}
        case.next_sample = max(samples, default=-1) + 1
        case.missing = [sample for sample in range(earlier.num_made or 0) if sample not in samples]

    def _make_round(self) -> None:
        """One round of attempts at every task in work."""
        requests = [(case.record, case.task, samples) for case in self._open for samples in self._wanted(case)]
        cases = {case.key: case for case in self._open}
        answered: set[tuple[str, int]] = set()
        for rollout in self._maker.attempt(requests):
            attempt = read_attempt(rollout)
            case = cases[attempt.task, attempt.version]
            case.rollouts.append(rollout)
            case.policies |= _policies(rollout, attempt)
            case.progress.tally.add(attempt.outcome, attempt.horizon)
            answered.add(case.key)
        for case in self._open:
            case.is_bad = case.key not in answered
            case.missing = []
            case.is_done = case.was_written or not self._schedule.next_round(case.progress)
        self._open = [case for case in self._open if not case.is_done and not case.is_bad]

    def _wanted(self, case: Case) -> list[range]:
        if case.was_written:
            return [range(sample, sample + 1) for sample in case.missing]
        start = case.next_sample
        case.next_sample += self._schedule.next_round(case.progress)
        return [range(start, case.next_sample)]
