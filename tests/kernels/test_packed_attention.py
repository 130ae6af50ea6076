"""packed_causal_attention against softmax written out, per sequence; and that nothing is quietly computed wrong."""

import math

import pytest
import torch

from strop.kernels.packed_attention import packed_attention_forward, packed_causal_attention


def reference(query, key, value, lengths, scaling=None, window=None):
    """Softmax over an explicit mask of the whole pack, heads repeated."""
    repeat = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(repeat, dim=1) for one in (key, value))
    owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(query.device)
    place = torch.arange(len(owner), device=query.device)
    distance = place[:, None] - place[None, :]
    visible = (owner[:, None] == owner[None, :]) & (distance >= 0)
    if window is not None:
        visible &= distance < window
    scores = query @ key.transpose(-1, -2) * (scaling or query.shape[-1] ** -0.5)
    return (scores.masked_fill(~visible, -math.inf).softmax(-1) @ value).transpose(1, 2)


def case(lengths, heads=4, kv_heads=2, size=8, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)

    def draw(num_heads):
        return torch.randn(1, num_heads, sum(lengths), size, generator=generator, dtype=dtype)

    return draw(heads), draw(kv_heads), draw(kv_heads)


@pytest.mark.parametrize("lengths", [[1], [7], [1, 1, 1], [5, 1, 9, 2], [3, 64, 33]])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (9, 3), (3, 1)])
def test_each_sequence_attends_to_itself_alone(lengths, heads, kv_heads):
    inputs = case(lengths, heads, kv_heads)
    ours = packed_causal_attention(*inputs, lengths)
    torch.testing.assert_close(ours, reference(*inputs, lengths), rtol=0, atol=1e-12)
    assert ours.shape == (1, sum(lengths), heads, 8)


def test_scaling_and_window():
    inputs = case([5, 12, 3])
    for options in ({"scaling": 0.7}, {"window": 4}, {"window": 1}, {"window": 12, "scaling": 0.1}):
        ours = packed_causal_attention(*inputs, [5, 12, 3], **options)
        torch.testing.assert_close(ours, reference(*inputs, [5, 12, 3], **options), rtol=0, atol=1e-12)


def test_gradients():
    inputs = tuple(one.requires_grad_() for one in case([3, 1, 4], size=4))
    assert torch.autograd.gradcheck(lambda *args: packed_causal_attention(*args, [3, 1, 4]), inputs)


DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
def test_bfloat16_error_is_no_larger_than_that_of_the_masked_form(device):
    lengths = [17, 40, 5]
    narrow = [one.bfloat16().to(device) for one in case(lengths)]
    truth = reference(*(one.double() for one in narrow), lengths)
    ours = (packed_causal_attention(*narrow, lengths).double() - truth).abs().max()
    naive = (reference(*narrow, lengths).double() - truth).abs().max()
    assert ours <= 1.5 * naive


def test_a_sequence_does_not_depend_on_its_neighbours():
    lengths = [6, 9]
    query, key, value = case(lengths)
    before = packed_causal_attention(query, key, value, lengths)
    for one in (query, key, value):
        one[:, :, :6] = torch.nan
    after = packed_causal_attention(query, key, value, lengths)
    assert torch.equal(before[:, 6:], after[:, 6:])


def test_lengths_must_fill_the_pack():
    with pytest.raises(ValueError, match="8 tokens in a pack of 9"):
        packed_causal_attention(*case([9]), [4, 4])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"packed_lengths": None}, "without packed_lengths"),
        ({"attention_mask": torch.zeros(1, 1, 4, 4)}, "attention_mask"),
        ({"softcap": 50.0}, "softcap"),
        ({"s_aux": torch.zeros(4)}, "s_aux"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
    ],
)
def test_attention_that_it_does_not_compute_is_refused(change, message):
    values = {"attention_mask": None, "packed_lengths": (4,), **change}
    mask = values.pop("attention_mask")
    with pytest.raises(ValueError, match=message):
        packed_attention_forward(torch.nn.Module(), *case([4]), mask, **values)


def test_the_form_that_transformers_calls_is_the_same_attention():
    inputs = case([4, 3])
    more = {"packed_lengths": (4, 3), "softcap": None}
    output, weights = packed_attention_forward(torch.nn.Module(), *inputs, None, 0.0, 0.5, **more)
    assert weights is None
    torch.testing.assert_close(output, packed_causal_attention(*inputs, [4, 3], scaling=0.5))
