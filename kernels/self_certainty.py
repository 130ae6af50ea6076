"""Self-certainty of a next-token distribution: how far it is from uniform, without another pass over the vocabulary.

Axes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from strop.kernels.logit_blocks import inverse_temperature, wide_dtype


@torch.no_grad()
def self_certainty(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    logprobs_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
) -> Tensor:
    """KL(U || p) = -log V - mean_v log p_v at each token [T], in nats: 0 for a uniform p. Without gradient.

    `logprobs_T` is what linear_logprob returned for the other arguments: the target's log p knows the normaliser, and
    the mean logit is hidden times the mean of the matrix's rows, so a token costs a dot product. V counts all rows of
    the matrix, those that pad the vocabulary included. A word that a bias excludes makes it infinite.

    Source: Intuitor (arXiv:2505.19590, Eq. 3, there averaged over a response's tokens); the closed form is ours.

    >>> hidden, weight, log_half = torch.ones(1, 1), torch.zeros(2, 1), torch.tensor([-math.log(2)])
    >>> self_certainty(hidden, weight, torch.tensor([0]), log_half)
    tensor([0.])
    """
    wide = wide_dtype(hidden_TH.dtype)
    above_mean_TH = weight_VH[targets_T].to(wide) - weight_VH.mean(0, dtype=wide)
    above_mean_T = (hidden_TH.to(wide) * above_mean_TH).sum(1)
    if bias is not None:
        above_mean_T += bias[targets_T].to(wide) - bias.mean(dtype=wide)
    return above_mean_T * inverse_temperature(temperature, hidden_TH) - logprobs_T - math.log(weight_VH.shape[0])
