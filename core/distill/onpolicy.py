"""On-policy distillation in one process: sample, score, update, and again, with one model in memory (NSD, Algorithm 1).

The policy in training is what samples, between updates; its frozen start is the same model with its adapter switched
off, or a second copy where all parameters move.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from strop.core.distill.attempts import Attempt, DistillRollout, Method, apply_to_all
from strop.core.errors import DataError
from strop.core.records import Record, Task
from strop.core.rollout.attempts import AttemptMaker, SamplingChoice
from strop.core.rollout.loop import RolloutLoop, Work
from strop.core.seeds import derive_seed
from strop.core.train.batches import Batch
from strop.core.train.examples import Reading, TrainRollout, rollout_example

if TYPE_CHECKING:
    from strop.core.engines.transformers import TransformersEngine
    from strop.core.models.tokens import Tokenizer
    from strop.core.tasks.verifiers import Verdict, Verifiers


@dataclass(frozen=True, slots=True)
class Plan:
    """How the loop goes: tasks an update, attempts a task, passes over the tasks, and how attempts are sampled."""

    tasks_per_update: int = 32
    samples: int = 1
    passes: int = 1
    seed: int = 0
    sampling: SamplingChoice = field(default_factory=SamplingChoice)


@dataclass(slots=True)
class Sampled:
    """What the rollouts of one batch came to."""

    rollouts: int = 0
    errors: int = 0
    scored: int = 0
    successes: int = 0
    tokens: int = 0

    @property
    def pass_rate(self) -> float | None:
        """Successes among rollouts with a verdict; None without any."""
        return self.successes / self.scored if self.scored else None


class OnPolicy:
    """Batches for a trainer, each sampled from the policy as it stands when the batch is asked for.

    `version` says how many updates the policy has seen. Groups in `consumed` are skipped, with all their samples. What
    was made goes to `on_rollout`, with its signals; what cannot be attempted or scored goes to `on_bad`.
    """

    def __init__(
        self, tasks: Sequence[tuple[Record, Task]], plan: Plan, engine: TransformersEngine, tokenizer: Tokenizer,
        verifiers: Verifiers, method: Method, reading: Reading, *, version: Callable[[], int],
        consumed: Sequence[str] = (), on_rollout: Callable[[Record], None] = lambda _: None,
        on_bad: Callable[[DataError, Record], None],
    ) -> None:  # fmt: skip
        self.last = Sampled()
        self._tasks = tasks
        self._plan = plan
        self._engine = engine
        self._tokenizer = tokenizer
        self._verifiers = verifiers
        self._method = method
        self._reading = reading
        self._version = version
        self._consumed = set(consumed)
        self._on_rollout = on_rollout
        self._on_bad = on_bad

    def batches(self) -> Iterator[Batch]:
        """One batch after the other, pass by pass; the last of a pass may be smaller."""
        for number in range(self._plan.passes):
            # Another seed for each pass: the same task is another draw, and another group.
            seed = derive_seed(self._plan.seed, "pass", number) if number else self._plan.seed
            maker = AttemptMaker(self._engine, self._tokenizer, seed=seed, choice=self._plan.sampling)
            todo = [(record, task) for record, task in self._tasks if maker.group_of(task) not in self._consumed]
            for start in range(0, len(todo), self._plan.tasks_per_update):
                yield self._batch(maker, todo[start : start + self._plan.tasks_per_update])

    def _batch(self, maker: AttemptMaker, tasks: Sequence[tuple[Record, Task]]) -> Batch:
        self._engine.renew()
        # Ids and groups come from the seed and the start; the version is only told.
        maker.info = replace(maker.info, version=self._version())
        attempts = self._sample(maker, tasks)
        usable = [one for one in attempts if one.rollout.error is None and one.num_sampled]
        for attempt in usable:
            self._method.check(attempt)
        usable = apply_to_all(self._method, usable, self._on_bad)
        batch = Batch(groups=[maker.group_of(task) for _, task in tasks])
        for attempt in attempts:
            self._on_rollout(attempt.record)
        for attempt in usable:
            example = rollout_example(attempt.record, attempt.record.view(TrainRollout), self._reading)
            if example is not None:
                batch.examples.append(example)
        signalled = {attempt.rollout.task for attempt in usable}
        batch.groups_without_signal = batch.left_out = sum(task.id not in signalled for _, task in tasks)
        return batch

    def _sample(self, maker: AttemptMaker, tasks: Sequence[tuple[Record, Task]]) -> list[Attempt]:
        samples = tuple(range(self._plan.samples))
        loop = RolloutLoop(
            self._engine, maker, self._verify, concurrency=self._engine.concurrency, on_bad=self._on_bad
        )
        by_id = {task.id: task for _, task in tasks}
        work = [Work(record, record.view(Task), samples, len(samples)) for record, _ in tasks]
        made: list[Attempt] = []
        for given in loop.run(work):
            if given.made:
                rollout = given.record.view(DistillRollout)
                made.append(Attempt(given.record, rollout, by_id[rollout.task]))
        self.last = _counted(made)
        return made

    def _verify(self, response: str, record: Record, task: Task) -> Verdict | None:
        """No verdict where the task names no verifier: the methods need none."""
        return None if task.verifier is None else self._verifiers.verify(response, record, task)


def _counted(attempts: Sequence[Attempt]) -> Sampled:
    verdicts = [one.record.get("success") for one in attempts if one.rollout.error is None]
    scored: list[Any] = [verdict for verdict in verdicts if verdict is not None]
    return Sampled(
        len(attempts), sum(one.rollout.error is not None for one in attempts), len(scored), sum(scored),
        sum(one.num_sampled for one in attempts),
    )  # fmt: skip
