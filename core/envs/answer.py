"""The env `answer`: one prompt, one response, and the episode is over."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, ClassVar

from strop.core.records import Chunk, Span

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion


@dataclass(slots=True)
class AnswerEpisode:
    """One attempt in the env `answer`.

    The policy speaks once, and there is nothing to act on and nothing to hold (see core/envs/episode.py).
    """

    has_sandbox: ClassVar[bool] = False
    max_tokens: ClassVar[int | None] = None

    prompt_ids: list[int]
    completion: Completion | None = field(default=None)

    @property
    def stop(self) -> str:
        """The completion's own reason."""
        return "" if self.completion is None else self.completion.stop

    @property
    def num_sampled(self) -> int:
        """Tokens of the response."""
        return 0 if self.completion is None else len(self.completion.token_ids)

    @property
    def num_turns(self) -> int:
        """One, once there is a response."""
        return int(self.completion is not None)

    def begin(self) -> None:
        """Nothing comes before the prompt."""

    def advance(self, completion: Completion) -> None:
        """Takes the policy's turn, which ends the episode: there is nothing to act on."""
        self.completion = completion

    def act(self, work: Any) -> Any:
        """Never asked for."""
        raise AssertionError(work)

    def resume(self, results: Any) -> list[int] | None:
        """Never asked for."""
        raise AssertionError(results)

    def judge(self) -> None:
        """No verdict of its own: the task's verifier judges the response."""

    def cancel(self) -> None:
        """Never asked for: there is nothing that it could be in the middle of."""
        raise AssertionError

    def close(self) -> None:
        """Nothing is held."""

    def trajectory(self, response: str) -> dict[str, Any]:
        """The fields of the rollout that say what happened."""
        assert self.completion is not None
        chunks = self.chunks()
        step: dict[str, Any] = {"anchor": self.anchor(), "valid": True}
        if chunks[0].sampled:
            step |= {"span": chunks[0].sampled[0], "nll": mean_nll(self.completion.logprobs)}
        return {"chunks": chunks, "response": response, "turns": 1, "steps": [step], "stop": self.completion.stop}

    def chunks(self) -> list[Chunk]:
        """Prompt and sampled tokens exactly as fed and drawn."""
        assert self.completion is not None
        start = len(self.prompt_ids)
        sampled = self.completion.token_ids
        spans = [Span(start, start + len(sampled))] if sampled else []
        return [Chunk(self.prompt_ids + sampled, spans, self.completion.logprobs)]

    def anchor(self) -> str:
        """Hash of the one observation, the prompt: all samples of a group share it."""
        return anchor_of(" ".join(map(str, self.prompt_ids)))


def mean_nll(logprobs: Sequence[float]) -> float:
    """Mean negative log-probability (nats) of a step's tokens, rounded as the log-probabilities are."""
    return round(-math.fsum(logprobs) / len(logprobs), 7)


def anchor_of(observation: str) -> str:
    """A short stable hash of an observation (16 hex digits of BLAKE2b)."""
    return blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
