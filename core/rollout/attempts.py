"""One attempt at a task: the ids, seeds and sampling it runs under, and the rollout record it becomes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.engines.protocol import Request
from strop.core.envs.answer import AnswerEpisode
from strop.core.envs.rooms import Rooms
from strop.core.errors import DataError
from strop.core.records import Record, Sampling, Task
from strop.core.seeds import derive_seed

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion, Engine
    from strop.core.envs.episode import Episode
    from strop.core.models.tokens import Tokenizer
    from strop.core.tasks.verifiers import Verdict

CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class SamplingChoice:
    """What the user said of sampling; None leaves it to the task's hints, then to the defaults of `Sampling`."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] | None = None

    def for_task(self, task: Task) -> Sampling:
        """Options over hints over defaults."""
        hints = msgspec.convert({k: v for k, v in (task.sampling or {}).items() if k != "logprobs"}, Sampling)
        said = {name: getattr(self, name) for name in ("temperature", "top_p", "top_k", "max_tokens")}
        chosen = {name: value for name, value in said.items() if value is not None}
        if self.stop is not None:
            chosen["stop"] = list(self.stop)
        return msgspec.structs.replace(hints, **chosen)


@dataclass(slots=True)
class Attempt:
    """One sample to be drawn of one task; `num_asked` times the policy was asked for it."""

    task_record: Record
    task: Task
    sample: int
    group: str
    group_size: int
    seed: int
    sampling: Sampling
    episode: Episode
    num_asked: int = 0

    @property
    def id(self) -> str:
        """The rollout's id."""
        return f"{self.group}/{self.sample}"

    def request(self, prompt_ids: list[int]) -> Request:
        """What the engine is asked next. Each turn has a seed of its own, else all would draw the same numbers."""
        seed = derive_seed(self.seed, "turn", self.num_asked) if self.num_asked else self.seed
        self.num_asked += 1
        sampling = self.sampling
        if (most := self.episode.max_tokens) is not None:
            sampling = msgspec.structs.replace(sampling, max_tokens=most)
        return Request(key=self.id, prompt_ids=prompt_ids, sampling=sampling, seed=seed, row=self.sample)


@dataclass(slots=True)
class Lengths:
    """How long some attempts were, in sum."""

    number: int = 0
    turns: int = 0
    tokens: int = 0

    def add(self, episode: Episode) -> None:
        """Counts one."""
        self.number += 1
        self.turns += episode.num_turns
        self.tokens += episode.num_sampled

    def mean(self) -> str:
        """The means, in words."""
        if not self.number:
            return "none"
        return f"{self.turns / self.number:.1f} turns and {self.tokens / self.number:.0f} tokens"


@dataclass(slots=True)
class Tally:
    """What a run did, for its summary line."""

    rollouts: int = 0
    errors: int = 0
    successes: int = 0
    scored: int = 0
    prompt_tokens: int = 0
    sampled_tokens: int = 0
    first_error: str | None = None
    cancelled: Lengths = field(default_factory=Lengths)
    finished: Lengths = field(default_factory=Lengths)
    stops: dict[str, int] = field(default_factory=dict)


class AttemptMaker:
    """Turns tasks into attempts, and finished attempts into rollout records, for one policy under one seed."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, seed: int, choice: SamplingChoice, rooms: Rooms | None = None
    ) -> None:
        self.info = engine.info
        self.seed = seed
        self.choice = choice
        self.tally = Tally()
        self._engine = engine
        self._tokenizer = tokenizer
        self._rooms = rooms or Rooms()
        # The same seed and policy give the same ids again (so that a run can be resumed), others never do.
        policy = (self.info.revision, str(self.info.adapter), str(self.info.version))
        self.run_id = f"{derive_seed(seed, *policy):014x}"[:8]

    def group_of(self, task: Task) -> str:
        """The id of the group of this run's attempts at `task` in its statement version."""
        return f"{task.id}@{task.statement_version}#{self.run_id}"

    def attempts(self, record: Record, task: Task, samples: Iterable[int], group_size: int) -> list[Attempt]:
        """The attempts with these sample indices. Raises DataError for a task that cannot be attempted."""
        try:
            sampling = self.choice.for_task(task)
        except msgspec.ValidationError as error:
            raise record.bad(str(error), "sampling") from None
        sampling = msgspec.structs.replace(sampling, logprobs=self._engine.logprobs_mode(sampling))
        group = self.group_of(task)
        made = []
        for sample in samples:
            seed = derive_seed(self.seed, task.id, sample)
            try:
                episode = self._episode(record, task, seed)
            except DataError as error:
                raise record.bad(error.message, error.field or "prompt") from None
            made.append(Attempt(record, task, sample, group, group_size, seed, sampling, episode))
        return made

    def _episode(self, record: Record, task: Task, seed: int) -> Episode:
        if task.env != "answer":
            return self._rooms.episode(record, task, seed, self._tokenizer, self._engine.context_length)
        if task.prompt is None:
            raise DataError("missing; a task to attempt needs a prompt", field="prompt")
        prompt_ids = self._tokenizer.encode_prompt(task.prompt)
        if not prompt_ids:
            raise DataError("the prompt has no tokens", field="prompt")
        return AnswerEpisode(prompt_ids)

    def response(self, completion: Completion) -> str:
        """The text of the sampled tokens, a stop string and what follows it in its last token included."""
        return self._tokenizer.decode(completion.token_ids)

    def record(self, attempt: Attempt, completion: Completion, response: str, verdict: Verdict | None) -> Record:
        """The rollout record. `verdict` is None where the engine failed."""
        error = completion.error
        if error is None and attempt.episode.stop == CANCELLED:
            error = "cancelled: enough others of its group had finished"
        fields: dict[str, Any] = self._identity(attempt)
        if error is None or attempt.episode.num_sampled:
            # What was done before the machine failed is kept, too.
            fields |= attempt.episode.trajectory(response)
        if attempt.episode.stop == CANCELLED:
            fields["stop"] = CANCELLED
        if error is None and verdict is not None:
            error = verdict.error
        if error is not None:
            fields["error"] = error
        elif verdict is not None:
            steps = fields["steps"]
            if steps and not any("reward" in step for step in steps):
                # Where the env gave none on the way: the reward comes with the last step.
                steps[-1]["reward"] = verdict.reward
            fields |= {"reward": verdict.reward, "success": verdict.success}
            fields |= {"assertions": verdict.assertions} if verdict.assertions is not None else {}
            fields |= {"verdict": verdict.details} if verdict.details else {}
        self._count(attempt, verdict, error)
        return Record.make("rollout", fields)

    def _identity(self, attempt: Attempt) -> dict[str, Any]:
        info = self.info
        return {
            "id": attempt.id,
            "task": attempt.task.id,
            "group": attempt.group,
            "group_size": attempt.group_size,
            "sample": attempt.sample,
            "statement_version": attempt.task.statement_version,
            "seed": attempt.seed,
            "policy": {
                "model": info.model,
                "revision": info.revision,
                "adapter": info.adapter,
                "version": info.version,
            },
            "sampling": attempt.sampling,
        }

    def _count(self, attempt: Attempt, verdict: Verdict | None, error: str | None) -> None:
        tally = self.tally
        tally.rollouts += 1
        tally.prompt_tokens += len(attempt.episode.prompt_ids)
        tally.sampled_tokens += attempt.episode.num_sampled
        if attempt.episode.stop == CANCELLED:
            tally.cancelled.add(attempt.episode)
        elif error is not None:
            tally.errors += 1
            tally.first_error = tally.first_error or error
        elif verdict is not None:
            tally.scored += 1
            tally.finished.add(attempt.episode)
            tally.successes += verdict.success
            stop = attempt.episode.stop
            tally.stops[stop] = tally.stops.get(stop, 0) + 1
