"""Causal attention over sequences packed one behind the other: each sees itself alone, and nothing is padded.

Each sequence's slice goes through `scaled_dot_product_attention` with its causal flag, which needs no mask. (One mask
of blocks over the whole pack computes the forbidden squares too, and is no faster than padding.)

Axes: B batch (1), N query heads, K key and value heads, T tokens of the pack, D size of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention


def packed_causal_attention(
    query_BNTD: Tensor,
    key_BKTD: Tensor,
    value_BKTD: Tensor,
    lengths: Sequence[int],
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    window: int | None = None,
) -> Tensor:
    """Attention output [B, T, N, D], in which a token sees the tokens before it in its own sequence, and itself.

    `lengths` are the sequences' lengths in order, and their sum is T. N is a multiple of K (grouped queries; keys and
    values are not repeated in memory). `scaling` defaults to D ** -0.5. With `window` w a token sees itself and the
    w - 1 tokens before it. Raises ValueError if the lengths do not fill the pack.
    """
    if sum(lengths) != query_BNTD.shape[2]:
        raise ValueError(f"sequences of {sum(lengths)} tokens in a pack of {query_BNTD.shape[2]}")
    grouped = query_BNTD.shape[1] != key_BKTD.shape[1]
    pieces = []
    parts = (torch.split(tensor, list(lengths), dim=2) for tensor in (query_BNTD, key_BKTD, value_BKTD))
    for query, key, value in zip(*parts, strict=True):
        mask = None if window is None or query.shape[2] <= window else _band(query.shape[2], window, query.device)
        piece_BNTD = scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=grouped,
        )
        pieces.append(piece_BNTD.transpose(1, 2))
    return torch.cat(pieces, dim=1)


def _band(length: int, window: int, device: torch.device) -> Tensor:
    return torch.ones(length, length, dtype=torch.bool, device=device).tril().triu(1 - window)


def packed_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    packed_lengths: Sequence[int] | None = None,
    **more: Any,
) -> tuple[Tensor, None]:
    """The same in the form that transformers' AttentionInterface calls.

    `packed_lengths` is an argument of the model's forward, which hands it on to here, also when gradient checkpointing
    calls again. Raises ValueError where something would change the attention that this form does not compute (a mask,
    capped logits, sinks, a position bias), or where the lengths never arrived, so that no model is quietly wrong.
    """
    if packed_lengths is None:
        raise ValueError("packed attention was called without packed_lengths: the model does not hand arguments on")
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        what = unknown or ["attention_mask" if attention_mask is not None else "not causal"]
        raise ValueError(f"packed attention does not compute {', '.join(what)}")
    output = packed_causal_attention(
        query, key, value, packed_lengths, scaling=scaling, dropout=dropout, window=more.get("sliding_window")
    )
    return output, None
