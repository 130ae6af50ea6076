"""Hidden states of packed sequences, and the output matrix they meet: what training and scoring share.

Sequences lie one behind the other in one row; position ids restart, and each sequence attends to itself alone
(`kernels/packed_attention`). A model whose logits are not a plain product of hidden state and matrix, or that mixes
tokens by other means than attention, is found by a probe and never computed wrong.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.errors import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

ATTENTION_NAME = "strop_packed"
# Where a model keeps what `probe` found.
FOUND = "_strop_can_pack"
# Kinds of layers whose attention the packed one computes at any length; the probe is short and cannot tell.
PACKED_LAYERS = {"full_attention", "sliding_attention"}
# A model computed in bfloat16 differs between batch shapes by about this much in log-probability (nats).
PROBE_TOLERANCE = {"float64": 1e-4, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The output matrix [V, H] with its bias [V]; logits = (hidden @ weight.T + bias) / divisor."""

    weight: Tensor
    bias: Tensor | None
    divisor: float


def output_head(model: Any) -> OutputHead:
    """The output matrix of a causal model (peft-wrapped or not). Raises Unavailable where logits are not linear."""
    base, config = _base(model), _base(model).config
    if getattr(config, "final_logit_softcapping", None):
        raise Unavailable(f"{config.model_type}: capped output logits are not supported by packed scoring and training")
    head = base.get_output_embeddings()
    if head is None or not hasattr(head, "weight"):
        raise Unavailable(f"{config.model_type}: the model has no output matrix of its own")
    divisor = float(getattr(config, "logits_scaling", None) or 1.0) / float(getattr(config, "logit_scale", None) or 1.0)
    return OutputHead(head.weight, getattr(head, "bias", None), divisor)


@contextmanager
def packed_attention(model: Any) -> Iterator[None]:
    """Within it the model attends within packed sequences; leaving it restores the attention it had.

    A model that `probe` found unfit keeps its own attention, and `hidden_states` then takes sequences one at a time.
    """
    from transformers import AttentionInterface

    from strop.kernels.packed_attention import packed_attention_forward

    base = _base(model)
    if not getattr(base, FOUND, True):
        yield
        return
    AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
    before = base.config._attn_implementation
    base.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


def hidden_states(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Last hidden states [T, H] (after the final norm) of the sequences, in order; inside `packed_attention(model)`.

    T is the sum of the lengths. No sequence may be empty.
    """
    import torch

    base = _base(model)
    if base.config._attn_implementation != ATTENTION_NAME and len(sequences) > 1:
        return torch.cat([hidden_states(model, [sequence]) for sequence in sequences])
    device = base.get_input_embeddings().weight.device
    lengths = tuple(len(sequence) for sequence in sequences)
    ids = torch.tensor([[token for sequence in sequences for token in sequence]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    packed = {"packed_lengths": lengths} if base.config._attn_implementation == ATTENTION_NAME else {}
    output = base.base_model(input_ids=ids, position_ids=positions, use_cache=False, **packed)
    return output.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]


def probe(model: Any) -> bool:
    """Whether packing changes nothing for this model: two short sequences are computed packed and by the model itself.

    False: sequences go one at a time, with the model's own attention (models that mix tokens by other means, or whose
    attention is of a kind the packed one does not compute). The answer is kept with the model. Raises Unavailable if
    even hidden states and output matrix give other log-probabilities than the model.
    """
    import torch

    base = _base(model)
    known = getattr(base, FOUND, None)
    if known is not None:
        return bool(known)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            found = _probe(model)
    finally:
        model.train(training)
    setattr(base, FOUND, found)
    return found


def _probe(model: Any) -> bool:
    base = _base(model)
    weight = base.get_input_embeddings().weight
    sequences = [[(7 * i + 3 * j + 11) % weight.shape[0] for j in range(5 + i)] for i in range(2)]
    tolerance = PROBE_TOLERANCE[str(weight.dtype).removeprefix("torch.")]
    targets = [token for sequence in sequences for token in sequence]
    # Any target will do on both sides; the last token of a sequence has no successor of its own.
    targets = targets[1:] + targets[:1]
    plain = _plain_logprobs(model, sequences, targets)
    if set(getattr(base.config, "layer_types", None) or ()) <= PACKED_LAYERS:
        try:
            with packed_attention(model):
                packed = _packed_logprobs(model, sequences, targets)
            if float((packed - plain).abs().max()) <= tolerance:
                return True
        except (ValueError, TypeError, KeyError, RuntimeError):
            # The model does not hand the lengths on, or its attention is of another kind.
            pass
    gap = float((_packed_logprobs(model, sequences, targets) - plain).abs().max())
    if gap > tolerance:
        name = base.config.model_type
        raise Unavailable(f"{name}: log-probabilities from hidden states differ from the model's own by {gap:.2g}")
    return False


def _packed_logprobs(model: Any, sequences: list[list[int]], targets: list[int]) -> Tensor:
    import torch

    from strop.kernels.linear_logprob import linear_logprob

    head = output_head(model)
    hidden = hidden_states(model, sequences).to(head.weight.dtype)
    targets_T = torch.tensor(targets, device=hidden.device)
    return linear_logprob(hidden, head.weight, targets_T, bias=head.bias, temperature=head.divisor)[0]


def _plain_logprobs(model: Any, sequences: list[list[int]], targets: list[int]) -> Tensor:
    import torch

    base = _base(model)
    device = base.get_input_embeddings().weight.device
    rows = [base(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0] for ids in sequences]
    logits = torch.cat(rows)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.log_softmax(-1).gather(1, torch.tensor(targets, device=device)[:, None]).squeeze(1)


def _base(model: Any) -> Any:
    """The transformers model below a peft wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
