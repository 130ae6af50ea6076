"""Makes the attempts of a calibration with an engine, which is opened when the first one is wanted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Self

from strop.core.errors import DataError
from strop.core.records import Record, Task
from strop.core.rollout.attempts import AttemptMaker, SamplingChoice, Tally
from strop.core.rollout.loop import RolloutLoop, Work

if TYPE_CHECKING:
    from strop.core.engines.open import EngineOptions
    from strop.core.engines.protocol import Engine
    from strop.core.envs.rooms import RoomOptions


class Attempter:
    """The `Attempts` of `strop.core.tasks.adaptive` by one policy under one seed; a context manager.

    Rollouts get the group size `group_size`, which who knows better may set anew. Tasks that cannot be attempted go to
    `on_bad`. `tally` counts what was made; `engine_name` is known once the engine is open.
    """

    def __init__(
        self, options: EngineOptions, choice: SamplingChoice, rooms: RoomOptions | None = None, *, seed: int,
        group_size: int,
        on_bad: Callable[[DataError, Record], None],
    ) -> None:  # fmt: skip
        from strop.core.envs.rooms import Rooms
        from strop.core.tasks.verifiers import open_verifiers

        self._options = options
        self._choice = choice
        self._seed = seed
        self._group_size = group_size
        self._on_bad = on_bad
        self._stack = contextlib.ExitStack()
        self._rooms = self._stack.enter_context(contextlib.closing(Rooms(rooms)))
        self._verifiers = self._stack.enter_context(open_verifiers())
        self._engine: Engine | None = None
        self._maker: AttemptMaker | None = None

    @property
    def tally(self) -> Tally:
        """What was made so far."""
        return self._maker.tally if self._maker is not None else Tally()

    @property
    def engine_name(self) -> str | None:
        """The engine's name, None as long as no attempt was wanted."""
        return self._engine.name if self._engine is not None else None

    def check(self, record: Record, task: Task) -> None:
        """Raises DataError for a task whose verifier does not exist or lacks what it needs."""
        self._verifiers.check(record, task)

    def attempt(self, requests: Sequence[tuple[Record, Task, range]]) -> Iterator[Record]:
        """Rollouts of all requests, in their order."""
        engine, maker = self._open()
        loop = RolloutLoop(
            engine, maker, self._verifiers.verify, concurrency=engine.concurrency, ordered=True, on_bad=self._on_bad
        )
        work = [Work(record, task, tuple(samples), self._group_size) for record, task, samples in requests]
        for given in loop.run(work):
            if given.made:
                yield given.record

    def _open(self) -> tuple[Engine, AttemptMaker]:
        if self._engine is None or self._maker is None:
            from strop.core.engines.open import open_engine, open_tokenizer

            tokenizer = open_tokenizer(self._options)
            self._engine = self._stack.enter_context(open_engine(self._options))
            self._maker = AttemptMaker(self._engine, tokenizer, seed=self._seed, choice=self._choice, rooms=self._rooms)
        return self._engine, self._maker

    def close(self) -> None:
        """Lets go of the engine and the verifiers."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()
