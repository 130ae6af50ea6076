"""Rollouts on their way through `distill`: with their tasks, in batches, and back into the order they came in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import msgspec
from msgspec import UNSET, Raw, Struct

from strop.core.errors import DataError
from strop.core.records import Chunk, Record, Sampling, Span, Task, check_chunks

if TYPE_CHECKING:
    from strop.core.engines.scorers import Scorer
    from strop.core.models.score import TokenSequence

_chunks = msgspec.json.Decoder(list[dict[str, Raw]])
_encoder = msgspec.json.Encoder()


class DistillRollout(Struct, kw_only=True):
    """What distillation reads of a rollout."""

    id: str
    task: str
    statement_version: int | None = None
    policy: dict[str, Any] | None = None
    sampling: Sampling | None = None
    chunks: list[Chunk] = []
    response: str | None = None
    stop: str | None = None
    error: str | None = None


@dataclass(slots=True)
class Attempt:
    """A rollout with its task (None where no task of its id came before)."""

    record: Record
    rollout: DistillRollout
    task: Task | None

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy produced."""
        return sum(chunk.num_sampled for chunk in self.rollout.chunks)

    @property
    def chunk(self) -> Chunk:
        """The first chunk with sampled tokens."""
        return next(chunk for chunk in self.rollout.chunks if chunk.num_sampled)

    @property
    def sampled_ids(self) -> list[int]:
        """The ids that the policy produced, in order."""
        chunks = self.rollout.chunks
        return [id_ for chunk in chunks for start, end in spans_of(chunk) for id_ in chunk.token_ids[start:end]]

    def need_task(self) -> Task:
        """The task. Raises DataError without one, or where it has no prompt."""
        if self.task is None:
            message = f"no task {self.rollout.task!r} came before this rollout (name a file of tasks with --tasks)"
            raise self.record.bad(message, "task")
        if self.task.prompt is None:
            raise self.record.bad(f"the task {self.rollout.task!r} has no prompt", "task")
        return self.task

    def response(self) -> tuple[list[int], list[float]]:
        """Ids and log-probabilities (nats; [] if the record has none) of an answer given in one turn.

        Raises DataError for an attempt of several turns or chunks: what lies between them is no text of the policy.
        """
        chunks = [chunk for chunk in self.rollout.chunks if chunk.num_sampled]
        if len(chunks) > 1 or (chunks and len(chunks[0].sampled) > 1):
            raise self.record.bad("several turns; aligning with a teacher's text takes answers of one turn", "chunks")
        if not chunks:
            return [], []
        span = chunks[0].sampled[0]
        logprobs = [] if chunks[0].logprobs is UNSET else chunks[0].logprobs
        return chunks[0].token_ids[span.start : span.end], logprobs

    def set_signals(self, signals: Sequence[dict[str, Sequence[float]]], about: dict[str, Any]) -> None:
        """Writes fields of one value a sampled token into each chunk that has such tokens, and `distill`.

        Numbers keep seven digits behind the point, as log-probabilities have. Credit that other tools gave goes when
        there are `advantages` among the fields.
        """
        if any("advantages" in fields for fields in signals):
            for name in ("advantage", "credit"):
                self.record.fields.pop(name, None)
        rounded = [
            {name: [round(value, 7) + 0.0 for value in values] for name, values in fields.items()} for fields in signals
        ]
        self._write(rounded, about)

    def set_teacher_prompt(self, prompt_ids: Sequence[int], about: dict[str, Any]) -> None:
        """Writes what a self-teacher reads before the response, and `distill`."""
        self._write([{"teacher_prompt_ids": prompt_ids}], about)

    def _write(self, fields_of_chunks: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
        chunks = _chunks.decode(self.record.fields["chunks"])
        with_tokens = [i for i, chunk in enumerate(self.rollout.chunks) if chunk.num_sampled]
        for i, fields in zip(with_tokens, fields_of_chunks, strict=True):
            for name, values in fields.items():
                chunks[i][name] = Raw(_encoder.encode(values))
        self.record.set(chunks=chunks, distill=about)


class AttemptError(DataError):
    """An attempt that turned out to have no score: too long for a model's context, or its score is no number."""

    def __init__(self, attempt: Attempt, reason: str) -> None:
        super().__init__(reason, where=attempt.record.where, field="chunks")
        self.attempt = attempt


class Method(Protocol):
    """Gives the sampled tokens of rollouts their signals, and keeps count of what it saw."""

    def check(self, attempt: Attempt) -> None:
        """Raises DataError for an attempt that this method cannot take; nothing is computed yet."""
        ...

    def apply(self, attempts: Sequence[Attempt]) -> None:
        """Sets the signals of a batch in the attempts' records. Raises AttemptError, having set none."""
        ...

    def lines(self) -> list[str]:
        """What to say of all batches, for people."""
        ...

    def warnings(self) -> list[str]:
        """What a user should know of them."""
        ...

    def take_metrics(self) -> dict[str, float | int | None]:
        """Figures of the batches since these were last taken."""
        ...


@dataclass(slots=True)
class Counts:
    """What came in; `others` were sampled by another model."""

    rollouts: int = 0
    failed: int = 0
    empty: int = 0
    resumed: int = 0
    tokens: int = 0
    others: int = 0


class TaskBook:
    """The tasks that came by, and each rollout with its own. A later task with the same id replaces an earlier one."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}

    def place(self, record: Record) -> Attempt | None:
        """Remembers a task; the attempt that a rollout is; None for other kinds.

        Raises DataError for an attempt at another version of the statement than the task's.
        """
        if record.kind == "task":
            task = record.view(Task)
            self._tasks[task.id] = task
        if record.kind != "rollout":
            return None
        rollout = record.view(DistillRollout)
        attempt = Attempt(record, rollout, self._tasks.get(rollout.task))
        version = rollout.statement_version
        if attempt.task is not None and version is not None and version != attempt.task.statement_version:
            message = f"an attempt at statement version {version}, the task is at {attempt.task.statement_version}"
            raise record.bad(message, "statement_version")
        return attempt


class Stream:
    """Gathers rollouts into batches of `size` and gives all records out in the order they came in.

    Batches are made by number alone, so that what is computed together does not depend on the speed of the input.
    Rollouts that failed or hold no sampled token pass untouched, and those of `done` are dropped. Those that name
    another model than that of `revision` are counted: their ids may mean something else to it.
    """

    def __init__(
        self, method: Method, book: TaskBook, *, size: int, vocabulary: int | None, done: Callable[[str], bool],
        on_bad: Callable[[DataError, Record], None], revision: str | None = None,
    ) -> None:  # fmt: skip
        self.counts = Counts()
        self._method = method
        self._book = book
        self._size = size
        self._vocabulary = vocabulary
        self._done = done
        self._on_bad = on_bad
        self._revision = revision

    def count(self, record: Record) -> None:
        """Looks at a record as `run` would, and computes nothing."""
        self._take(record)

    def run(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records, rollouts with their signals. An error of the input is raised after what came before it."""
        held: list[Record | Attempt] = []
        num_attempts = 0
        source = iter(records)
        while True:
            try:
                record = next(source, None)
                taken = [] if record is None else self._take(record)
            except Exception:
                yield from self._finish(held)
                raise
            held += taken
            num_attempts += sum(isinstance(one, Attempt) for one in taken)
            if record is None or num_attempts in (0, self._size):
                yield from self._finish(held)
                held, num_attempts = [], 0
            if record is None:
                return

    def _take(self, record: Record) -> list[Record | Attempt]:
        """The record in its place; nothing where it was set aside or is not wanted again."""
        try:
            attempt = self._book.place(record)
            return [record] if attempt is None else self._admit(attempt)
        except DataError as error:
            self._on_bad(error, record)
            return []

    def _admit(self, attempt: Attempt) -> list[Record | Attempt]:
        record, rollout = attempt.record, attempt.rollout
        self.counts.rollouts += 1
        if self._done(rollout.id):
            self.counts.resumed += 1
            return []
        if rollout.error is not None:
            self.counts.failed += 1
            return [record]
        check_chunks(record, rollout.chunks, self._vocabulary)
        if not attempt.num_sampled:
            self.counts.empty += 1
            return [record]
        for i, chunk in enumerate(rollout.chunks):
            if chunk.sampled and chunk.sampled[0].start == 0:
                message = "the first token of a chunk has nothing before it and cannot have been sampled"
                raise record.bad(message, f"chunks[{i}].sampled")
        self._method.check(attempt)
        self.counts.tokens += attempt.num_sampled
        said = (rollout.policy or {}).get("revision")
        self.counts.others += None not in (said, self._revision) and said != self._revision
        return [attempt]

    def _finish(self, held: list[Record | Attempt]) -> Iterator[Record]:
        attempts = [one for one in held if isinstance(one, Attempt)]
        left = {id(one) for one in apply_to_all(self._method, attempts, self._on_bad)}
        for one in held:
            if not isinstance(one, Attempt):
                yield one
            elif id(one) in left:
                yield one.record


def spans_of(chunk: Chunk, shift: int = 0) -> list[tuple[int, int]]:
    """The sampled spans of a chunk as score_tokens takes them, moved by `shift` positions."""
    return [(span.start + shift, span.end + shift) for span in chunk.sampled if span.start < span.end]


def tail_of(chunk: Chunk) -> tuple[int, list[int]]:
    """Where the prompt of a chunk ends, and the ids from there on: the first sampled token and all that follows."""
    first: Span = next(span for span in chunk.sampled if span.start < span.end)
    return first.start, chunk.token_ids[first.start :]


def score_all(scorer: Scorer, sequences: Sequence[tuple[Attempt, TokenSequence]]) -> list[list[float]]:
    """The scores of sequences, each with the attempt it belongs to. Raises AttemptError."""
    from strop.core.engines.scorers import BadSequence

    try:
        return scorer.score([sequence for _, sequence in sequences])
    except BadSequence as error:
        raise AttemptError(sequences[error.index][0], error.reason) from None


def apply_to_all(
    method: Method, attempts: Sequence[Attempt], on_bad: Callable[[DataError, Record], None]
) -> list[Attempt]:
    """Gives a batch its signals; an attempt that cannot be scored goes to `on_bad`. Returns the others."""
    left = list(attempts)
    while left:
        try:
            method.apply(left)
        except AttemptError as error:
            on_bad(error, error.attempt.record)
            left = [one for one in left if one is not error.attempt]
        else:
            break
    return left
