"""self_certainty beside the divergence from the uniform distribution written out in float64."""

import math

import pytest
import torch

from strop.kernels.linear_logprob import linear_logprob
from strop.kernels.self_certainty import self_certainty


def case(num_tokens=9, size=6, vocabulary=40, dtype=torch.float64):
    generator = torch.Generator().manual_seed(2)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return draw(num_tokens, size), draw(vocabulary, size) + 1, targets, draw(vocabulary)


def ours(hidden, weight, targets, temperature=1.0, bias=None):
    options = {"temperature": temperature, "bias": bias}
    return self_certainty(hidden, weight, targets, linear_logprob(hidden, weight, targets, **options)[0], **options)


def reference(hidden, weight, temperature=1.0, bias=None):
    log_p = torch.log_softmax((hidden @ weight.T + (0 if bias is None else bias)) / temperature, -1)
    uniform = 1 / weight.shape[0]
    return (uniform * (math.log(uniform) - log_p)).sum(-1)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6, "each"])
def test_it_is_the_divergence_from_uniform(with_bias, temperature):
    hidden, weight, targets, bias = case()
    bias = bias if with_bias else None
    divisor = temperature
    if temperature == "each":
        temperature = torch.linspace(0.4, 3.0, 9, dtype=torch.float64)
        divisor = temperature[:, None]
    found = ours(hidden, weight, targets, temperature, bias)
    torch.testing.assert_close(found, reference(hidden, weight, divisor, bias), rtol=0, atol=1e-12)


def test_which_token_was_sampled_does_not_matter():
    hidden, weight, targets, bias = case()
    one, other = (ours(hidden, weight, (targets + shift) % 40, bias=bias) for shift in (0, 7))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_inputs(dtype):
    hidden, weight, targets, _ = case(size=64, vocabulary=3000, dtype=dtype)
    found = ours(hidden, weight, targets)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), reference(hidden.double(), weight.double()), rtol=0, atol=1e-4)


def test_edges():
    hidden, weight, targets, bias = case()
    assert ours(hidden[:0], weight, targets[:0]).shape == (0,)
    assert not ours(hidden.requires_grad_(), weight, targets).requires_grad
    bias[next(word for word in range(40) if word not in targets)] = -torch.inf
    assert ours(hidden, weight, targets, bias=bias).tolist() == [math.inf] * 9
