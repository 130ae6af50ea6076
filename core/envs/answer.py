"""The env `answer`: one prompt, one response, and the episode is over."""

from __future__ import annotations

from dataclasses import dataclass, field
from hashlib import blake2b
from typing import TYPE_CHECKING

from strop.core.records import Chunk, Span

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion


@dataclass(slots=True)
class AnswerEpisode:
    """One attempt in the env `answer`.

    The rollout loop feeds `prompt_ids` to an engine, hands the completion to `advance`, and goes on while that returns
    the next token ids to feed; here it never does.
    """

    prompt_ids: list[int]
    completion: Completion | None = field(default=None)

    def advance(self, completion: Completion) -> list[int] | None:
        """Takes the policy's turn; None ends the episode."""
        self.completion = completion
        return None

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


def anchor_of(observation: str) -> str:
    """A short stable hash of an observation (16 hex digits of BLAKE2b)."""
    return blake2b(observation.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
