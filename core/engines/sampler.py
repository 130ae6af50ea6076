"""Drawing tokens: temperature, top-k, top-p, and uniforms that belong to one sample alone.

In numpy and on one row at a time, so that a draw depends on its own logits and uniform and on nothing else: torch
splits sums by the shape of the batch and the number of threads.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from strop.core.errors import UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strop.core.records import Sampling

# Uniforms are drawn so many at a time.
UNIFORMS_AHEAD = 64
# Log-probabilities are recorded to 1e-7 nats, which is finer than float32 holds them.
LOGPROB_DIGITS = 7
# The cumulative sum is made over blocks first and then inside one block: a seventh of the time of a whole one.
BLOCK = 256


class Uniforms:
    """The uniforms in [0, 1) of one sample: the t-th depends on the sample's seed and t alone.

    They come from Philox (Salmon et al., 2011, counter based), keyed by the seed.
    """

    __slots__ = ("_ahead", "_source")

    def __init__(self, seed: int) -> None:
        import numpy as np

        self._source = np.random.Generator(np.random.Philox(key=seed))
        self._ahead: list[float] = []

    def next(self) -> float:
        """The next one."""
        if not self._ahead:
            self._ahead = self._source.random(UNIFORMS_AHEAD).tolist()[::-1]
        return self._ahead.pop()


def check_sampling(sampling: Sampling) -> None:
    """Raises UsageError for numbers that mean nothing."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        raise UsageError(f"temperature {sampling.temperature}: expected 0 (greedy) or more")
    if not 0 < sampling.top_p <= 1:
        raise UsageError(f"top-p {sampling.top_p}: expected more than 0 and at most 1")
    if sampling.top_k < 0:
        raise UsageError(f"top-k {sampling.top_k}: expected 0 (all tokens) or more")
    if sampling.max_tokens < 1:
        raise UsageError(f"max-tokens {sampling.max_tokens}: expected 1 or more")
    if any(not text for text in sampling.stop):
        raise UsageError("a stop string is empty")


def logprobs_mode(sampling: Sampling) -> str:
    """ "raw" where greedy (temperature 1, whole vocabulary), else "scaled" (at the temperature, whole vocabulary)."""
    return "raw" if sampling.temperature == 0 else "scaled"


def draw(logits_V: NDArray[Any], sampling: Sampling, uniforms: Uniforms) -> tuple[int, float]:
    """One token and its log-probability (nats) over the whole vocabulary, from one row of float32 logits.

    Temperature 0 takes the first of the largest logits and reports the log-probability at temperature 1. Otherwise the
    logits are divided by the temperature, the `top_k` largest are kept (0: all), then the smallest set of the likeliest
    tokens whose mass reaches the share `top_p` of what is left, and a uniform u picks the first token, in order of ids,
    at which the cumulative mass exceeds u. Of equally likely tokens those with smaller ids are kept. Top-p is measured
    after top-k, as in transformers and vLLM. The log-probability is that of the unfiltered distribution. Exponentials
    are float32, sums float64: what is lost is below 1e-6 of a probability. Raises ValueError if the largest logit is
    not a finite number.
    """
    import numpy as np

    largest = float(logits_V.max())
    if not math.isfinite(largest):
        raise ValueError(f"the largest logit is {largest}")
    shifted_V = logits_V.astype(np.float64)
    shifted_V -= largest
    if sampling.temperature not in (0, 1):
        shifted_V /= sampling.temperature
    probs_V = np.exp(shifted_V.astype(np.float32))
    log_total = math.log(float(probs_V.sum(dtype=np.float64)))
    if sampling.temperature == 0:
        token = int(logits_V.argmax())
    else:
        token = _inverse_cdf(_filtered(probs_V, sampling), uniforms.next())
    # -0.0 would be written as such.
    return token, min(0.0, round(float(shifted_V[token]) - log_total, LOGPROB_DIGITS)) + 0.0


def _filtered(probs_V: NDArray[Any], sampling: Sampling) -> NDArray[Any]:
    """The masses with those of excluded tokens set to zero; the rest is not renormalised."""
    import numpy as np

    kept = min(sampling.top_k or len(probs_V), len(probs_V))
    if kept == len(probs_V) and sampling.top_p >= 1:
        return probs_V
    sorted_V = np.sort(probs_V)[::-1]
    if sampling.top_p < 1:
        mass_V = sorted_V[:kept].cumsum(dtype=np.float64)
        kept = int(np.searchsorted(mass_V, sampling.top_p * mass_V[-1])) + 1
    least = sorted_V[kept - 1]
    is_kept_V = probs_V > least
    equal = np.flatnonzero(probs_V == least)
    is_kept_V[equal[: kept - int(is_kept_V.sum())]] = True
    return np.where(is_kept_V, probs_V, np.float32(0))


def _inverse_cdf(probs_V: NDArray[Any], uniform: float) -> int:
    """The first index at which the cumulative mass exceeds `uniform` times the whole; its own mass is not zero."""
    import numpy as np

    starts = np.arange(0, len(probs_V), BLOCK)
    mass_of_blocks = np.add.reduceat(probs_V, starts, dtype=np.float64).cumsum()
    target = uniform * mass_of_blocks[-1]
    block = min(int(np.searchsorted(mass_of_blocks, target, side="right")), len(starts) - 1)
    before = mass_of_blocks[block - 1] if block else 0.0
    inside = probs_V[starts[block] : starts[block] + BLOCK]
    index = int(np.searchsorted(before + inside.cumsum(dtype=np.float64), target, side="right"))
    if index == len(inside):
        # The two sums round differently: the target lies within a rounding of the block's end.
        index = int(np.flatnonzero(inside)[-1])
    return int(starts[block]) + index
