"""Whether a model gives a row the same bits in any company: measured, on this machine, with these weights.

A product of matrices may sum a row in another order when the number of rows, or the row's place, selects another kernel
(He et al., "Defeating Nondeterminism in LLM Inference", 2025, write kernels that do not). Which kernel runs depends on
shapes and threads and not on values, so trying the shapes once is enough.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from strop.core.engines.rows import Cache, Draws, PromptChunk, RowModel, draws_attention, step_sizes
from strop.core.errors import Unavailable
from strop.core.models.memory import log
from strop.core.models.routing import is_mixture

if TYPE_CHECKING:
    from torch import Tensor

# As in core/models/packed.py: computing in another order changes log-probabilities (nats) by about this much.
TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}
PROBE_LENGTHS, PROBE_ROWS = (5, 40, 300, 1100), (2, 3, 8, 13)


def open_row_model(model: Any, max_rows: int) -> RowModel:
    """The model by rows, with the step sizes and the attention that keep its rows apart.

    Raises Unavailable, with the model as it was, where it is a mixture of experts, does more than attention and layers
    that treat rows alike, or gives a row other bits in another place.
    """
    kind = model.config.model_type
    if is_mixture(model):
        raise Unavailable(f"{kind} is a mixture of experts")
    rows = None
    try:
        plain = _plain_logprobs(model)
        rows = RowModel(model, step_sizes(max_rows))
        rows.fused = _choose_attention(rows)
        _check_against(rows, plain)
        rows.sizes = usable_sizes(rows)
    except (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError, Unavailable) as error:
        if rows is not None:
            rows.restore()
        raise Unavailable(f"{kind}: {error}") from None
    log.info("steps of %s rows give every row the same bits", rows.sizes)
    return rows


def usable_sizes(rows: RowModel) -> list[int]:
    """The sizes whose every row has the bits of a row of the largest step. Raises Unavailable if there is none.

    All rows of a step of each size get the same token and history; whatever kernels their place and the size select
    must then give the same logits.
    """
    import torch

    usable: list[int] = []
    reference = None
    with torch.inference_mode(), _OneLayer(rows.base):
        for size in reversed(rows.sizes):
            logits_RV = _uniform_step(rows, size)
            reference = logits_RV[:1] if reference is None else reference
            if torch.equal(logits_RV, reference.expand_as(logits_RV)):
                usable.append(size)
            elif size == rows.sizes[-1]:
                raise Unavailable("on this machine a row's bits depend on its place in the batch")
    return usable[::-1]


def _uniform_step(rows: RowModel, size: int) -> Tensor:
    """Logits of `size` rows of the same token behind the same three, in groups of 1, 2, 5 and the rest."""
    ids = _probe_ids(rows)
    cache = Cache(1, 3)
    rows.step([PromptChunk(ids[:3], 0, cache)], [])
    groups = [1, 2, size - 3] if size < 16 else [1, 2, 5, size - 8]
    return rows.step([Draws(ids[3:4] * num, 3, cache.expanded(num, 3)) for num in groups], range(size))


def _choose_attention(rows: RowModel) -> bool:
    """Whether draws attend by torch's fused call. Raises Unavailable if neither way keeps rows apart.

    On a CPU in float32 the fused call (torch 2.13) splits its sums by the number of rows and of threads, and is no
    faster; in bfloat16 it does not, and takes a third of the time.
    """
    weight = next(rows.base.parameters())
    for fused in (False,) if not weight.is_cuda and weight.itemsize >= 4 else (True, False):
        fault = _attention_fault(rows, fused=fused)
        if fault is None:
            return fused
    raise Unavailable(fault or "")


def _attention_fault(rows: RowModel, *, fused: bool) -> str | None:
    """Rows that hold the same get the same from attention, among however many; else what was seen."""
    import torch

    config = rows.base.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    weight = next(rows.base.parameters())
    generator = torch.Generator().manual_seed(0)
    for length in PROBE_LENGTHS:
        shapes = ((config.num_attention_heads // heads, size), (length, size), (length, size))
        query, key, value = (
            torch.randn(1, heads, *shape, generator=generator).to(weight).repeat(PROBE_ROWS[-1], 1, 1, 1)
            for shape in shapes
        )
        alone = draws_attention(query[:1], key[:1], value[:1], None, fused=fused)
        for num in PROBE_ROWS:
            output = draws_attention(query[:num], key[:num], value[:num], None, fused=fused)
            if not torch.equal(output, alone.expand_as(output)):
                return f"attention of {num} rows to {length} tokens differs from that of one"
    return None


def _check_against(rows: RowModel, plain_TV: Tensor) -> None:
    """The model's own forward and ours agree, for a prompt in two chunks and a draw. Raises Unavailable."""
    import torch

    ids = _probe_ids(rows)
    cut, last = len(ids) // 2, len(ids) - 1
    with torch.inference_mode():
        cache = Cache(1, len(ids))
        first = rows.step([PromptChunk(ids[:cut], 0, cache)], range(cut))
        second = rows.step([PromptChunk(ids[cut:last], cut, cache)], range(last - cut))
        third = rows.step([Draws(ids[last:] * 2, last, cache.expanded(2, last))], [1])
    ours_TV = torch.log_softmax(torch.cat([first, second, third]), -1)
    best_T1 = plain_TV.argmax(-1, keepdim=True)
    gap = (ours_TV - plain_TV).gather(1, best_T1).abs().max().item()
    dtype = str(next(rows.base.parameters()).dtype).removeprefix("torch.")
    if not gap <= TOLERANCE[dtype]:
        raise Unavailable(f"computed by rows it differs from its own forward by {gap:.2g} nats")


def _probe_ids(rows: RowModel) -> list[int]:
    return _ids(rows.vocab_size)


def _ids(vocabulary: int) -> list[int]:
    return [(7 * i + 11) % vocabulary for i in range(9)]


def _plain_logprobs(model: Any) -> Tensor:
    """Log-probabilities [T, V] of the probe by the model's own forward."""
    import torch

    weight = model.get_output_embeddings().weight
    with torch.inference_mode():
        ids = torch.tensor([_ids(weight.shape[0])], device=weight.device)
        return torch.log_softmax(model(input_ids=ids, use_cache=False).logits[0].float(), -1)


class _OneLayer:
    """Within it a model whose layers all have the same shapes has only the first: kernels are chosen by shape."""

    def __init__(self, base: Any) -> None:
        self._owner = base.base_model
        self._layers = getattr(self._owner, "layers", None)

    def __enter__(self) -> None:
        layers = self._layers
        if layers is None or not hasattr(self._owner.config, "num_hidden_layers"):
            return
        shapes = [[(name, p.shape) for name, p in layer.named_parameters()] for layer in layers]
        if all(one == shapes[0] for one in shapes):
            self._owner.layers = layers[:1]

    def __exit__(self, *failure: Any) -> None:
        if self._layers is not None:
            self._owner.layers = self._layers
