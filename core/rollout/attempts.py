"""One attempt at a task: the ids, seeds and sampling it runs under, and the rollout record it becomes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.envs.answer import AnswerEpisode
from strop.core.errors import DataError
from strop.core.records import Record, Sampling, Task
from strop.core.seeds import derive_seed

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion, Engine
    from strop.core.envs.episode import Episode
    from strop.core.envs.shell_tasks import ShellRoom
    from strop.core.models.tokens import Tokenizer
    from strop.core.tasks.verifiers import Verdict

ENVS = ("answer", "shell")


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


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sample to be drawn of one task."""

    task_record: Record
    task: Task
    sample: int
    group: str
    group_size: int
    seed: int
    sampling: Sampling
    episode: Episode

    @property
    def id(self) -> str:
        """The rollout's id."""
        return f"{self.group}/{self.sample}"


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
    stops: dict[str, int] = field(default_factory=dict)


class AttemptMaker:
    """Turns tasks into attempts, and finished attempts into rollout records, for one policy under one seed."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer, *, seed: int, choice: SamplingChoice, shell: ShellRoom | None = None
    ) -> None:
        self.info = engine.info
        self.seed = seed
        self.choice = choice
        self.tally = Tally()
        self._engine = engine
        self._tokenizer = tokenizer
        self._shell = shell
        # The same seed and policy give the same ids again (so that a run can be resumed), others never do.
        policy = (self.info.revision, str(self.info.adapter), str(self.info.version))
        self.run_id = f"{derive_seed(seed, *policy):014x}"[:8]

    def group_of(self, task: Task) -> str:
        """The id of the group of this run's attempts at `task` in its statement version."""
        return f"{task.id}@{task.statement_version}#{self.run_id}"

    def attempts(self, record: Record, task: Task, samples: Iterable[int], group_size: int) -> list[Attempt]:
        """The attempts with these sample indices. Raises DataError for a task that cannot be attempted."""
        if task.env not in ENVS:
            raise record.bad(f"unknown env {task.env!r}, expected one of {', '.join(ENVS)}", "env")
        if task.prompt is None:
            raise record.bad("missing; a task to attempt needs a prompt", "prompt")
        try:
            sampling = self.choice.for_task(task)
        except msgspec.ValidationError as error:
            raise record.bad(str(error), "sampling") from None
        sampling = msgspec.structs.replace(sampling, logprobs=self._engine.logprobs_mode(sampling))
        samples = list(samples)
        try:
            episodes = self._episodes(record, task, len(samples))
        except DataError as error:
            raise record.bad(error.message, error.field or "prompt") from None
        group = self.group_of(task)
        return [
            Attempt(
                record,
                task,
                sample,
                group,
                group_size,
                derive_seed(self.seed, task.id, sample),
                sampling,
                episode,
            )
            for sample, episode in zip(samples, episodes, strict=True)
        ]

    def _episodes(self, record: Record, task: Task, number: int) -> list[Episode]:
        if task.env == "shell":
            if self._shell is None:
                raise DataError("this tool attempts tasks of one turn only", field="env")
            return [
                self._shell.episode(record, task, self._tokenizer, self._engine.context_length) for _ in range(number)
            ]
        assert task.prompt is not None
        prompt_ids = self._tokenizer.encode_prompt(task.prompt)
        if not prompt_ids:
            raise DataError("the prompt has no tokens", field="prompt")
        return [AnswerEpisode(prompt_ids) for _ in range(number)]

    def response(self, completion: Completion) -> str:
        """The text of the sampled tokens, a stop string and what follows it in its last token included."""
        return self._tokenizer.decode(completion.token_ids)

    def record(self, attempt: Attempt, completion: Completion, response: str, verdict: Verdict | None) -> Record:
        """The rollout record. `verdict` is None where the engine failed."""
        error = completion.error
        if error is None and not math.isfinite(math.fsum(completion.logprobs)):
            error = "the engine returned a log-probability that is not finite"
        fields: dict[str, Any] = self._identity(attempt)
        if error is None:
            fields |= attempt.episode.trajectory(response)
            error = verdict.error if verdict is not None else None
        if error is not None:
            fields["error"] = error
        elif verdict is not None:
            # Of one turn or of many: the reward comes with the last step.
            fields["steps"][-1]["reward"] = verdict.reward
            fields |= {"reward": verdict.reward, "success": verdict.success}
            fields |= {"assertions": verdict.assertions} if verdict.assertions is not None else {}
            fields |= {"verdict": verdict.details} if verdict.details else {}
        self._count(attempt, completion, verdict, error)
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

    def _count(self, attempt: Attempt, completion: Completion, verdict: Verdict | None, error: str | None) -> None:
        tally = self.tally
        tally.rollouts += 1
        tally.prompt_tokens += len(attempt.episode.prompt_ids)
        tally.sampled_tokens += attempt.episode.num_sampled
        if error is not None:
            tally.errors += 1
            tally.first_error = tally.first_error or error
        elif verdict is not None:
            tally.scored += 1
            tally.successes += verdict.success
            stop = attempt.episode.stop
            tally.stops[stop] = tally.stops.get(stop, 0) + 1
