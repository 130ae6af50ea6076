"""linear_divergence against softmax written out in float64: values, gradients, limits, excluded words, memory."""

from itertools import product

import pytest
import torch

from strop.kernels.linear_divergence import DIVERGENCES, Softmax, linear_divergence

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
BLOCKS = [(1, 1), (3, 4), (7, 5), (64, 64)]


def log_softmax(side):
    logits = side.hidden @ side.weight.T + (0 if side.bias is None else side.bias)
    divisor = side.temperature[:, None] if isinstance(side.temperature, torch.Tensor) else side.temperature
    return torch.log_softmax(logits / divisor, -1)


def reference(student, teacher, divergence="forward", beta=0.5):
    log_q, log_p = log_softmax(student), log_softmax(teacher)
    q, p = log_q.exp(), log_p.exp()
    if divergence == "forward":
        return (p * (log_p - log_q)).sum(-1)
    if divergence == "reverse":
        return (q * (log_q - log_p)).sum(-1)
    log_m = (beta * p + (1 - beta) * q).log()
    return (beta * p * (log_p - log_m)).sum(-1) + ((1 - beta) * q * (log_q - log_m)).sum(-1)


def case(num_tokens=7, size=5, other_size=3, vocabulary=11, dtype=torch.float64, scale=1.0):
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return (torch.randn(*shape, generator=generator, dtype=torch.float64)).to(dtype)

    student = Softmax(draw(num_tokens, size) * scale, draw(vocabulary, size), draw(vocabulary))
    return student, Softmax(draw(num_tokens, other_size) * scale, draw(vocabulary, other_size), draw(vocabulary))


def with_grad(side, names=("hidden", "weight", "bias")):
    return side._replace(**{name: getattr(side, name).clone().requires_grad_() for name in names})


@pytest.mark.parametrize(("block_tokens", "block_vocab"), BLOCKS)
@pytest.mark.parametrize(("divergence", "beta"), [("forward", 0.5), ("reverse", 0.5), ("jsd", 0.5), ("jsd", 0.1)])
@pytest.mark.parametrize("temperature", [1.0, 1.1, "each"])
def test_values_and_gradients_equal_those_of_softmax(block_tokens, block_vocab, divergence, beta, temperature):
    student, teacher = case()
    if temperature == "each":
        temperature = torch.linspace(0.4, 3.0, 7, dtype=torch.float64)
    teacher = teacher._replace(temperature=2.0)
    upstream = torch.linspace(-1, 2, 7, dtype=torch.float64)
    found = []
    for function, blocks in (
        (linear_divergence, {"block_tokens": block_tokens, "block_vocab": block_vocab}), (reference, {})
    ):  # fmt: skip
        leaves = with_grad(student)._replace(temperature=temperature)
        value = function(leaves, teacher, divergence=divergence, beta=beta, **blocks)
        found.append((value, *torch.autograd.grad((value * upstream).sum(), leaves[:3])))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_gradients_are_those_of_finite_differences(divergence):
    student, teacher = case(num_tokens=3, size=2, vocabulary=6)
    leaves = with_grad(student)

    def values(*tensors):
        return linear_divergence(Softmax(*tensors), teacher, divergence=divergence, beta=0.3, block_vocab=4)

    assert torch.autograd.gradcheck(values, leaves[:3])


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("names", [("hidden",), ("weight",), ("bias",)])
def test_gradient_reaches_only_what_asks_for_it(divergence, names):
    student, teacher = case()
    teacher = with_grad(teacher)
    gradients = []
    for function in (linear_divergence, reference):
        leaves = with_grad(student, names)
        gradients.append(
            torch.autograd.grad(
                function(leaves, teacher, divergence=divergence).sum(), [getattr(leaves, name) for name in names]
            )
        )
    torch.testing.assert_close(*gradients, rtol=1e-10, atol=1e-12)
    assert not linear_divergence(student, teacher, divergence=divergence).requires_grad


def test_a_matrix_without_bias_that_is_tied_to_the_teachers():
    student, teacher = case(other_size=5)
    leaves = with_grad(student._replace(bias=None), ("hidden", "weight"))
    gradients = []
    for function in (linear_divergence, reference):
        value = function(leaves, Softmax(teacher.hidden, leaves.weight.detach()))
        gradients.append((value, *torch.autograd.grad(value.sum(), leaves[:2])))
    for mine, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("divergence", DIVERGENCES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_distributions_are_at_zero_and_at_rest(divergence, dtype):
    side = case(dtype=dtype, scale=4.0)[0]
    leaves = with_grad(side, ("hidden",))
    value = linear_divergence(leaves, side, divergence=divergence, block_vocab=4)
    (gradient,) = torch.autograd.grad(value.sum(), leaves.hidden)
    assert (value >= 0).all()
    assert value.max() < 100 * torch.finfo(dtype).eps
    assert gradient.abs().max() < 100 * torch.finfo(dtype).eps


def test_the_limits_of_the_generalised_form():
    student, teacher = case()
    for beta, scale, divergence in ((1e-7, 1e-7, "forward"), (1 - 1e-7, 1e-7, "reverse")):
        limit = linear_divergence(student, teacher, divergence="jsd", beta=beta) / scale
        torch.testing.assert_close(limit, linear_divergence(student, teacher, divergence=divergence), rtol=1e-4, atol=0)
    # Symmetric at one half, and at most log 2.
    one, other = (linear_divergence(*both, divergence="jsd") for both in ((student, teacher), (teacher, student)))
    torch.testing.assert_close(one, other)
    assert one.max() < 0.6932


@pytest.mark.parametrize(("divergence", "block_vocab"), product(DIVERGENCES, [4, 11]))
def test_words_that_both_exclude_change_nothing(divergence, block_vocab):
    student, teacher = case()
    without = [Softmax(side.hidden, side.weight[4:], side.bias[4:]) for side in (student, teacher)]
    for side in (student, teacher):
        side.bias[:4] = -torch.inf  # a whole block of four
    leaves = with_grad(student)
    value = linear_divergence(leaves, teacher, divergence=divergence, block_vocab=block_vocab)
    torch.testing.assert_close(value, reference(*without, divergence), rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(value.sum(), leaves[:3])
    assert all(one.isfinite().all() for one in gradients)
    assert not gradients[1][:4].any()


def test_a_word_that_only_one_side_excludes_is_finite():
    student, teacher = case()
    teacher.bias[2] = -torch.inf
    for divergence in DIVERGENCES:
        leaves = with_grad(student)
        value = linear_divergence(leaves, teacher, divergence=divergence)
        assert all(one.isfinite().all() for one in (value, *torch.autograd.grad(value.sum(), leaves[:3])))
    torch.testing.assert_close(  # 0 log 0 is 0
        linear_divergence(student, teacher), torch.nan_to_num(log_softmax(teacher).exp() * (
            log_softmax(teacher) - log_softmax(student))).sum(-1),
    )  # fmt: skip


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_error_is_no_larger_than_that_of_the_naive_form_in_the_same_dtype(divergence, dtype, device):
    exact = case(num_tokens=65, size=96, other_size=64, vocabulary=777)
    student, teacher = (Softmax(*(one.to(device, dtype) for one in side[:2])) for side in exact)
    # The exact answer for the rounded inputs: what is left is the error of the computation.
    wide = [Softmax(*(one.double() for one in side[:2])) for side in (student, teacher)]

    def outcome(function, student, teacher):
        leaves = with_grad(student, ("hidden", "weight"))
        value = function(leaves, teacher, divergence=divergence)
        return [one.double() for one in (value, *torch.autograd.grad(value.sum(), leaves[:2]))]

    truth = outcome(reference, *wide)
    errors = [
        [(mine - theirs).abs().max().item() for mine, theirs in zip(outcome(*tried), truth, strict=True)]
        for tried in ((linear_divergence, student, teacher), (reference, student, teacher))
    ]
    for mine, theirs in zip(*errors, strict=True):
        assert mine <= theirs * 1.5 + 1e-6
    assert errors[0][0] < 1e-3  # kept in float32 whatever the operands


def test_dtypes_of_the_two_sides_may_differ():
    student, teacher = case()
    narrow = Softmax(*(one.bfloat16() for one in student[:3]))
    leaves = with_grad(narrow)
    value = linear_divergence(leaves, teacher)
    assert value.dtype == torch.float64
    gradients = torch.autograd.grad(value.sum(), leaves[:3])
    assert {one.dtype for one in gradients} == {torch.bfloat16}
    wanted = reference(Softmax(*(one.double() for one in narrow[:3])), teacher)
    torch.testing.assert_close(value, wanted, rtol=0, atol=1e-5)


def test_no_more_than_a_block_of_logits_exists_at_a_time():
    student, teacher = case(num_tokens=256, size=8, other_size=8, vocabulary=4096, dtype=torch.float32)
    leaves = with_grad(student)
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
        value = linear_divergence(leaves, teacher, divergence="jsd", block_tokens=64, block_vocab=256)
        torch.autograd.backward(value.sum())
    assert largest <= max(64 * 256, student.weight.numel())
    assert student.weight.numel() < 256 * 4096


def test_no_tokens():
    student, teacher = (side._replace(hidden=side.hidden[:0]) for side in case())
    leaves = with_grad(student)
    value = linear_divergence(leaves, teacher)
    assert value.shape == (0,)
    assert not torch.autograd.grad(value.sum(), leaves[:3])[1].any()


@pytest.mark.parametrize(
    ("side", "change", "message"),
    [
        (1, {"weight": torch.zeros(12, 3, dtype=torch.float64), "bias": None}, "11 words, the teacher's 12"),
        (1, {"hidden": torch.zeros(6, 3, dtype=torch.float64)}, "6 of the teacher"),
        (0, {"weight": torch.zeros(11, 4, dtype=torch.float64)}, "the student's hidden"),
        (0, {"weight": torch.zeros(11, 5)}, "float32"),
        (1, {"bias": torch.zeros(10)}, "the teacher's bias"),
        (0, {"temperature": 0.0}, "positive"),
        (1, {"temperature": torch.ones(3)}, "temperatures"),
    ],
)
def test_what_does_not_fit_is_refused(side, change, message):
    sides = list(case())
    sides[side] = sides[side]._replace(**change)
    with pytest.raises(ValueError, match=message):
        linear_divergence(*sides)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"divergence": "kl"}, "none of"),
        ({"divergence": "jsd", "beta": 1.0}, "beta"),
        ({"block_vocab": 0}, "at least one"),
    ],
)
def test_options_without_a_meaning_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        linear_divergence(*case(), **options)
