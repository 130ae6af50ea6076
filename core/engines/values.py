"""What every engine checks of the values that come back, so that no wrong number passes for a log-probability."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from strop.core.engines.sampler import LOGPROB_DIGITS, check_sampling
from strop.core.errors import UsageError

if TYPE_CHECKING:
    from strop.core.records import Sampling

# vLLM takes a lower temperature for this one, and one below 1e-5 for greedy, and no record would say so.
LOWEST_TEMPERATURE = 0.01
# vLLM's server writes -inf, which JSON cannot hold, as this.
MINUS_INFINITY = -9999.0


def check_for_vllm(sampling: Sampling) -> None:
    """Raises UsageError for numbers that mean nothing, or something else to vLLM than they say."""
    check_sampling(sampling)
    if 0 < sampling.temperature < LOWEST_TEMPERATURE:
        raise UsageError(f"temperature {sampling.temperature}: vLLM takes 0 (greedy) or at least {LOWEST_TEMPERATURE}")


def find_fault(token_ids: Sequence[int], logprobs: Sequence[float | None] | None, vocab_size: int = 0) -> str | None:
    """What is wrong with these sampled tokens and their log-probabilities (nats), or None.

    Each token has one value, which is a finite number and, but for rounding, not above zero. `vocab_size` 0: unknown.
    """
    if not token_ids:
        return "no token was sampled"
    if vocab_size and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        return f"a token id lies outside the vocabulary of {vocab_size}"
    if logprobs is None:
        return "the log-probabilities are missing"
    if len(logprobs) != len(token_ids):
        return f"{len(logprobs)} log-probabilities for {len(token_ids)} tokens"
    for i, value in enumerate(logprobs):
        if value is None:
            return f"the log-probability of token {i} is null"
        if not math.isfinite(value) or value <= MINUS_INFINITY:
            return f"the log-probability of token {i} is not finite ({value})"
        if value > 1e-3:
            return f"the log-probability of token {i} is above zero ({value})"
    return None


def rounded(logprobs: Sequence[float]) -> list[float]:
    """The values as records hold them: at most 0, to 1e-7."""
    return [min(0.0, round(value, LOGPROB_DIGITS)) for value in logprobs]
