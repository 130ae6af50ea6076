"""Scoring given tokens: equal to the plain model, whatever the packing, in bounded memory."""

import random

import pytest

from strop.core.models.load import load_model, resolve_model
from strop.core.models.score import TokenSequence, score_tokens, token_certainties


@pytest.fixture(scope="module")
def model(tiny_model):
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_model(resolve_model(str(tiny_model)), device="cpu", dtype="float32")
    torch.set_num_threads(before)


def plain_logprobs(model, sequence, temperature):
    """The whole sequence through the model, log_softmax in float64 over the whole vocabulary."""
    import torch

    with torch.inference_mode():
        logits = model(torch.tensor([sequence.token_ids])).logits[0].double() / temperature
    table = logits.log_softmax(-1)
    return [table[p - 1, sequence.token_ids[p]].item() for p in sequence.positions]


def some_sequences(seed, num, longest=60):
    rng = random.Random(seed)
    sequences = []
    for _ in range(num):
        length = rng.randint(2, longest)
        cuts = sorted(rng.sample(range(1, length + 1), min(4, length)))
        spans = list(zip(cuts[::2], cuts[1::2], strict=False))
        sequences.append(TokenSequence([rng.randrange(49152) for _ in range(length)], spans))
    return sequences


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("budget", [2048, 100, 1])
def test_any_packing_gives_the_plain_numbers(model, temperature, budget):
    sequences = some_sequences(3, 12)
    results = score_tokens(model, sequences, temperature=temperature, max_tokens_per_pack=budget)
    for sequence, values in zip(sequences, results, strict=True):
        assert values == pytest.approx(plain_logprobs(model, sequence, temperature), abs=2e-5)


def test_the_first_scored_token_and_the_last(model):
    """Off by one would take the neighbour's probability."""
    sequence = TokenSequence(list(range(40, 60)), [(1, 2), (19, 20)])
    (values,) = score_tokens(model, [sequence])
    assert values == pytest.approx(plain_logprobs(model, sequence, 1.0), abs=2e-5)
    assert len(values) == 2


def test_sequences_without_anything_to_score(model):
    assert score_tokens(model, []) == []
    nothing = TokenSequence([1, 2, 3], [])
    assert score_tokens(model, [nothing, TokenSequence([5], []), TokenSequence([1, 2], [(2, 2)])]) == [[], [], []]


@pytest.mark.parametrize("spans", [[(0, 2)], [(1, 4)], [(2, 1)]])
def test_spans_that_do_not_fit(model, spans):
    with pytest.raises(ValueError, match="sequence 1"):
        score_tokens(model, [TokenSequence([1, 2, 3], [(1, 2)]), TokenSequence([1, 2, 3], spans)])


def test_the_whole_table_of_logits_never_exists(model):
    """2,000 tokens by 49,152 words are 393 MB in float32; scoring them stays far below."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        bytes = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, tuple | list) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self.bytes = max(self.bytes, tensor.numel() * tensor.element_size())
            return result

    sequences = [TokenSequence([i % 49152 for i in range(s, s + 400)], [(1, 400)]) for s in range(5)]
    with Largest() as seen:
        score_tokens(model, sequences)
    assert 0 < seen.bytes < 50e6


@pytest.mark.parametrize("budget", [2048, 1])
def test_certainties_are_those_of_the_plain_model(model, budget):
    import math

    import torch

    sequences = some_sequences(5, 8)
    results = token_certainties(model, sequences, max_tokens_per_pack=budget)
    for sequence, values in zip(sequences, results, strict=True):
        with torch.inference_mode():
            table = model(torch.tensor([sequence.token_ids])).logits[0].double().log_softmax(-1)
        expected = [-math.log(table.shape[-1]) - table[p - 1].mean().item() for p in sequence.positions]
        assert values == pytest.approx(expected, abs=5e-5)


def test_scoring_leaves_the_model_as_it_was(model):
    import torch

    ids = torch.tensor([[1, 2, 3]])
    with torch.inference_mode():
        before = model(ids).logits
        score_tokens(model, some_sequences(1, 3))
        assert torch.equal(model(ids).logits, before)
    assert model.config._attn_implementation == "sdpa"
