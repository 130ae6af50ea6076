"""The one protocol of the three engines: requests of token ids in, completions out.

An engine is driven from outside: `submit` queues a request, `collect` does some work and returns what finished. So one
loop can keep any engine busy with single turns or with many interleaved episodes, and no engine owns a thread of ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from strop.core.records import Sampling

# Stop reasons of a completion. "eos": any of the model's end tokens, which is the last sampled token; "stop": a stop
# string, whose tokens are kept; "length": max_tokens reached; "cancelled": the caller wanted no more.
STOP_REASONS = ("eos", "stop", "length", "cancelled")


@dataclass(frozen=True, slots=True)
class Request:
    """One sample to draw. `key` is the caller's own name for it and comes back with the completion.

    `seed` (0 <= seed < 2**53) belongs to this sample alone. `row` is the sample's index in its group: an engine that
    computes a group together places the sample by it, so that its arithmetic does not depend on its neighbours.
    """

    key: Any
    prompt_ids: list[int]
    sampling: Sampling
    seed: int
    row: int = 0


@dataclass(slots=True)
class Completion:
    """What became of a request: sampled ids (an end token included), one log-probability (nats) each, and why it ended.

    `error` says that the machine failed, not the policy; the other fields are then empty.
    """

    key: Any
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: str = ""
    error: str | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a rollout says of its policy: as named by the user, with the revision (content hash) and adapter."""

    model: str
    revision: str
    adapter: str | None = None
    version: int | None = None


class Engine(Protocol):
    """A model that generates. A context manager: leaving it lets go of the model.

    `concurrency` is how many samples in flight keep it busy.
    """

    name: str
    info: ModelInfo
    context_length: int
    concurrency: int

    def submit(self, request: Request) -> None:
        """Queues a request. Raises UsageError for sampling options this engine cannot honour."""
        ...

    def collect(self, patience_s: float | None = None) -> list[Completion]:
        """Works until a submitted request has finished, and returns those that have; [] if none is pending.

        With `patience_s` [] also when, after about so long, none has.
        """
        ...

    def cancel(self, key: Any) -> None:
        """Ends a pending request: it comes back with stop "cancelled" and what was drawn, where the engine knows it.

        One that has finished meanwhile comes back as it is.
        """
        ...

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        ...

    def logprobs_mode(self, sampling: Sampling) -> str:
        """ "raw", "scaled" or "processed" for completions drawn with `sampling`."""
        ...

    def close(self) -> None:
        """Lets go of the model, its memory and its processes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: Any) -> None: ...
