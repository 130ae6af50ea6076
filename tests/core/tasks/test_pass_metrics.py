"""pass@1, avg@k, pass@k: against enumeration, and their intervals."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import UsageError
from strop.core.tasks.pass_metrics import bootstrap_interval, parse_ks, pass_at_k, pass_estimates


def by_enumeration(attempts: int, successes: int, k: int) -> float:
    outcomes = [1] * successes + [0] * (attempts - successes)
    drawn = list(combinations(outcomes, k))
    return sum(any(sample) for sample in drawn) / len(drawn)


@given(st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))))
def test_pass_at_k_is_the_share_of_samples_with_a_success(case):
    assert pass_at_k(*case) == pytest.approx(by_enumeration(*case), abs=1e-12)


def test_pass_at_k_by_hand():
    assert pass_at_k(5, 1, 1) == pytest.approx(0.2)
    # 1 - C(3,2)/C(5,2) = 1 - 3/10
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 0, 5) == 0.0
    assert pass_at_k(5, 1, 5) == 1.0


def test_pass_at_k_is_not_the_plug_in_estimate():
    assert pass_at_k(8, 2, 4) == pytest.approx(1 - math.comb(6, 4) / math.comb(8, 4))
    assert pass_at_k(8, 2, 4) != pytest.approx(1 - (1 - 2 / 8) ** 4, abs=0.01)


def test_pass_at_k_of_many_attempts_neither_overflows_nor_cancels():
    exact = 1 - math.comb(20_000 - 3, 100) / math.comb(20_000, 100)
    assert pass_at_k(20_000, 3, 100) == pytest.approx(exact, rel=1e-9)


@pytest.mark.parametrize("case", [(4, 2, 5), (4, 5, 1), (4, 2, 0), (0, 0, 1)])
def test_pass_at_k_refuses_what_cannot_be_estimated(case):
    with pytest.raises(ValueError, match="pass@"):
        pass_at_k(*case)


def test_estimates_by_hand():
    tasks = [bytes([1, 0, 0, 0]), bytes([1, 1, 0, 1]), bytes([0, 0])]
    found = {item.name: item for item in pass_estimates(tasks, [1, 2, 4], seed=0)}
    assert list(found) == ["pass@1", "avg@2", "pass@2", "avg@4", "pass@4"]
    assert found["pass@1"].value == pytest.approx((0.25 + 0.75 + 0) / 3)
    assert (found["pass@1"].num_tasks, found["pass@1"].num_left_out) == (3, 0)
    # The first two attempts of each task.
    assert found["avg@2"].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert found["pass@2"].value == pytest.approx((0.5 + 1 + 0) / 3)
    assert (found["avg@4"].value, found["avg@4"].num_tasks, found["avg@4"].num_left_out) == (0.5, 2, 1)
    assert (found["pass@4"].value, found["pass@4"].num_left_out) == (1.0, 1)


def test_tasks_without_attempts_are_left_out_and_counted():
    found = pass_estimates([b"", bytes([1])], [2], seed=0)
    assert [(item.value, item.num_tasks, item.num_left_out) for item in found] == [
        (1.0, 1, 1), (None, 0, 2), (None, 0, 2),
    ]  # fmt: skip
    assert found[0].low is None


def test_no_tasks_no_value():
    (found,) = pass_estimates([], [1], seed=0)
    assert (found.value, found.low, found.high, found.num_tasks) == (None, None, None, 0)


def test_bootstrap_agrees_with_drawing_one_by_one():
    import numpy as np

    values = [0.0] * 40 + [0.25] * 10 + [0.5] * 5 + [1.0] * 5
    generator = np.random.default_rng(1)
    means = np.array(values)[generator.integers(0, len(values), (20_000, len(values)))].mean(axis=1)
    low, high = np.quantile(means, [0.025, 0.975])
    assert bootstrap_interval(values, seed=3) == pytest.approx((low, high), abs=0.01)


def test_bootstrap_covers_about_as_often_as_it_says():
    import numpy as np

    generator = np.random.default_rng(5)
    covered = 0
    for run in range(400):
        ends = bootstrap_interval(generator.beta(2, 2, 60).round(3).tolist(), seed=run, num_resamples=1000)
        assert ends is not None
        covered += ends[0] <= 0.5 <= ends[1]
    assert 0.90 <= covered / 400 <= 0.98


def test_bootstrap_is_the_same_for_the_same_seed_and_order_does_not_matter():
    values = [0.0, 0.5, 1.0, 1.0, 0.25]
    assert bootstrap_interval(values, 7) == bootstrap_interval(values[::-1], 7)
    assert bootstrap_interval(values, 7, 50) != bootstrap_interval(values, 8, 50)
    assert bootstrap_interval([0.5], 7) is None
    assert bootstrap_interval([1.0, 1.0], 7) == (1.0, 1.0)


@given(st.lists(st.binary(min_size=1, max_size=6).map(lambda b: bytes(x & 1 for x in b)), min_size=2, max_size=30))
def test_pass_at_k_grows_with_k_and_pass_at_1_is_the_mean_rate(tasks):
    found = {item.name: item for item in pass_estimates(tasks, [1], seed=0)}
    item = found["pass@1"]
    assert item.value == pytest.approx(sum(task.count(1) / len(task) for task in tasks) / len(tasks))
    assert item.low is not None
    assert item.high is not None
    assert 0 <= item.low <= item.high <= 1 + 1e-12
    for task in tasks:
        values = [pass_at_k(len(task), task.count(1), k) for k in range(1, len(task) + 1)]
        assert values == sorted(values)


@pytest.mark.parametrize("text", ["", "0", "1,,2", "a", "1,-2", "1.5"])
def test_bad_ks_are_usage_errors(text):
    with pytest.raises(UsageError, match="--k"):
        parse_ks(text)
