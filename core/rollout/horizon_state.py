"""A horizon that several runs follow and move together: the cap and its memory in one file.

Each change is made under a lock (FILE.lock) and replaces the file whole, so that runs side by side lose nothing of each
other and a killed one leaves the last whole state. Rollouts are counted by id, before they are written: one that a
resumed run makes again counts once.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from strop.core.errors import DataError, OutputFailed, UsageError, Where
from strop.core.records import Record
from strop.core.rollout.horizon import PRESETS, Elastic, Planned, Rule, with_changes
from strop.core.rollout.horizon_track import Batch, Track

FORMAT = 1
_ORDERS = {order: order for order in ("clip-first", "average-first")}
# How the constants of a rule are read from text.
_RULE: dict[str, Callable[[str], Any]] = {
    "start": float, "rate": float, "headroom": float, "percentile": float, "window": int, "min_successes": int,
    "low": int, "high": int, "order": _ORDERS.__getitem__,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class HorizonPlan:
    """Which schedule, with what constants, and how many rollouts make a step (0: those of one run)."""

    method: str = "elastic"
    rule: Rule = field(default_factory=Rule)
    every: int = 0
    steps: int = 0
    stages: tuple[int, ...] = (15, 20, 30, 50)
    epochs: int = 1

    def schedule(self) -> Elastic | Planned:
        """The schedule at its start. Raises UsageError."""
        if self.method == "elastic":
            return Elastic(self.rule)
        return Planned(self.method, self.rule, self.steps, stages=self.stages, epochs=self.epochs)  # type: ignore[arg-type]


def parse_plan(method: str, changes: str, every: int) -> HorizonPlan:
    """The plan of a method with constants from NAME=VALUE,... Raises UsageError."""
    plan: dict[str, Any] = {"method": method, "every": every}
    rule: dict[str, Any] = {}
    preset = "paper"
    for change in filter(None, changes.split(",")):
        name, _, value = (part.strip() for part in change.partition("="))
        try:
            if name == "preset":
                preset = {known: known for known in PRESETS}[value]
            elif name == "stages":
                plan[name] = tuple(int(part) for part in value.split("/"))
            elif name in ("steps", "epochs"):
                plan[name] = int(value)
            else:
                rule[name] = _RULE[name](value)
        except (KeyError, ValueError):
            known = ", ".join(["preset", *_RULE, "steps", "stages", "epochs"])
            raise UsageError(f"--horizon-set {change}: expected NAME=VALUE with one of {known}") from None
    if min(plan.get("stages", (1,))) < 1 or plan.get("epochs", 1) < 1:
        raise UsageError(f"--horizon-set {changes}: stages and epochs are at least 1")
    return HorizonPlan(rule=with_changes(PRESETS[preset], **rule), **plan)


class _Stored(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """The file. `ids` are the rollouts of the step under way, `last_ids` those of the one before it."""

    format: int
    plan: HorizonPlan
    cap: float
    lengths: list[int]
    done: int
    num_steps: int
    tokens: int
    batch: Batch
    ids: list[str]
    last_ids: list[str]


class SharedHorizon:
    """The state in `path`, which is made at the first use. Raises DataError for one of another plan, or no state.

    Every method reads the file anew; `count` and `end` write it.
    """

    def __init__(self, path: Path, plan: HorizonPlan) -> None:
        self._path = path
        self._plan = plan
        plan.schedule()
        with self._locked():
            if self._read() is None:
                self._write(self._new())

    @property
    def applied(self) -> int:
        """The turns that an episode gets which begins now."""
        stored = self._read() or self._new()
        return self._track(stored).schedule.applied

    def count(self, record: Record) -> dict[str, Any] | None:
        """Counts a finished rollout; the fields of a `horizon` record where it ended a step. Raises DataError."""
        if record.fields.get("horizon") is None:
            return None
        id_ = record.get("id", str)
        with self._locked():
            stored = self._read() or self._new()
            if id_ in stored.ids or id_ in stored.last_ids:
                return None
            track = self._track(stored)
            found = track.add(record)
            self._write(self._after(stored, track, [*stored.ids, id_], ended=found is not None))
        return found

    def end(self) -> dict[str, Any] | None:
        """The end of a run: where a run is a step, ends it. The fields of a `horizon` record, or None."""
        if self._plan.every:
            return None
        with self._locked():
            stored = self._read() or self._new()
            track = self._track(stored)
            found = track.end()
            if found is not None:
                self._write(self._after(stored, track, stored.ids, ended=True))
        return found

    def _new(self) -> _Stored:
        schedule = self._plan.schedule()
        return _Stored(
            format=FORMAT, plan=self._plan, cap=schedule.cap, lengths=[], done=0, num_steps=0, tokens=0, batch=Batch(),
            ids=[], last_ids=[],
        )  # fmt: skip

    def _track(self, stored: _Stored) -> Track:
        schedule = self._plan.schedule()
        schedule.cap = stored.cap
        if isinstance(schedule, Elastic):
            schedule.lengths.extend(stored.lengths)
        else:
            schedule.done = stored.done
        track = Track(schedule, every=self._plan.every)
        track.num_steps, track.tokens, track.batch = stored.num_steps, stored.tokens, stored.batch
        return track

    def _after(self, stored: _Stored, track: Track, ids: list[str], *, ended: bool) -> _Stored:
        schedule = track.schedule
        is_elastic = isinstance(schedule, Elastic)
        return _Stored(
            format=FORMAT, plan=self._plan, cap=schedule.cap,
            lengths=list(schedule.lengths) if isinstance(schedule, Elastic) else [],
            done=0 if is_elastic else schedule.done,  # type: ignore[union-attr]
            num_steps=track.num_steps, tokens=track.tokens, batch=track.batch,
            ids=[] if ended else ids, last_ids=ids if ended else stored.last_ids,
        )  # fmt: skip

    def _read(self) -> _Stored | None:
        try:
            data = self._path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputFailed(f"{self._path}: {error.strerror}") from None
        where = Where(str(self._path), 1)
        try:
            stored = msgspec.json.decode(data, type=_Stored)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            message = f"no state of a horizon ({error}); a new file starts a new one"
            raise DataError(message, where=where) from None
        if stored.format != FORMAT:
            raise DataError(f"format {stored.format}, expected {FORMAT}", where=where, field="format")
        if stored.plan != self._plan:
            raise DataError(_difference(stored.plan, self._plan), where=where, field="plan")
        return stored

    def _write(self, stored: _Stored) -> None:
        part = self._path.with_name(f"{self._path.name}.{os.getpid()}.part")
        try:
            with part.open("wb") as file:
                file.write(msgspec.json.encode(stored) + b"\n")
                file.flush()
                os.fsync(file.fileno())
            part.replace(self._path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise OutputFailed(f"{self._path}: {error.strerror}") from None

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One process at a time. The lock is a file of its own, since the state's is replaced."""
        lock = self._path.with_name(f"{self._path.name}.lock")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            file = lock.open("ab")
        except OSError as error:
            raise OutputFailed(f"{lock}: {error.strerror}") from None
        with file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _difference(stored: HorizonPlan, asked: HorizonPlan) -> str:
    """What sets two plans apart, in words."""
    before, now = (msgspec.to_builtins(plan) for plan in (stored, asked))
    before, now = ({**plan.pop("rule"), **plan} for plan in (before, now))
    changed = [f"{name} {before[name]}, not {now[name]}" for name in before if before[name] != now[name]]
    return f"the state is of another run: {', '.join(changed)}"
