"""linear_logprob against plain float64 log-softmax: values, entropy, gradients, shapes, precision, memory."""

import pytest
import torch

from strop.kernels.linear_logprob import linear_logprob

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BLOCKS = [(1, 1), (3, 4), (7, 5), (64, 64), (2, 1000)]


def reference(hidden, weight, targets, temperature=1.0, bias=None):
    logits = hidden @ weight.T + (0 if bias is None else bias)
    divisor = temperature[:, None] if isinstance(temperature, torch.Tensor) else temperature
    log_p = torch.log_softmax(logits / divisor, -1)
    entropy = -(log_p.exp() * log_p.clamp(min=-1e9)).sum(-1)
    return log_p.gather(1, targets[:, None]).squeeze(1), entropy


def case(num_tokens=7, size=5, vocabulary=11, dtype=torch.float64, scale=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = (torch.randn(num_tokens, size, generator=generator, dtype=torch.float64) * scale).to(dtype)
    weight = torch.randn(vocabulary, size, generator=generator, dtype=torch.float64).to(dtype)
    bias = torch.randn(vocabulary, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocabulary, (num_tokens,), generator=generator)
    return hidden, weight, bias, targets


@pytest.mark.parametrize(("block_tokens", "block_vocab"), BLOCKS)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.3, 2.5, "each"])
def test_values_equal_log_softmax(block_tokens, block_vocab, with_bias, temperature):
    hidden, weight, bias, targets = case()
    bias = bias if with_bias else None
    if temperature == "each":
        temperature = torch.linspace(0.4, 3.0, len(targets), dtype=torch.float64)
    ours = linear_logprob(
        hidden, weight, targets, temperature=temperature, bias=bias, block_tokens=block_tokens,
        block_vocab=block_vocab, return_entropy=True,
    )  # fmt: skip
    for mine, theirs in zip(ours, reference(hidden, weight, targets, temperature, bias), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("block_tokens", "block_vocab"), BLOCKS)
def test_gradients_of_hidden_weight_and_bias_are_those_of_finite_differences(block_tokens, block_vocab):
    hidden, weight, bias, targets = case(num_tokens=5, size=3)
    temperature = torch.linspace(0.5, 2.0, len(targets), dtype=torch.float64)
    leaves = tuple(one.requires_grad_() for one in (hidden, weight, bias))

    def both(hidden, weight, bias):
        return linear_logprob(
            hidden, weight, targets, temperature=temperature, bias=bias, block_tokens=block_tokens,
            block_vocab=block_vocab, return_entropy=True,
        )  # fmt: skip

    assert torch.autograd.gradcheck(both, leaves)


def test_gradient_equals_autograd_through_log_softmax_when_logits_are_large():
    hidden, weight, _, targets = case(num_tokens=33, size=16, vocabulary=257, scale=8.0)
    upstream = torch.linspace(-1, 1, 33, dtype=torch.float64)
    grads = []

    def blocked(*args):
        return linear_logprob(*args, block_vocab=50, block_tokens=10, return_entropy=True)

    for function in (blocked, reference):
        leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
        logprobs, entropy = function(*leaves, targets)
        grads.append(torch.autograd.grad((logprobs * upstream).sum() + (entropy * upstream.flip(0)).sum(), leaves))
    for mine, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)


def test_entropy_without_gradient_is_the_same_number_and_adds_nothing_to_the_gradient():
    hidden, weight, _, targets = case()
    hidden.requires_grad_()
    logprobs, entropy = linear_logprob(hidden, weight, targets, return_entropy=True, entropy_grad=False)
    assert not entropy.requires_grad
    torch.testing.assert_close(entropy, reference(hidden, weight, targets)[1], rtol=0, atol=1e-12)
    (mine,) = torch.autograd.grad(logprobs.sum(), hidden)
    (theirs,) = torch.autograd.grad(reference(hidden, weight, targets)[0].sum(), hidden)
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


def test_gradient_reaches_only_what_asks_for_it():
    hidden, weight, _, targets = case()
    weight.requires_grad_()
    (logprobs,) = linear_logprob(hidden, weight, targets)
    (mine,) = torch.autograd.grad(logprobs.sum(), weight)
    (theirs,) = torch.autograd.grad(reference(hidden, weight, targets)[0].sum(), weight)
    torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)
    with torch.no_grad():
        assert not linear_logprob(hidden, weight, targets)[0].requires_grad


def test_words_excluded_by_a_bias_of_minus_infinity_change_nothing_else():
    hidden, weight, bias, targets = case()
    bias[:4] = -torch.inf  # the whole first block of four
    targets = targets.clamp(min=4)
    ours = linear_logprob(hidden, weight, targets, bias=bias, block_vocab=4, return_entropy=True)
    for mine, theirs in zip(ours, reference(hidden, weight, targets, bias=bias), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-12)
    hidden.requires_grad_()
    logprobs, entropy = linear_logprob(hidden, weight, targets, bias=bias, block_vocab=4, return_entropy=True)
    (gradient,) = torch.autograd.grad((logprobs + entropy).sum(), hidden)
    assert gradient.isfinite().all()


def test_no_tokens_give_empty_results_and_zero_gradients():
    hidden, weight, _, _ = case()
    hidden, weight = hidden[:0].requires_grad_(), weight.requires_grad_()
    logprobs, entropy = linear_logprob(hidden, weight, torch.zeros(0, dtype=torch.long), return_entropy=True)
    assert logprobs.shape == entropy.shape == (0,)
    grads = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight))
    assert grads[0].shape == (0, 5)
    assert not grads[1].any()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_error_is_no_larger_than_that_of_the_naive_form_in_the_same_dtype(dtype, device):
    exact = [one.to(device) for one in case(num_tokens=65, size=96, vocabulary=777)]
    hidden, weight, _, targets = (one.to(dtype) if one.is_floating_point() else one for one in exact)
    # The exact answer for the rounded inputs: what is left is the error of the computation.
    truth_in = [one.double().requires_grad_() for one in (hidden, weight)]
    truth = reference(*truth_in, targets)[0]
    truth_grads = torch.autograd.grad(truth.sum(), truth_in)

    def error_of(function):
        leaves = [one.clone().requires_grad_() for one in (hidden, weight)]
        value = function(*leaves)
        grads = torch.autograd.grad(value.sum(), leaves)
        return [
            (mine.double() - theirs).abs().max().item()
            for mine, theirs in zip((value, *grads), (truth, *truth_grads), strict=True)
        ]

    ours = error_of(lambda hidden, weight: linear_logprob(hidden, weight, targets, block_vocab=100)[0])
    naive = error_of(
        lambda hidden, weight: torch.log_softmax((hidden @ weight.T).float(), -1).gather(1, targets[:, None]).squeeze(1)
    )
    for mine, theirs in zip(ours, naive, strict=True):
        assert mine <= theirs * 1.5 + 1e-6
    assert ours[0] < 1e-4  # kept in float32 whatever the operands


def test_result_dtypes():
    for dtype, expected in ((torch.float64, torch.float64), (torch.bfloat16, torch.float32)):
        hidden, weight, _, targets = case(dtype=dtype)
        hidden.requires_grad_()
        (logprobs,) = linear_logprob(hidden, weight, targets)
        assert logprobs.dtype == expected
        (gradient,) = torch.autograd.grad(logprobs.sum(), hidden)
        assert gradient.dtype == dtype


def test_no_more_than_a_block_of_logits_exists_at_a_time():
    hidden, weight, _, targets = case(num_tokens=256, size=8, vocabulary=4096, dtype=torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    block = 64 * 256
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for one in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(one, torch.Tensor):
                    largest = max(largest, one.untyped_storage().nbytes() // one.element_size())
            return result

    with Watch():
        logprobs, entropy = linear_logprob(
            hidden, weight, targets, block_tokens=64, block_vocab=256, return_entropy=True
        )
        torch.autograd.backward(logprobs.sum() + entropy.sum())
    assert largest <= max(block, weight.numel())
    assert weight.numel() < 256 * 4096


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"targets": torch.tensor([11] * 7)}, "outside the vocabulary"),
        ({"targets": torch.tensor([-1] * 7)}, "outside the vocabulary"),
        ({"targets": torch.tensor([1] * 6)}, "6"),
        ({"temperature": 0.0}, "positive"),
        ({"temperature": torch.ones(3)}, "temperatures"),
        ({"weight": torch.zeros(11, 4, dtype=torch.float64)}, "are not"),
        ({"weight": torch.zeros(11, 5)}, "float32"),
        ({"bias": torch.zeros(10)}, "bias"),
        ({"block_vocab": 0}, "at least one"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    hidden, weight, _, targets = case()
    values = {"hidden_TH": hidden, "weight_VH": weight, "targets_T": targets}
    names = {"targets": "targets_T", "weight": "weight_VH"}
    values.update({names.get(name, name): value for name, value in change.items()})
    with pytest.raises(ValueError, match=message):
        linear_logprob(**values)
