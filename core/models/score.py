"""Log-probabilities of tokens that are already there, in packs without padding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.models.packing import pack

if TYPE_CHECKING:
    from torch import Tensor

    from strop.core.models.packed import OutputHead

    # Of the hidden states [T, H] that predict tokens, the output matrix and those tokens [T]: one number each [T].
    Measure = Callable[[Tensor, OutputHead, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """Tokens as a model saw them, and the half-open spans [start, end) of those to score; no span begins at 0."""

    token_ids: list[int]
    spans: list[tuple[int, int]]

    @property
    def positions(self) -> list[int]:
        """The positions to score, in order."""
        return [position for start, end in self.spans for position in range(start, end)]


def score_tokens(
    model: Any, sequences: Sequence[TokenSequence], *, temperature: float = 1.0, max_tokens_per_pack: int = 2048
) -> list[list[float]]:
    """Log-probabilities (nats, at `temperature`, over the whole vocabulary) of each sequence's spanned tokens.

    Sequences are sorted by length and packed one behind the other, at most `max_tokens_per_pack` tokens together (a
    longer one goes alone); hidden states of spanned tokens alone meet the output matrix, block by block, so the memory
    is bounded by the pack and not by tokens times vocabulary. Results come in the order of `sequences`. Raises
    ValueError for spans outside their sequence, Unavailable for a model that cannot be scored from hidden states.
    """

    def logprobs(hidden_TH: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
        from strop.kernels.linear_logprob import linear_logprob

        divisor = temperature * head.divisor
        return linear_logprob(hidden_TH, head.weight, targets, bias=head.bias, temperature=divisor)[0]

    return _measured(model, sequences, logprobs, max_tokens_per_pack)


def token_certainties(
    model: Any, sequences: Sequence[TokenSequence], *, max_tokens_per_pack: int = 2048
) -> list[list[float]]:
    """KL(U || p) (nats, temperature 1) of the distributions that predict each sequence's spanned tokens.

    Packing, memory and errors are those of `score_tokens`; kernels/self_certainty.py has the formula.
    """

    def certainty(hidden_TH: Tensor, head: OutputHead, targets: Tensor) -> Tensor:
        import torch

        from strop.kernels.linear_logprob import linear_logprob
        from strop.kernels.self_certainty import self_certainty

        # Any word will do: its logit less its log-probability is the normaliser.
        words = torch.zeros(len(hidden_TH), dtype=torch.int64, device=hidden_TH.device)
        more: Any = {"temperature": head.divisor, "bias": head.bias}
        (logprobs_T,) = linear_logprob(hidden_TH, head.weight, words, **more)
        return self_certainty(hidden_TH, head.weight, words, logprobs_T, **more)

    return _measured(model, sequences, certainty, max_tokens_per_pack)


def _measured(
    model: Any, sequences: Sequence[TokenSequence], measure: Measure, max_tokens_per_pack: int
) -> list[list[float]]:
    import torch

    from strop.core.models.packed import probe

    for i, sequence in enumerate(sequences):
        if any(not 1 <= start <= end <= len(sequence.token_ids) for start, end in sequence.spans):
            spans = f"sequence {i}: spans {sequence.spans} of {len(sequence.token_ids)} tokens"
            raise ValueError(f"{spans}; the first token has nothing before it that could predict it")
    results: list[list[float]] = [[] for _ in sequences]
    scored = [i for i, sequence in enumerate(sequences) if sequence.positions]
    limit = max_tokens_per_pack if scored and probe(model) else 0
    with torch.inference_mode():
        for places in pack([len(sequences[i].token_ids) for i in scored], limit):
            members = [scored[place] for place in places]
            values = _measure_pack(model, [sequences[i] for i in members], measure).tolist()
            for i in members:
                num = len(sequences[i].positions)
                results[i], values = values[:num], values[num:]
    return results


def _measure_pack(model: Any, sequences: Sequence[TokenSequence], measure: Measure) -> Tensor:
    import torch

    from strop.core.models.packed import hidden_states, output_head, packed_attention

    # The last token is only predicted, never fed.
    fed = [sequence.token_ids[: max(sequence.positions)] for sequence in sequences]
    rows: list[int] = []
    start = 0
    for sequence, ids in zip(sequences, fed, strict=True):
        rows.extend(start + position - 1 for position in sequence.positions)
        start += len(ids)
    head = output_head(model)
    with packed_attention(model):
        hidden_TH = hidden_states(model, fed)
    targets = torch.tensor([s.token_ids[p] for s in sequences for p in s.positions], device=hidden_TH.device)
    return measure(hidden_TH[rows].to(head.weight.dtype), head, targets)
