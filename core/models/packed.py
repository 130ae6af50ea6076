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
# A model computed in bfloat16 differs between batch shapes by about this much in log-probability (nats).
PROBE_TOLERANCE = {"float64": 1e-6, "float32": 1e-3, "bfloat16": 0.25, "float16": 0.1}


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
    """Within it the model attends within packed sequences; leaving it restores the attention it had."""
    from transformers import AttentionInterface

    from strop.kernels.packed_attention import packed_attention_forward

    AttentionInterface.register(ATTENTION_NAME, packed_attention_forward)
    base = _base(model)
    before = base.config._attn_implementation
    base.set_attn_implementation(ATTENTION_NAME)
    try:
        yield
    finally:
        base.set_attn_implementation(before)


def hidden_states(model: Any, sequences: Sequence[Sequence[int]]) -> Tensor:
    """Last hidden states [T, H] (after the final norm) of the sequences, packed; inside `packed_attention(model)`.

    T is the sum of the lengths, in the order given. No sequence may be empty.
    """
    import torch

    base = _base(model)
    device = base.get_input_embeddings().weight.device
    lengths = tuple(len(sequence) for sequence in sequences)
    ids = torch.tensor([[token for sequence in sequences for token in sequence]], device=device)
    positions = torch.cat([torch.arange(length, device=device) for length in lengths])[None]
    output = base.base_model(input_ids=ids, position_ids=positions, use_cache=False, packed_lengths=lengths)
    return output.last_hidden_state.squeeze(0)  # type: ignore[no-any-return]


def probe(model: Any) -> bool:
    """Whether packing changes nothing for this model; two short sequences are computed packed and by the model itself.

    False: pack one sequence at a time. Raises Unavailable if even a single sequence comes out different, since the
    model then cannot be trained or scored from its hidden states.
    """
    import torch

    from strop.kernels.linear_logprob import linear_logprob

    vocabulary = _base(model).get_input_embeddings().weight.shape[0]
    sequences = [[(7 * i + 3 * j + 11) % vocabulary for j in range(5 + i)] for i in range(2)]
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            plain = torch.cat([_plain_logprobs(model, sequence) for sequence in sequences])
            head = output_head(model)
            for packs in ([sequences], [[sequence] for sequence in sequences]):
                with packed_attention(model):
                    hidden = torch.cat([hidden_states(model, pack) for pack in packs])
                targets = torch.tensor([token for sequence in sequences for token in sequence], device=hidden.device)
                # The last token of a sequence has no successor of its own; any target will do on both sides.
                (ours,) = linear_logprob(
                    hidden, head.weight, targets.roll(-1), bias=head.bias, temperature=head.divisor
                )
                gap = (ours - _roll_targets(plain, targets)).abs().max().item()
                if gap <= PROBE_TOLERANCE[str(hidden.dtype).removeprefix("torch.")]:
                    return len(packs) == 1
    except ValueError as error:
        raise Unavailable(f"{_base(model).config.model_type}: {error}") from None
    finally:
        model.train(training)
    name = _base(model).config.model_type
    raise Unavailable(f"{name}: log-probabilities from hidden states differ from the model's own by {gap:.2g}")


def _plain_logprobs(model: Any, sequence: list[int]) -> Tensor:
    import torch

    device = _base(model).get_input_embeddings().weight.device
    logits = _base(model)(input_ids=torch.tensor([sequence], device=device), use_cache=False).logits
    return torch.log_softmax(logits[0].float(), -1)


def _roll_targets(logprobs: Tensor, targets: Tensor) -> Tensor:
    return logprobs.gather(1, targets.roll(-1)[:, None]).squeeze(1)


def _base(model: Any) -> Any:
    """The transformers model below a peft wrapper."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model
