"""The sampler against a plain reference, and against the distribution it claims to draw from."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from strop.core.engines.sampler import Uniforms, check_sampling, draw, logprobs_mode
from strop.core.errors import UsageError
from strop.core.records import Sampling


class Fixed:
    """Uniforms that are chosen by the test."""

    def __init__(self, value):
        self.value = value

    def next(self):
        return self.value


def reference_probs(logits, temperature=1.0, top_k=0, top_p=1.0):
    """The distribution to draw from: float64, one sort by (-probability, id), no tricks."""
    scaled = logits.astype(np.float64) / temperature
    probs = np.exp(scaled - scaled.max())
    probs /= probs.sum()
    order = sorted(range(len(probs)), key=lambda i: (-probs[i], i))
    order = order[: top_k or len(order)]
    if top_p < 1:
        total, mass, kept = sum(probs[i] for i in order), 0.0, []
        for i in order:
            kept.append(i)
            mass += probs[i]
            if mass >= top_p * total:
                break
        order = kept
    filtered = np.zeros_like(probs)
    filtered[order] = probs[order]
    return filtered / filtered.sum()


def some_logits(size, seed=0, scale=3.0):
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize(
    "options",
    [{}, {"temperature": 0.6}, {"temperature": 2.5}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.5},
     {"temperature": 1.7, "top_k": 40, "top_p": 0.9}],
)  # fmt: skip
@pytest.mark.parametrize("size", [50, 700])
def test_draws_follow_the_distribution(options, size):
    logits = some_logits(size)
    probs = reference_probs(logits, **options)
    uniforms = Uniforms(17)
    counts = np.zeros(size)
    num = 20_000
    for _ in range(num):
        counts[draw(logits, Sampling(**options), uniforms)[0]] += 1
    assert counts[probs == 0].sum() == 0
    # Tokens too rare for the test's approximation are taken together.
    common = probs * num >= 5
    observed, expected = counts[common], probs[common] * num
    rest = num - expected.sum()
    if rest > 1e-6:
        observed, expected = np.append(observed, counts[~common].sum()), np.append(expected, rest)
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=1, max_size=600), st.floats(0.05, 4), st.integers(0, 20),
    st.floats(0.01, 1), st.floats(0, 1, exclude_max=True),
)  # fmt: skip
def test_every_draw_has_mass_and_its_own_logprob(values, temperature, top_k, top_p, uniform):
    logits = np.array(values, dtype=np.float32)
    sampling = Sampling(temperature=temperature, top_k=top_k, top_p=top_p)
    token, logprob = draw(logits, sampling, Fixed(uniform))
    whole = reference_probs(logits, temperature)
    assert whole[token] > 0
    assert logprob == pytest.approx(math.log(whole[token]), abs=2e-6)
    # Within the reference's kept set, but for a token whose cumulative mass lies on the very border.
    if reference_probs(logits, temperature, top_k, top_p)[token] == 0:
        assert reference_probs(logits, temperature, top_k, min(1.0, top_p * (1 + 1e-5)))[token] > 0


@given(st.lists(st.floats(-20, 20, width=32), min_size=2, max_size=1000), st.floats(0, 1, exclude_max=True))
def test_the_inverse_cdf_is_the_reference_one(values, uniform):
    logits = np.array(values, dtype=np.float32)
    token, _ = draw(logits, Sampling(), Fixed(uniform))
    edges = np.concatenate([[0.0], reference_probs(logits).cumsum()])
    assert edges[token] - 1e-6 <= uniform <= edges[token + 1] + 1e-6


def test_equal_logits_are_cut_by_id():
    logits = np.zeros(10, dtype=np.float32)
    drawn = {draw(logits, Sampling(top_k=3), Fixed(u))[0] for u in np.linspace(0, 0.999, 200)}
    assert drawn == {0, 1, 2}
    drawn = {draw(logits, Sampling(top_p=0.45), Fixed(u))[0] for u in np.linspace(0, 0.999, 200)}
    assert drawn == {0, 1, 2, 3, 4}
    assert draw(logits, Sampling(temperature=0), Fixed(0.9)) == (0, pytest.approx(-math.log(10), abs=1e-6))


def test_the_last_token_of_a_block_and_none_without_mass():
    logits = np.full(1000, -np.inf, dtype=np.float32)
    logits[[255, 256, 511]] = 0
    top = np.nextafter(1.0, 0.0)
    assert {draw(logits, Sampling(), Fixed(u))[0] for u in (0.0, 0.3, 0.4, 0.7, top)} == {255, 256, 511}


def test_greedy_takes_no_uniform_and_speaks_of_temperature_one():
    logits = some_logits(300, seed=3)
    token, logprob = draw(logits, Sampling(temperature=0), None)
    assert token == logits.argmax()
    assert logprob == pytest.approx(math.log(reference_probs(logits)[token]), abs=1e-6)
    assert logprobs_mode(Sampling(temperature=0)) == "raw"
    assert logprobs_mode(Sampling(temperature=1)) == logprobs_mode(Sampling(top_p=0.5)) == "scaled"


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_logits_that_are_no_numbers_are_refused(bad):
    logits = some_logits(300)
    logits[200] = bad
    with pytest.raises(ValueError, match="largest logit"):
        draw(logits, Sampling(), Fixed(0.5))
    with pytest.raises(ValueError, match="largest logit"):
        draw(np.full(5, -np.inf, dtype=np.float32), Sampling(), Fixed(0.5))


def test_uniforms_belong_to_their_seed_and_place():
    first, again, other = ([Uniforms(seed).next() for _ in [0]] for seed in (5, 5, 6))
    assert first == again != other
    source = Uniforms(2**53 - 1)
    values = [source.next() for _ in range(5000)]
    twin = Uniforms(2**53 - 1)
    assert values == [twin.next() for _ in range(5000)]
    assert all(0 <= value < 1 for value in values)
    assert len(set(values)) == 5000
    assert chisquare(np.histogram(values, 50, (0, 1))[0]).pvalue > 1e-3
    # Neighbouring seeds are not shifted copies of each other.
    assert not set(values) & {value for source in [Uniforms(2**53 - 2)] for value in [source.next() for _ in range(99)]}


@pytest.mark.parametrize(
    "options",
    [{"temperature": -0.1}, {"temperature": math.nan}, {"temperature": math.inf}, {"top_p": 0.0}, {"top_p": 1.1},
     {"top_k": -1}, {"max_tokens": 0}, {"stop": [""]}],
)  # fmt: skip
def test_numbers_that_mean_nothing_are_refused(options):
    with pytest.raises(UsageError, match=next(iter(options)).replace("_", "-")):
        check_sampling(Sampling(**options))
