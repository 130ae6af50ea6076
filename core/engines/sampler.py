"""Drawing tokens: temperature, top-k, top-p, and uniforms that belong to one sample alone."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from strop.core.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

    from strop.core.records import Sampling

# Uniforms are drawn so many at a time.
UNIFORMS_AHEAD = 64
# Log-probabilities are recorded to 1e-7 nats, which is finer than float32 holds them.
LOGPROB_DIGITS = 7


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


def draw(logits_V: Tensor, sampling: Sampling, uniforms: Uniforms) -> tuple[int, float]:
    """One token and its log-probability (nats) over the whole vocabulary, from one row of finite logits.

    Temperature 0 takes the first of the largest logits and reports the log-probability at temperature 1. Otherwise the
    logits are divided by the temperature, the `top_k` largest are kept (0: all; of equal ones those with smaller ids),
    then the smallest set of the likeliest tokens whose mass reaches `top_p`, and a uniform u picks the first token, in
    order of ids, whose cumulative mass exceeds u. All in float64. Top-p is measured after top-k, as in transformers and
    vLLM. The log-probability is that of the unfiltered distribution.
    """
    import torch

    logits_V = logits_V.to(torch.float64)
    if sampling.temperature == 0:
        token = int(logits_V.argmax())
        return token, _recorded(logits_V[token] - logits_V.logsumexp(0))
    scaled_V = logits_V / sampling.temperature
    total = scaled_V.logsumexp(0)
    probs_V = (scaled_V - total).exp_()
    token = _inverse_cdf(_filtered(probs_V, sampling), uniforms.next())
    return token, _recorded(scaled_V[token] - total)


def _filtered(probs_V: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities with those of excluded tokens set to zero; the rest is not renormalised."""
    import torch

    has_k = 0 < sampling.top_k < probs_V.shape[0]
    if not has_k and sampling.top_p >= 1:
        return probs_V
    sorted_V, order_V = torch.sort(probs_V, descending=True, stable=True)
    kept = sampling.top_k if has_k else probs_V.shape[0]
    if sampling.top_p < 1:
        mass_V = sorted_V[:kept].cumsum(0)
        kept = min(kept, int((mass_V < sampling.top_p * mass_V[-1]).sum()) + 1)
    return torch.zeros_like(probs_V).index_copy_(0, order_V[:kept], sorted_V[:kept])


def _inverse_cdf(probs_V: Tensor, uniform: float) -> int:
    import torch

    mass_V = probs_V.cumsum(0)
    target = uniform * mass_V[-1]
    # Rounding could lead past the last token with any mass; the first that holds all of it is the last such token.
    token = int(torch.searchsorted(mass_V, target, right=True))
    return min(token, int(torch.searchsorted(mass_V, mass_V[-1])))


def _recorded(logprob: Any) -> float:
    return round(float(logprob), LOGPROB_DIGITS)
