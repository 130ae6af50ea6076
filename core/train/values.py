"""A critic's values written into rollouts: for each sampled token that of the state before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

import msgspec
from msgspec import Raw, Struct

from strop.core.errors import DataError, UsageError
from strop.core.records import Chunk, Record, check_chunks
from strop.core.train.examples import TrainSequence

# Tokens that wait for company: several packs, so that they are full and few.
WAITING_TOKENS = 8192

_chunks = msgspec.json.Decoder(list[dict[str, Raw]])
_encoder = msgspec.json.Encoder()


class Valuable(Struct, kw_only=True):
    """What valuing needs of a rollout."""

    chunks: list[Chunk] = []
    error: str | None = None


class Valuer(Protocol):
    """What can value states: a `Critic`."""

    def value_lists(self, sequences: list[TrainSequence]) -> list[list[float]]:
        """The values of each sequence's positions."""
        ...


class ZeroCritic:
    """Expects nothing anywhere: what a new critic says, without a model."""

    def value_lists(self, sequences: list[TrainSequence]) -> list[list[float]]:
        """Zeros."""
        return [[0.0] * len(one.positions) for one in sequences]


def zero_critic() -> Valuer:
    """Opens the critic that expects nothing."""
    return ZeroCritic()


class ValueWriter:
    """Gives `values` to the chunks of rollouts, some of them at a time, and keeps the order of the stream.

    `open_critic` is called when the first rollout with sampled tokens arrives. Bad rollouts go to `on_bad`.
    """

    def __init__(self, open_critic: Callable[[], Valuer], on_bad: Callable[[DataError, Record], None]) -> None:
        self._open = open_critic
        self._on_bad = on_bad
        self._critic: Valuer | None = None
        self._waiting: list[tuple[Record, list[TrainSequence]]] = []
        self._tokens = 0

    def run(self, records: Iterable[Record]) -> Iterator[Record]:
        """The records; a rollout with `error`, or without sampled tokens, as it came."""
        for record in records:
            sequences: list[TrainSequence] = []
            if record.kind == "rollout":
                try:
                    sequences = self._sequences(record)
                except DataError as error:
                    self._on_bad(error, record)
                    continue
            self._waiting.append((record, sequences))
            self._tokens += sum(len(one.token_ids) for one in sequences)
            if self._tokens >= WAITING_TOKENS or not self._tokens:
                yield from self._give()
        yield from self._give()

    def _sequences(self, record: Record) -> list[TrainSequence]:
        rollout = record.view(Valuable)
        if rollout.error is not None:
            return []
        check_chunks(record, rollout.chunks)
        found = []
        for i, chunk in enumerate(rollout.chunks):
            positions = [position for span in chunk.sampled for position in range(span.start, span.end)]
            if positions and positions[0] == 0:
                raise record.bad("a sampled token with nothing before it has no state to value", f"chunks[{i}].sampled")
            if positions:
                found.append(TrainSequence(chunk.token_ids, positions, [], []))
        return found

    def _give(self) -> Iterator[Record]:
        waiting, self._waiting, self._tokens = self._waiting, [], 0
        sequences = [one for _, some in waiting for one in some]
        values: Iterator[list[float]] = iter(())
        if sequences:
            if self._critic is None:
                self._critic = self._open()
            values = iter(self._critic.value_lists(sequences))
        for record, some in waiting:
            if some:
                _write(record, [next(values) for _ in some])
            yield record


def _write(record: Record, values: list[list[float]]) -> None:
    """Puts the lists into the chunks that hold sampled tokens, in order; every other byte of a chunk stays."""
    chunks = _chunks.decode(record.fields["chunks"])
    left = iter(values)
    for chunk in chunks:
        if any(start < end for start, end in msgspec.json.decode(chunk["sampled"])):
            chunk["values"] = Raw(_encoder.encode([round(value, 7) for value in next(left)]))
    record.set(chunks=chunks)


def critic_opener(
    folder: Path, *, model: str | None, device: str, dtype: str, offline: bool
) -> Callable[[], Valuer]:
    """Opens the critic of a checkpoint; `model` names its base where that has moved. Raises UsageError for none."""
    from strop.core.train.critic_setup import critic_base, find_critic, open_critic

    found = find_critic(folder)
    if found is None:
        raise UsageError(f"--critic {folder}: no critic there (`strop train --critic` makes one)")

    def load() -> Valuer:
        from strop.core.models.load import resolve_model

        base = resolve_model(model or critic_base(found), offline=offline)
        return open_critic(base, found, lora=None, device=device, dtype=dtype, seed=0).critic

    return load
