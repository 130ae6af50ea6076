"""Elastic Horizon: the fixtures and the derived properties of its sheet (3.5), and the schedules beside it."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import UsageError
from strop.core.rollout.horizon import (
    PRESETS,
    Elastic,
    Planned,
    Rule,
    applied_cap,
    elastic_move,
    percentile,
    with_changes,
)

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=120)


@pytest.mark.parametrize(("start", "length", "after"), [(15, 12, 15.7), (50, 18, 47.8)])
def test_the_fixtures_of_the_sheet(start, length, after):
    move = Elastic(Rule(start=start)).step([length] * 20)
    assert move.after == pytest.approx(after, abs=1e-12)
    assert (move.before, move.percentile, move.target) == (start, length, length + 10)


@given(LENGTHS, st.floats(0, 100))
def test_the_percentile_is_numpys(values, q):
    assert percentile(values, q) == pytest.approx(float(np.percentile(values, q)), abs=1e-9)


def test_too_few_successes_hold_the_cap():
    schedule = Elastic()
    assert [schedule.step([9] * 19).reason, schedule.cap] == ["too few successes", 15]
    assert schedule.step([9]).reason == "followed"


def test_failures_never_enter_and_the_buffer_forgets():
    schedule = Elastic(Rule(window=3, min_successes=1))
    schedule.step([])
    assert (schedule.cap, list(schedule.lengths)) == (15, [])
    schedule.step([1, 2, 3, 4])
    assert list(schedule.lengths) == [2, 3, 4]


@given(st.floats(5, 50), st.lists(st.integers(1, 50), min_size=20, max_size=100))
def test_growth_comes_from_the_headroom_alone(cap, lengths):
    """Successes fit into the applied cap, so a step adds at most alpha (Delta + 0.5)."""
    rule = Rule()
    fitting = [min(length, applied_cap(cap, rule.low, rule.high)) for length in lengths]
    assert elastic_move(cap, fitting, rule).after <= cap + 0.1 * 10.5 + 1e-9
    still = Rule(headroom=0)
    assert elastic_move(cap, fitting, still).after <= cap + 0.1 * 0.5 + 1e-9


def test_from_10_to_28_takes_at_least_18_steps():
    schedule, steps = Elastic(Rule(start=10)), 0
    while schedule.cap < 28:
        schedule.step([schedule.applied] * 100)
        steps += 1
    assert steps >= 18


def test_without_headroom_the_cap_falls_to_what_succeeds():
    schedule = Elastic(Rule(headroom=0, start=50))
    caps = [schedule.step([min(18, schedule.applied)] * 20).after for _ in range(200)]
    assert caps == sorted(caps, reverse=True)
    assert caps[-1] == pytest.approx(18, abs=1e-6)


@pytest.mark.parametrize(("rate", "half_life"), [(0.1, 6.6), (0.2, 3.1)])
def test_the_distance_to_a_constant_target_decays_geometrically(rate, half_life):
    schedule = Elastic(Rule(start=50, rate=rate))
    gaps = [schedule.step([10] * 20).after - 20 for _ in range(30)]
    assert gaps == pytest.approx([30 * (1 - rate) ** (t + 1) for t in range(30)])
    assert math.log(0.5) / math.log(1 - rate) == pytest.approx(half_life, abs=0.05)


@given(st.floats(1, 60), st.lists(st.integers(1, 60), min_size=20, max_size=100), st.floats(0, 15))
def test_the_two_orders_differ_only_beyond_the_bounds(cap, lengths, headroom):
    paper, code = Rule(headroom=headroom), Rule(headroom=headroom, order="average-first")
    one, other = elastic_move(cap, lengths, paper), elastic_move(cap, lengths, code)
    inside = paper.low <= cap <= paper.high and paper.low <= one.target <= paper.high
    if inside:
        assert one.after == pytest.approx(other.after)
    assert paper.low <= other.after <= paper.high


def test_beyond_the_upper_bound_the_code_is_faster():
    paper = elastic_move(40, [50] * 20, Rule())
    code = elastic_move(40, [50] * 20, Rule(order="average-first"))
    assert (paper.after, code.after) == pytest.approx((41, 42))


def test_what_the_released_code_has():
    code = PRESETS["code"]
    assert (code.rate, code.headroom, code.window, code.min_successes, code.low, code.high) == (0.2, 2, 100, 10, 1, 64)
    assert [(rule.start, rule.headroom) for rule in map(PRESETS.get, ("code-appworld", "code-bfcl"))] == [
        (10, 3), (50, 10),
    ]  # fmt: skip
    assert [applied_cap(cap, 5, 50) for cap in (14.5, 15.5, 4.2, 70)] == [14, 16, 5, 50]


def test_the_order_within_a_step_matters_only_when_the_buffer_overflows():
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, 15, 100).tolist()
        assert Elastic().step(lengths).after == Elastic().step(sorted(lengths)).after


def test_schedules_by_the_clock():
    def caps(name, **more):
        schedule = Planned(name, Rule(), 8, **more)
        return [schedule.applied, *(applied_cap(schedule.step([9]).after, 1, 50) for _ in range(9))]

    assert caps("fixed") == [15] * 10
    assert caps("tti") == [15, 15, 20, 20, 30, 30, 50, 50, 50, 50]
    assert caps("scaling-inter") == [5, 11, 16, 22, 28, 33, 39, 44, 50, 50]
    assert caps("tti-code", epochs=4) == [15, 15, 30, 30, 45, 45, 50, 50, 50, 50]
    assert caps("scaling-code") == [15, 19, 28, 41, 50, 50, 50, 50, 50, 50]


@pytest.mark.parametrize(
    "changes",
    [{"low": 0}, {"low": 60}, {"rate": 0}, {"rate": 1.5}, {"percentile": 101}, {"min_successes": 101}, {"start": 0.5},
     {"headroom": math.inf}],
)  # fmt: skip
def test_constants_that_make_no_schedule(changes):
    with pytest.raises(UsageError):
        with_changes(Rule(), **changes)


def test_a_plan_without_length():
    with pytest.raises(UsageError, match="number of steps"):
        Planned("tti", Rule(), 0)
