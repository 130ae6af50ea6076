"""One attempt at a task: the ids, seeds and sampling it runs under, and the rollout record it becomes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.envs.answer import AnswerEpisode
from strop.core.errors import DataError
from strop.core.records import Record, Sampling, Task
from strop.core.seeds import derive_seed

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion, Engine, ModelInfo
    from strop.core.models.tokens import Tokenizer
    from strop.core.tasks.verifiers import Verdict

ENVS = ("answer",)


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
    episode: AnswerEpisode

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
        self, *, info: ModelInfo, encode: Callable[[Any], list[int]], decode: Callable[[list[int]], str],
        logprobs_mode: Callable[[Sampling], str], seed: int, choice: SamplingChoice,
    ) -> None:  # fmt: skip
        self.info = info
        self.seed = seed
        self.choice = choice
        self.tally = Tally()
        self._encode = encode
        self._decode = decode
        self._logprobs_mode = logprobs_mode
        # One run: the same seed and policy give the same ids again (so that a run can be resumed), others never do.
        self.run_id = f"{derive_seed(seed, info.revision, str(info.adapter), str(info.version)):014x}"[:8]

    @classmethod
    def over(cls, engine: Engine, tokenizer: Tokenizer, *, seed: int, choice: SamplingChoice) -> AttemptMaker:
        """For the policy that an engine holds."""
        return cls(
            info=engine.info, encode=tokenizer.encode_prompt, decode=tokenizer.decode, logprobs_mode=engine.logprobs_mode,
            seed=seed, choice=choice,
        )  # fmt: skip

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
        sampling = msgspec.structs.replace(sampling, logprobs=self._logprobs_mode(sampling))
        try:
            prompt_ids = self._encode(task.prompt)
        except DataError as error:
            raise record.bad(error.message, error.field or "prompt") from None
        if not prompt_ids:
            raise record.bad("the prompt has no tokens", "prompt")
        group = self.group_of(task)
        return [
            Attempt(
                record, task, sample, group, group_size, derive_seed(self.seed, task.id, sample), sampling, AnswerEpisode(prompt_ids)
            )
            for sample in samples
        ]

    def response(self, completion: Completion) -> str:
        """The text of the sampled tokens, a stop string and what follows it in its last token included."""
        return self._decode(completion.token_ids)

    def record(self, attempt: Attempt, completion: Completion, response: str, verdict: Verdict | None) -> Record:
        """The rollout record. `verdict` is None where the engine failed."""
        error = completion.error or (verdict.error if verdict else None)
        if error is None and not math.isfinite(math.fsum(completion.logprobs)):
            error = "the engine returned a log-probability that is not finite"
        common: dict[str, Any] = {
            "id": attempt.id, "task": attempt.task.id, "group": attempt.group, "group_size": attempt.group_size,
            "sample": attempt.sample, "statement_version": attempt.task.statement_version, "seed": attempt.seed,
            "policy": {"model": self.info.model, "revision": self.info.revision, "adapter": self.info.adapter, "version": self.info.version},
            "sampling": attempt.sampling,
        }  # fmt: skip
        self._count(attempt, completion, verdict, error)
        if completion.error is not None or not math.isfinite(math.fsum(completion.logprobs)):
            return Record.make("rollout", {**common, "error": error})
        chunks = attempt.episode.chunks()
        outcome: dict[str, Any] = {"error": error}
        reward = None
        if error is None and verdict is not None:
            reward = verdict.reward
            outcome = {"reward": verdict.reward, "success": verdict.success}
            if verdict.details:
                outcome["verdict"] = verdict.details
        step = {"span": chunks[0].sampled[0] if chunks[0].sampled else None, "anchor": attempt.episode.anchor(), "valid": True,
                "reward": reward, "nll": _nll(completion.logprobs)}  # fmt: skip
        return Record.make(
            "rollout",
            {
                **common,
                "chunks": chunks,
                "response": response,
                "turns": 1,
                "steps": [{name: value for name, value in step.items() if value is not None}],
                **outcome,
                "stop": completion.stop,
            },
        )

    def _count(self, attempt: Attempt, completion: Completion, verdict: Verdict | None, error: str | None) -> None:
        tally = self.tally
        tally.rollouts += 1
        tally.prompt_tokens += len(attempt.episode.prompt_ids)
        tally.sampled_tokens += len(completion.token_ids)
        if error is not None:
            tally.errors += 1
            tally.first_error = tally.first_error or error
        elif verdict is not None:
            tally.scored += 1
            tally.successes += verdict.success
            tally.stops[completion.stop] = tally.stops.get(completion.stop, 0) + 1


def _nll(logprobs: list[float]) -> float | None:
    """Mean negative log-probability (nats) of a step's tokens, rounded as the log-probabilities are."""
    return round(-math.fsum(logprobs) / len(logprobs), 7) if logprobs else None


