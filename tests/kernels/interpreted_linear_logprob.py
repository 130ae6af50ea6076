"""The Triton form of linear_logprob beside float64 log-softmax, in Triton's interpreter.

test_linear_logprob_triton.py runs this file in a process of its own: the interpreter is chosen when triton is imported.
"""

import pytest
import torch

from strop.kernels.linear_logprob import Wants, _blocked_sums, linear_logprob
from strop.kernels.linear_logprob_triton import triton_sums

# Less than a block on every axis; a little more than one, by a number that divides nothing; several parts.
SHAPES = [(7, 5, 11), (1, 1, 1), (131, 67, 261)]


def case(num_tokens, size, vocabulary, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    temperature = torch.rand(num_tokens, generator=generator) + 0.5
    return draw(num_tokens, size), draw(vocabulary, size) * size**-0.5 * 3, draw(vocabulary), targets, temperature


def reference(hidden, weight, bias, targets, temperature):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    log_p = torch.log_softmax(logits / temperature.double()[:, None], -1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
def test_values_and_all_gradients(shape, with_bias):
    hidden, weight, bias, targets, temperature = case(*shape)
    upstream = torch.linspace(-1, 2, shape[0])
    found = []
    for is_ours in (True, False):
        leaves = [one.clone().to(torch.float32 if is_ours else torch.float64).requires_grad_()
                  for one in (hidden, weight, bias)][: 3 if with_bias else 2]  # fmt: skip
        bias_leaf = leaves[2] if with_bias else None
        if is_ours:
            values = linear_logprob(
                *leaves[:2], targets, temperature=temperature, bias=bias_leaf, return_entropy=True, form="triton"
            )
        else:
            values = reference(*leaves[:2], bias_leaf, targets, temperature)
        loss = (values[0] * upstream).sum() + (values[1] * upstream.flip(0)).sum()
        found.append([one.detach().double() for one in (*values, *torch.autograd.grad(loss, leaves))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)  # float32 beside float64


@pytest.mark.parametrize("num_parts", [1, 2, 3, 50])
def test_the_split_of_the_vocabulary_changes_nothing(num_parts):
    hidden, weight, bias, targets, temperature = case(9, 6, 700)
    bias[:300] = -torch.inf  # whole blocks, and with three parts or more a whole part
    for wants in (Wants(False, False, False), Wants(True, False, False), Wants(False, True, False), Wants(*[True] * 3)):
        inputs = (hidden, weight, bias, targets.clamp(min=300), temperature.reciprocal(), wants)
        for mine, theirs in zip(triton_sums(*inputs, num_parts=num_parts), _blocked_sums(*inputs, 4096), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def test_a_matrix_and_states_that_lie_transposed_are_read_where_they_lie():
    hidden, weight, _, targets, temperature = case(9, 6, 40)
    straight = linear_logprob(hidden, weight, targets, temperature=temperature, form="triton")
    turned = (hidden.T.contiguous().T, weight.T.contiguous().T)
    assert torch.equal(straight[0], linear_logprob(*turned, targets, temperature=temperature, form="triton")[0])


def test_narrow_operands_are_no_worse_than_the_naive_form():
    # Not bfloat16: the interpreter multiplies its bits as if they were whole numbers.
    hidden, weight, _, targets, _ = case(65, 96, 777, torch.float16)
    truth_in = [one.double().requires_grad_() for one in (hidden, weight)]
    truth = reference(*truth_in, None, targets, torch.ones(65))[0]
    truth_gradient = torch.autograd.grad(truth.sum(), truth_in)[0]

    def naive(hidden):
        return torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)

    def error_of(function):
        leaf = hidden.clone().requires_grad_()
        value = function(leaf)
        (gradient,) = torch.autograd.grad(value.sum(), leaf)
        return [(value - truth).abs().max().item(), (gradient - truth_gradient).abs().max().item()]

    ours = error_of(lambda hidden: linear_logprob(hidden, weight, targets, form="triton")[0])
    assert ours[0] < 1e-4  # kept in float32 whatever the operands
    assert ours[1] <= error_of(naive)[1] * 1.5 + 1e-6
