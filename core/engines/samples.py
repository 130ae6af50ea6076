"""One request being answered: what was drawn so far, and whether that was the end."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.core.engines.protocol import Completion, Request
from strop.core.engines.sampler import Uniforms, draw
from strop.core.engines.stops import StopFinder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strop.core.models.tokens import Tokenizer


class Sample:
    """The state of one request. `budget` is how many tokens the context has left behind the prompt."""

    __slots__ = ("_eos_ids", "_logprobs", "_stops", "_uniforms", "limit", "request", "token_ids")

    def __init__(self, request: Request, tokenizer: Tokenizer, budget: int) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.limit = min(request.sampling.max_tokens, budget)
        self._logprobs: list[float] = []
        self._eos_ids = tokenizer.eos_ids
        self._uniforms = Uniforms(request.seed)
        self._stops = StopFinder(tokenizer, request.sampling.stop)

    def take(self, logits_V: NDArray[Any]) -> Completion | None:
        """Draws the next token from a row of float32 logits; the completion if that was the last."""
        try:
            token, logprob = draw(logits_V, self.request.sampling, self._uniforms)
        except ValueError as error:
            place = f"token {len(self.token_ids)} of the response"
            return Completion(self.request.key, error=f"the model computes nonsense at {place}: {error}")
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        stop = self._reason(token)
        return Completion(self.request.key, self.token_ids, self._logprobs, stop) if stop else None

    def cancelled(self) -> Completion:
        """The completion of a request that is not wanted any more."""
        return Completion(self.request.key, self.token_ids, self._logprobs, "cancelled")

    def _reason(self, token: int) -> str:
        if token in self._eos_ids:
            return "eos"
        if self._stops.found(token):
            return "stop"
        return "length" if len(self.token_ids) >= self.limit else ""
