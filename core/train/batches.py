"""From the stream of records to optimiser batches: groups are completed by id, and so many of them make a batch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from strop.core.errors import DataError
from strop.core.groups import Group, GroupBuffer
from strop.core.records import Record
from strop.core.rollout.routing_file import RoutingFault
from strop.core.train.examples import Example, Place, Reading, TrainRollout, rollout_example, sft_example

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer


# What a loss learns from where that is no advantage, and who writes it.
SIGNALS = {
    "nsd": ("chunks[].gate", "strop distill --nsd"),
    "opsd": ("chunks[].teacher_prompt_ids", "strop distill --opsd"),
}


@dataclass(slots=True)
class Counts:
    """What the input held."""

    rollouts: int = 0
    sft: int = 0
    errors: int = 0
    no_advantage: int = 0
    no_success: int = 0
    no_signal: int = 0
    groups: int = 0
    groups_without_signal: int = 0
    incomplete_groups: int = 0
    skipped: int = 0
    skipped_groups: int = 0
    trained: int = 0
    tokens: int = 0
    groups_of_mixed_caps: int = 0


@dataclass(slots=True)
class Batch:
    """One optimiser batch: its examples in input order of their groups, and the names of the groups."""

    examples: list[Example] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    groups_without_signal: int = 0
    left_out: int = 0


class BatchReader:
    """Collects batches of `groups_per_batch` groups (0: the whole input is one batch).

    Each group goes out when it is complete; an sft record is a group of its own. Groups named in `consumed` are
    skipped. Groups whose members are all left out count as consumed and for `groups_without_signal`, not towards the
    size of a batch, since nothing of them is trained on. Records that are not trained on go to `on_other`. Bad ones go
    to `on_bad`, but for a rollout without its routing, which ends the run (RoutingFault).
    """

    def __init__(
        self,
        reading: Reading,
        *,
        groups_per_batch: int,
        consumed: Collection[str] = (),
        skip_zero: bool = False,
        tokenizer: Callable[[], Tokenizer] | None = None,
        on_bad: Callable[[DataError, Record], None],
        on_other: Callable[[Record], None],
    ) -> None:
        self.counts = Counts()
        self._reading = reading
        self._size = groups_per_batch
        self._consumed = set(consumed)
        self._skip_zero = skip_zero
        self._tokenizer = tokenizer
        self._on_bad = on_bad
        self._on_other = on_other
        self._buffer: GroupBuffer[Example | None] = GroupBuffer(ordered=False)
        self._batch = Batch()
        self._sft_ids: set[str] = set()
        self._caps: dict[str, set[int]] = {}

    def run(self, records: Iterable[Record]) -> Iterator[Batch]:
        """The batches, each as soon as it is full; the last may hold fewer groups, or none but left-out ones."""
        for record in records:
            try:
                done = self._take(record)
            except RoutingFault:
                raise
            except DataError as error:
                self._on_bad(error, record)
                done = self._lost(record)
            if done is not None:
                self._close(done)
            if self._size and self._num_trained_groups >= self._size:
                yield self._next()
        for group in self._buffer.rest():
            self.counts.incomplete_groups += group.size is not None
            self._close(group)
            if self._size and self._num_trained_groups >= self._size:
                yield self._next()
        counts = self.counts
        if counts.no_advantage and counts.no_advantage == counts.rollouts - counts.errors:
            field_name, maker = SIGNALS.get(self._reading.loss, ("advantage", "strop advantage"))
            message = f"none of {counts.no_advantage} rollouts carries one; pipe them through `{maker}` first"
            raise DataError(message, field=field_name)
        if self._batch.groups:
            yield self._next()

    @property
    def _num_trained_groups(self) -> int:
        return len(self._batch.groups) - self._batch.left_out

    def _next(self) -> Batch:
        batch, self._batch = self._batch, Batch()
        return batch

    def _take(self, record: Record) -> Group[Example | None] | None:
        if record.kind == "rollout":
            return self._take_rollout(record)
        if record.kind == "sft" and self._reading.loss == "sft":
            self._take_sft(record)
        else:
            self._on_other(record)
        return None

    def _take_rollout(self, record: Record) -> Group[Example | None] | None:
        rollout = record.view(TrainRollout)
        self.counts.rollouts += 1
        key = rollout.group_key
        example = None
        if key in self._consumed:
            self.counts.skipped += 1
        else:
            example = self._example(record, rollout)
            if rollout.horizon is not None and rollout.error is None:
                self._caps.setdefault(key, set()).add(rollout.horizon)
        # The record itself is not needed again; an empty one keeps the buffer small.
        hollow = Record(record.kind, {}, record.where)
        return self._buffer.add(
            hollow, example, key, size=rollout.group_size, id=rollout.id, sample=rollout.sample
        )

    def _example(self, record: Record, rollout: TrainRollout) -> Example | None:
        if rollout.error is not None:
            self.counts.errors += 1
            return None
        example = rollout_example(record, rollout, self._reading)
        if example is None:
            if self._reading.loss == "sft":
                self.counts.no_success += 1
            else:
                self.counts.no_advantage += 1
        elif not example.has_signal:
            self.counts.no_signal += 1
            return None if self._skip_zero else example
        return example

    def _take_sft(self, record: Record) -> None:
        self.counts.sft += 1
        tokenizer = None if self._tokenizer is None or record.fields.get("token_ids") else self._tokenizer()
        example = sft_example(record, tokenizer, self._reading.vocabulary())
        if example.id in self._sft_ids:
            raise record.bad(f"{example.id!r} came before", "id")
        self._sft_ids.add(example.id)
        if example.id in self._consumed:
            self.counts.skipped += 1
            self.counts.skipped_groups += 1
            return
        self._count(example.id, [example])

    def _lost(self, record: Record) -> Group[Example | None] | None:
        """A rollout that was set aside still counts as a member of its group, if it says which."""
        if record.kind != "rollout":
            return None
        try:
            place = record.view(Place)
        except DataError:
            return None
        return self._buffer.lost(place.group_key, place.group_size)

    def _close(self, group: Group[Example | None]) -> None:
        self.counts.groups_of_mixed_caps += len(self._caps.pop(group.key, ())) > 1
        if group.key in self._consumed:
            self.counts.skipped_groups += 1
        else:
            self._count(group.key, [one.item for one in group.members if one.item is not None])
        self._buffer.finish(group)
        for _ in self._buffer.ready():
            pass

    def _count(self, key: str, examples: list[Example]) -> None:
        self.counts.groups += 1
        has_signal = any(one.has_signal for one in examples)
        self.counts.groups_without_signal += not has_signal
        self.counts.trained += sum(one.num_trained for one in examples)
        self.counts.tokens += sum(one.num_tokens for one in examples)
        self._batch.groups.append(key)
        self._batch.examples.extend(examples)
        self._batch.groups_without_signal += not has_signal
        self._batch.left_out += not examples
