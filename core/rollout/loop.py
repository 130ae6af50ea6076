"""The episode loop: keeps an engine busy, verifies beside it, gives records out in the order of the input."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.engines.protocol import Completion
from strop.core.errors import DataError, Unavailable
from strop.core.records import Record, Task
from strop.core.rollout.attempts import CANCELLED, Attempt, AttemptMaker
from strop.core.rollout.intake import ReadAhead, Signal
from strop.core.sandbox.protocol import SandboxLost

if TYPE_CHECKING:
    from strop.core.engines.protocol import Engine
    from strop.core.tasks.verifiers import Verdict

# Finished rollouts that may wait for a slower one before them, in multiples of the samples in flight: bounds memory.
REORDER_WINDOW = 4
# How long the engine works before it is seen what else has finished.
PATIENCE_S = 0.05


@dataclass(frozen=True, slots=True)
class Work:
    """One input of the loop: a record to pass through, and for a task the samples to draw of it."""

    record: Record
    task: Task | None = None
    samples: tuple[int, ...] = ()
    group_size: int = 0


@dataclass(frozen=True, slots=True)
class Given:
    """One output of the loop: a record, and whether the loop made it (a rollout) or passed it through."""

    record: Record
    made: bool


class _Slot:
    """A place in the order of output, filled when its rollout is finished."""

    __slots__ = ("given",)

    def __init__(self, given: Given | None = None) -> None:
        self.given = given


class RolloutLoop:
    """Drives one engine over a stream of work.

    At most about `concurrency` samples are in flight (a group is submitted whole). Tasks that cannot be attempted go to
    `on_bad`. Verifiers run in one thread beside the engine, in the order in which samples finish; what episodes do in
    a sandbox, verdicts there included, runs in as many threads as there are episodes. With `first`, what is left of a
    group is cancelled once so many of it have finished without an error.
    """

    def __init__(
        self, engine: Engine, maker: AttemptMaker, verify: Callable[[str, Record, Task], Verdict | None], *,
        concurrency: int, ordered: bool = True, first: int = 0, on_bad: Callable[[DataError, Record], None],
    ) -> None:  # fmt: skip
        self._engine = engine
        self._maker = maker
        self._verify = verify
        self._concurrency = concurrency
        self._ordered = ordered
        self._first = first
        self._num_finished: dict[str, int] = {}
        self._on_bad = on_bad
        self._slots: deque[_Slot] = deque()
        self._attempts: dict[str, tuple[Attempt, _Slot]] = {}
        self._verifying: dict[Future[Record], tuple[Attempt, _Slot]] = {}
        self._acting: dict[Future[Any], tuple[Attempt, Completion, _Slot]] = {}
        self._verifier = ThreadPoolExecutor(1, thread_name_prefix="verify")
        self._workers = ThreadPoolExecutor(max(concurrency, 1), thread_name_prefix="act")

    def run(self, work: Iterable[Work]) -> Iterator[Given]:
        """The outputs. An error of the input is raised after everything begun before it has been finished."""
        source = ReadAhead(work, self._concurrency)
        failure: Exception | None = None
        ended = False
        try:
            while True:
                while not ended and self._has_room():
                    try:
                        item = source.take(wait=not self._busy() and not self._ready())
                        if isinstance(item, Work):
                            self._begin(item)
                    except Exception as error:  # noqa: BLE001 (raised again below)
                        failure, ended = error, True
                        break
                    if item is Signal.END:
                        ended = True
                    elif not isinstance(item, Work):
                        break
                yield from self._release()
                if self._busy():
                    self._advance()
                elif ended and not self._slots:
                    break
        except BaseException:
            # A verifier may be waiting for a program that hangs: whoever stops us ends it, we do not wait for it.
            for pool in (self._verifier, self._workers):
                pool.shutdown(wait=False, cancel_futures=True)
            raise
        for pool in (self._verifier, self._workers):
            pool.shutdown()
        if failure is not None:
            raise failure

    def _has_room(self) -> bool:
        in_flight = len(self._attempts) + len(self._verifying) + len(self._acting)
        return in_flight < self._concurrency and len(self._slots) < REORDER_WINDOW * self._concurrency

    def _busy(self) -> bool:
        return bool(self._attempts or self._verifying or self._acting)

    def _ready(self) -> bool:
        return bool(self._slots) and self._slots[0].given is not None

    def _begin(self, work: Work) -> None:
        if work.task is None:
            self._slots.append(_Slot(Given(work.record, made=False)))
            return
        try:
            attempts = self._maker.attempts(work.record, work.task, work.samples, work.group_size)
        except DataError as error:
            self._on_bad(error, work.record)
            return
        self._slots.append(_Slot(Given(work.record, made=False)))
        for attempt in attempts:
            slot = _Slot()
            self._slots.append(slot)
            work_to_begin = attempt.episode.begin()
            if work_to_begin is None:
                self._submit(attempt, attempt.episode.prompt_ids, slot)
            else:
                self._act(attempt, work_to_begin, Completion(attempt.id), slot)

    def _submit(self, attempt: Attempt, prompt_ids: list[int], slot: _Slot) -> None:
        self._attempts[attempt.id] = (attempt, slot)
        self._engine.submit(attempt.request(prompt_ids))

    def _act(self, attempt: Attempt, work: Any, completion: Completion, slot: _Slot) -> None:
        self._acting[self._workers.submit(attempt.episode.act, work)] = (attempt, completion, slot)

    def _advance(self) -> None:
        """One round of work: what the engine finished is acted on or judged, what that finished goes on or leaves."""
        # What finished in a sandbox must not wait for the end of somebody's long message.
        patience_s = PATIENCE_S if self._acting or self._verifying else None
        for completion in self._engine.collect(patience_s) if self._attempts else []:
            attempt, slot = self._attempts.pop(completion.key)
            completion = _checked(completion)
            work = attempt.episode.advance(completion) if completion.error is None else None
            if work is not None and self._is_over(attempt):
                # Its turn had ended before it could be cancelled.
                attempt.episode.cancel()
                work = None
            if work is not None:
                self._act(attempt, work, completion, slot)
            else:
                self._finish(attempt, completion, slot)
        if not self._attempts and not any(future.done() for future in (*self._verifying, *self._acting)):
            wait([*self._verifying, *self._acting], return_when=FIRST_COMPLETED)
        for future in [future for future in self._acting if future.done()]:
            attempt, completion, slot = self._acting.pop(future)
            try:
                came = future.result()
                ids = None if attempt.episode.stop == CANCELLED else attempt.episode.resume(came)
            except SandboxLost as error:
                ids, completion = None, Completion(completion.key, error=f"sandbox lost: {error}")
            except Unavailable as error:
                # What this task wants (an image, a shell in it) may be missing for no other.
                ids, completion = None, Completion(completion.key, error=str(error))
            except DataError as error:
                ids, completion = None, Completion(completion.key, error=error.message)
            if ids is not None:
                self._submit(attempt, ids, slot)
            else:
                self._finish(attempt, completion, slot)
        for done in [future for future in self._verifying if future.done()]:
            attempt, slot = self._verifying.pop(done)
            slot.given = Given(done.result(), made=True)
            if self._first and attempt.episode.stop != CANCELLED and "error" not in slot.given.record.fields:
                self._count_finished(attempt)

    def _finish(self, attempt: Attempt, completion: Completion, slot: _Slot) -> None:
        # Decoded here: a tokenizer is not used from two threads at once.
        response = "" if completion.error is not None else self._maker.response(completion)
        pool = self._workers if attempt.episode.has_sandbox else self._verifier
        self._verifying[pool.submit(self._judge, attempt, completion, response)] = attempt, slot

    def _count_finished(self, attempt: Attempt) -> None:
        """With enough of a group finished, the rest of it is cancelled."""
        group = attempt.group
        self._num_finished[group] = self._num_finished.get(group, 0) + 1
        if self._num_finished[group] != self._first:
            return
        for key, (other, _) in self._attempts.items():
            if other.group == group:
                self._engine.cancel(key)
        for other, _, _ in self._acting.values():
            if other.group == group:
                # What it is doing comes to its end, and then it is not gone on with.
                other.episode.cancel()

    def _is_over(self, attempt: Attempt) -> bool:
        """Whether enough of its group have finished."""
        return bool(self._first) and self._num_finished.get(attempt.group, 0) >= self._first

    def _judge(self, attempt: Attempt, completion: Completion, response: str) -> Record:
        if completion.error is not None or attempt.episode.stop == CANCELLED:
            attempt.episode.close()
            return self._maker.record(attempt, completion, response, None)
        verdict = attempt.episode.judge()
        if verdict is None:
            verdict = self._verify(response, attempt.task_record, attempt.task)
        return self._maker.record(attempt, completion, response, verdict)

    def _release(self) -> Iterator[Given]:
        if not self._ordered:
            finished = [slot for slot in self._slots if slot.given is not None]
            self._slots = deque(slot for slot in self._slots if slot.given is None)
            yield from (slot.given for slot in finished if slot.given is not None)
            return
        while self._slots:
            given = self._slots[0].given
            if given is None:
                return
            self._slots.popleft()
            yield given


def _checked(completion: Completion) -> Completion:
    """The completion, or an error in its place where a log-probability is not finite."""
    if completion.error is None and not math.isfinite(math.fsum(completion.logprobs)):
        return Completion(completion.key, error="the engine returned a log-probability that is not finite")
    return completion
