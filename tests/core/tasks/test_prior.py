"""Beta mixtures: the incomplete Beta function, posteriors, and the fit whose constants are the default prior."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import UsageError
from strop.core.tasks.prior import (
    MAX_CONCENTRATION,
    TERMINAL,
    UNIFORM,
    BetaMixture,
    fit_mixture,
    incomplete_beta,
    parse_components,
)

COUNTS = Path(__file__).resolve().parents[2] / "data" / "terminal-trials" / "counts.jsonl"
shapes = st.floats(0.01, 200)


def terminal_counts() -> Counter:
    counts: Counter = Counter()
    for line in COUNTS.read_text().splitlines():
        row = json.loads(line)
        counts[row["successes"], row["attempts"]] += row["tasks"]
    return counts


@given(shapes, shapes, st.floats(1e-9, 1 - 1e-9))
def test_incomplete_beta_agrees_with_scipy(a, b, x):
    from scipy.special import betainc

    assert incomplete_beta(a, b, x) == pytest.approx(betainc(a, b, x), abs=1e-11)


def test_incomplete_beta_by_hand():
    # Uniform: x itself. Beta(2, 1): x^2. Beta(1, 3): 1 - (1-x)^3.
    assert incomplete_beta(1, 1, 0.3) == pytest.approx(0.3, abs=1e-14)
    assert incomplete_beta(2, 1, 0.3) == pytest.approx(0.09, abs=1e-14)
    assert incomplete_beta(1, 3, 0.3) == pytest.approx(1 - 0.7**3, abs=1e-14)
    assert (incomplete_beta(2, 3, 0), incomplete_beta(2, 3, 1)) == (0, 1)


def test_posterior_regions_by_hand():
    # After 1 of 1 the uniform prior is Beta(2, 1), whose distribution function is x^2.
    assert UNIFORM.regions(1, 1, (0.2, 0.8)) == pytest.approx((0.04, 0.6, 0.36))
    mixture = BetaMixture(((0.5, 1, 1), (0.5, 2, 1)), "two")
    # Sequence probabilities 1/2 and 2/3, so weights 3/7 and 4/7 of Beta(2, 1) and Beta(3, 1).
    below = 3 / 7 * 0.2**2 + 4 / 7 * 0.2**3
    assert mixture.regions(1, 1, (0.2, 0.8))[0] == pytest.approx(below)


@given(st.integers(0, 12), st.sampled_from([TERMINAL, UNIFORM, BetaMixture(((0.3, 2, 5), (0.7, 9, 1)), "x")]))
def test_a_sequence_is_worth_the_sum_of_its_continuations(attempts, prior):
    cuts = (0.2, 0.8)
    now, later = prior.masses(attempts, cuts), prior.masses(attempts + 1, cuts)
    for successes, regions in enumerate(now):
        assert regions == pytest.approx([f + g for f, g in zip(later[successes], later[successes + 1], strict=True)])
        assert math.fsum(regions) == pytest.approx(math.exp(prior.log_sequence(successes, attempts - successes)))


def test_probabilities_of_counts_sum_to_one():
    assert math.fsum(TERMINAL.probability(s, 5) for s in range(6)) == pytest.approx(1)


def test_the_default_prior_is_the_fit_to_the_trials():
    counts = terminal_counts()
    assert sum(counts.values()) == 712
    assert sum(n * tasks for (_, n), tasks in counts.items()) == 3505
    fitted = fit_mixture(counts)
    for mine, theirs in zip(fitted.components, TERMINAL.components, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-4)


def test_the_fit_is_a_maximum_that_scipy_does_not_beat():
    import numpy as np
    from scipy.optimize import minimize
    from scipy.special import betaln, logsumexp

    counts = terminal_counts()
    s, n, tasks = (np.array(column) for column in zip(*((s, n, t) for (s, n), t in counts.items()), strict=True))

    def loss(point):
        weight = 1 / (1 + math.exp(-point[0]))
        logs = []
        for share, mean, size in ((weight, point[1], point[2]), (1 - weight, point[3], point[4])):
            mean, size = 1 / (1 + math.exp(-mean)), MAX_CONCENTRATION / (1 + math.exp(-size))
            a, b = mean * size, (1 - mean) * size
            logs.append(math.log(share) + betaln(a + s, b + n - s) - betaln(a, b))
        return -(tasks * logsumexp(logs, axis=0)).sum()

    starts = np.random.default_rng(0).normal(0, 1.5, (12, 5))
    bounds = [(-6, 6), (-6, 6), (-6, 12), (-6, 6), (-6, 6)]
    best = min(minimize(loss, start, method="L-BFGS-B", bounds=bounds).fun for start in starts)
    ours = -math.fsum(t * TERMINAL.log_sequence(s, n - s) for (s, n), t in counts.items())
    assert ours <= best + 1e-3


def test_a_fit_finds_the_mixture_that_made_the_counts():
    import numpy as np

    generator = np.random.default_rng(11)
    rates = np.where(generator.random(6000) < 0.6, generator.beta(1, 12, 6000), generator.beta(6, 2, 6000))
    counts = Counter((int(s), 16) for s in generator.binomial(16, rates))
    fitted = fit_mixture(counts)
    (w1, a1, b1), (_, a2, b2) = fitted.components
    assert w1 == pytest.approx(0.6, abs=0.03)
    assert a1 / (a1 + b1) == pytest.approx(1 / 13, abs=0.01)
    assert a2 / (a2 + b2) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("counts", [{(0, 8): 10}, {(8, 8): 1}, {(4, 8): 3}, {(1, 2): 1, (0, 0): 5}])
def test_degenerate_counts_still_give_a_proper_prior(counts):
    fitted = fit_mixture(counts)
    assert math.fsum(weight for weight, _, _ in fitted.components) == pytest.approx(1)
    assert all(min(component) > 0 for component in fitted.components)
    assert all(a + b <= MAX_CONCENTRATION * 1.001 for _, a, b in fitted.components)


def test_nothing_cannot_be_fitted():
    with pytest.raises(ValueError, match="no attempts"):
        fit_mixture({(0, 0): 3})


def test_parsing_components():
    assert parse_components("3:1:2,1:4:5").components == ((0.75, 1.0, 2.0), (0.25, 4.0, 5.0))


@pytest.mark.parametrize("text", ["1:2", "1:2:x", "0:1:1", "1:-1:2", "1:1:1,", "1:inf:1"])
def test_bad_components_are_usage_errors(text):
    with pytest.raises(UsageError, match="--prior"):
        parse_components(text)
