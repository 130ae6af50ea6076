"""A step of many sequences at once whose results do not depend on who shares it.

Tokens of different sequences lie as rows of one matrix: prompts in chunks, samples with one token each. A linear layer
treats rows alike, and attention is computed for each group apart, so nothing is padded to a common length. What would
make a row's last bits depend on its neighbours is the choice of kernels by shape: so steps have one of a few sizes, and
core/engines/invariance.py finds out, on this machine and with these weights, which of them give every row the same bits
wherever it stands.

Axes: R rows, B samples of a group, H query heads, K key and value heads, G = H / K, T tokens, D head size,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

ATTENTION_NAME = "strop_rows"
# A prompt is cut at multiples of this, wherever it is computed; also the most rows that prompts may take in a step.
CHUNK = 64
# A cache grows by so many tokens at a time.
GROWTH = 64
SMALLEST = 8


class Cache:
    """Keys and values of each layer, [B, K, T, D]; layers appear as the model first writes to them."""

    def __init__(self, rows: int, capacity: int) -> None:
        self.rows = rows
        self.capacity = capacity
        self.layers: dict[int, list[Tensor]] = {}

    def layer(self, index: int, like_KBD: Tensor) -> list[Tensor]:
        """The layer's two tensors, made on first use."""
        if index not in self.layers:
            shape = (self.rows, like_KBD.shape[0], self.capacity, like_KBD.shape[2])
            self.layers[index] = [like_KBD.new_empty(shape), like_KBD.new_empty(shape)]
        return self.layers[index]

    def expanded(self, rows: int, length: int) -> Cache:
        """A cache of `rows` rows that all begin with the `length` tokens of this one's only row."""
        copy = Cache(rows, length + GROWTH)
        for index, pair in self.layers.items():
            copy.layers[index] = []
            for tensor in pair:
                grown = tensor.new_empty((rows, tensor.shape[1], copy.capacity, tensor.shape[3]))
                grown[:, :, :length] = tensor[:, :, :length]
                copy.layers[index].append(grown)
        return copy

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens."""
        if length <= self.capacity:
            return
        self.capacity = max(length, self.capacity + GROWTH, self.capacity * 5 // 4)
        for pair in self.layers.values():
            for i, tensor in enumerate(pair):
                grown = tensor.new_empty((*tensor.shape[:2], self.capacity, tensor.shape[3]))
                grown[:, :, : tensor.shape[2]] = tensor
                pair[i] = grown

    def drop(self, row: int) -> None:
        """Takes a row out; the last one moves into its place."""
        self.rows -= 1
        if row != self.rows:
            for pair in self.layers.values():
                for tensor in pair:
                    tensor[row] = tensor[self.rows]


@dataclass(slots=True)
class PromptChunk:
    """Tokens of one prompt from position `start` on, behind what its cache holds."""

    token_ids: list[int]
    start: int
    cache: Cache

    @property
    def positions(self) -> list[int]:
        """Where the tokens stand."""
        return list(range(self.start, self.start + len(self.token_ids)))

    def attend(
        self, layer: int, query_HRD: Tensor, key_KRD: Tensor, value_KRD: Tensor, *,
        scaling: float | None, window: int | None, fused: bool,
    ) -> Tensor:  # fmt: skip
        """Causal attention to the cache and to itself."""
        import torch
        from torch.nn.functional import scaled_dot_product_attention

        keys, values = self.cache.layer(layer, key_KRD)
        end = self.start + len(self.token_ids)
        keys[0, :, self.start : end] = key_KRD
        values[0, :, self.start : end] = value_KRD
        mask = None
        if self.start or (window is not None and end > window):
            mask = torch.ones(len(self.token_ids), end, dtype=torch.bool, device=key_KRD.device).tril(self.start)
            mask = mask if window is None else mask.triu(self.start + 1 - window)
        output = scaled_dot_product_attention(
            query_HRD[None], keys[:, :, :end], values[:, :, :end], attn_mask=mask, is_causal=mask is None,
            scale=scaling, enable_gqa=query_HRD.shape[0] != key_KRD.shape[0],
        )  # fmt: skip
        return output[0].transpose(0, 1)


@dataclass(slots=True)
class Draws:
    """One token for each sample of a group; all stand at position `length`, behind what the cache holds."""

    token_ids: list[int]
    length: int
    cache: Cache

    @property
    def positions(self) -> list[int]:
        """Where the tokens stand."""
        return [self.length] * len(self.token_ids)

    def attend(
        self, layer: int, query_HRD: Tensor, key_KRD: Tensor, value_KRD: Tensor, *,
        scaling: float | None, window: int | None, fused: bool,
    ) -> Tensor:  # fmt: skip
        """Each row attends to its own cache and itself; the G queries of a key head go in as one."""
        keys, values = self.cache.layer(layer, key_KRD)
        heads, rows, size = query_HRD.shape
        keys, values = keys[:rows], values[:rows]
        keys[:, :, self.length] = key_KRD.transpose(0, 1)
        values[:, :, self.length] = value_KRD.transpose(0, 1)
        query_BKGD = query_HRD.transpose(0, 1).reshape(rows, key_KRD.shape[0], -1, size)
        seen = slice(0 if window is None else max(0, self.length + 1 - window), self.length + 1)
        output_BKGD = draws_attention(query_BKGD, keys[:, :, seen], values[:, :, seen], scaling, fused=fused)
        return output_BKGD.reshape(rows, heads, size)


Segment = PromptChunk | Draws


def draws_attention(
    query_BKGD: Tensor, key_BKTD: Tensor, value_BKTD: Tensor, scaling: float | None, *, fused: bool
) -> Tensor:
    """Attention of G queries to all T tokens of their own row and key head.

    `fused` is torch's one call; otherwise it is two products and a softmax.
    """
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if fused:
        return scaled_dot_product_attention(query_BKGD, key_BKTD, value_BKTD, scale=scaling)
    scale = query_BKGD.shape[-1] ** -0.5 if scaling is None else scaling
    scores_BKGT = torch.matmul(query_BKGD * scale, key_BKTD.transpose(-1, -2))
    weights_BKGT = torch.softmax(scores_BKGT, -1, dtype=torch.float32).to(value_BKTD.dtype)
    return torch.matmul(weights_BKGT, value_BKTD)


def attention_forward(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, dropout: float = 0.0,
    scaling: float | None = None, rows_segments: Sequence[Segment] | None = None, rows_fused: bool = False, **more: Any,
) -> tuple[Tensor, None]:  # fmt: skip
    """The form transformers' AttentionInterface calls; query [1, H, R, D], key and value [1, K, R, D].

    Raises ValueError where something would change the attention that is not computed here.
    """
    import torch

    unknown = [name for name in ("softcap", "s_aux", "position_bias") if more.get(name) is not None]
    if rows_segments is None or attention_mask is not None or unknown or not getattr(module, "is_causal", True):
        raise ValueError(f"attention by rows does not compute {', '.join(unknown) or 'this mask'}")
    output_RHD = torch.zeros_like(query[0].transpose(0, 1), memory_format=torch.contiguous_format)
    row = 0
    for segment in rows_segments:
        part = slice(row, row + len(segment.token_ids))
        output_RHD[part] = segment.attend(
            module.layer_idx, query[0, :, part], key[0, :, part], value[0, :, part],
            scaling=scaling, window=more.get("sliding_window"), fused=rows_fused,
        )  # fmt: skip
        row = part.stop
    return output_RHD[None], None


class RowModel:
    """A transformers model (peft-wrapped or not) that computes steps.

    `sizes` are the numbers of rows that a step may have, ascending; `fused` says how draws attend. Both are set by
    core/engines/invariance.py, which also finds out whether the model can be computed like this at all.
    """

    def __init__(self, model: Any, sizes: list[int]) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, attention_forward)
        self.base = model.get_base_model() if hasattr(model, "get_base_model") else model
        self.sizes = sizes
        self.fused = False
        self._attention_before = self.base.config._attn_implementation
        self.base.set_attn_implementation(ATTENTION_NAME)

    def restore(self) -> None:
        """Gives the model back the attention it had."""
        self.base.set_attn_implementation(self._attention_before)

    @property
    def max_rows(self) -> int:
        """The most rows of a step."""
        return self.sizes[-1]

    @property
    def vocab_size(self) -> int:
        """How many logits a row has."""
        return int(self.base.get_output_embeddings().weight.shape[0])

    @property
    def device(self) -> Any:
        """Where the weights are."""
        return self.base.get_input_embeddings().weight.device

    def step(self, segments: Sequence[Segment], wanted: Sequence[int]) -> Tensor:
        """Logits [len(wanted), V] of the rows `wanted`; all caches have taken in their tokens.

        Rows are counted through the segments in order; together they are at most `max_rows`.
        """
        import torch

        if self.base.config._attn_implementation != ATTENTION_NAME:
            self.base.set_attn_implementation(ATTENTION_NAME)
        ids = [token for segment in segments for token in segment.token_ids]
        positions = [position for segment in segments for position in segment.positions]
        spare = self._size_for(len(ids)) - len(ids)
        hidden_RH: Tensor = self.base.base_model(
            input_ids=torch.tensor([ids + [0] * spare], device=self.device),
            position_ids=torch.tensor([positions + [0] * spare], device=self.device),
            use_cache=False, rows_segments=segments, rows_fused=self.fused,
        ).last_hidden_state[0]  # fmt: skip
        if not wanted:
            return hidden_RH.new_empty(0, self.vocab_size)
        rows = [*wanted, *[wanted[0]] * (self._size_for(len(wanted)) - len(wanted))]
        logits_RV: Tensor = self._head(hidden_RH[rows])[: len(wanted)]
        return logits_RV

    def _size_for(self, count: int) -> int:
        return next(size for size in self.sizes if size >= count)

    def _head(self, hidden_RH: Tensor) -> Tensor:
        import torch

        config = self.base.config
        logits_RV: Tensor = self.base.get_output_embeddings()(hidden_RH).float()
        scale = float(getattr(config, "logit_scale", None) or 1.0) / float(getattr(config, "logits_scaling", None) or 1)
        logits_RV = logits_RV if scale == 1 else logits_RV * scale
        cap = getattr(config, "final_logit_softcapping", None)
        return logits_RV if not cap else torch.tanh(logits_RV / cap) * cap


def step_sizes(max_rows: int) -> list[int]:
    """8, 16, 24, 32, 48, 64, 96, 128, ... up to `max_rows`, which is one of them (rounded up).

    >>> step_sizes(40)
    [8, 16, 24, 32, 48]
    """
    sizes = [SMALLEST]
    while sizes[-1] < max_rows:
        size = SMALLEST
        while size * 2 <= sizes[-1]:
            size *= 2
        sizes.append(sizes[-1] + max(SMALLEST, size // 2))
    return sizes
