"""Rewards: T1's two examples, its variant and fallback, FrogNano's shaping, and the scale from data."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import UsageError
from strop.core.tasks.reports import Assertion
from strop.core.tasks.rewards import RewardRule, recommended_scale, reward_of


def some(passed, total):
    return [Assertion(f"t{i}", "passed" if i < passed else "failed") for i in range(total)]


@pytest.mark.parametrize(("passed", "total", "value"), [(10, 20, 0.5), (2, 4, 0.1), (0, 3, 0.0), (30, 30, 1.5)])
def test_assertions_over_a_fixed_scale(passed, total, value):
    """T1, section 2.2: T is not used, and a hard task can bring more than 1."""
    reward = reward_of(RewardRule("assertions"), passed == total, some(passed, total))
    assert reward.value == pytest.approx(value)
    assert (reward.source, reward.passed, reward.total, reward.cause) == ("report", passed, total, None)


@pytest.mark.parametrize("success", [True, False])
@pytest.mark.parametrize(
    ("assertions", "given", "cause"),
    [(None, None, "missing"), (None, "unparsable", "unparsable"), ([], None, "empty"), ([], "timeout", "timeout")],
)
@pytest.mark.parametrize("kind", ["assertions", "assertions-ratio"])
def test_without_a_usable_report_the_outcome_is_the_reward(kind, assertions, given, cause, success):
    reward = reward_of(RewardRule(kind), success, assertions, cause=given)
    assert (reward.value, reward.source, reward.cause) == (float(success), "outcome", cause)


@pytest.mark.parametrize(("passed", "total", "value"), [(2, 4, 0.2), (3, 4, 0.3), (4, 4, 1.0), (0, 4, 0.0)])
def test_the_variant_by_shares(passed, total, value):
    assert reward_of(RewardRule("assertions-ratio"), passed == total, some(passed, total)).value == pytest.approx(value)


@given(st.booleans(), st.integers(0, 12), st.integers(1, 12))
def test_the_variant_lies_between_the_outcome_and_one(success, passed, total):
    value = reward_of(RewardRule("assertions-ratio"), success, some(min(passed, total), total)).value
    assert float(success) <= value <= 1


def test_shaping_by_length():
    rule = RewardRule("pass", length_penalty=0.2, free_tokens=1000)
    values = [reward_of(rule, True, None, tokens=n).value for n in (10, 1000, 2000)]
    assert values == pytest.approx([1, 1, 1 - 0.2 * math.log(2)])
    # No floor is told: far beyond N_free a success is worth less than a failure.
    assert reward_of(rule, True, None, tokens=1000 * round(math.exp(6))).value < 0
    assert reward_of(rule, False, None, tokens=9999).value == 0


def test_a_success_that_was_cut_off():
    rule = RewardRule("pass", length_penalty=0.2, free_tokens=10, truncated=0.5)
    for stop, value in ("max_turns", 0.5), ("max_context", 0.5), ("length", 0.5), ("eos", 1 - 0.2 * math.log(10)):
        assert reward_of(rule, True, None, tokens=100, stop=stop).value == pytest.approx(value)
    assert reward_of(rule, False, None, stop="max_turns").value == 0


def test_the_scale_is_the_90th_percentile_of_tasks():
    assert recommended_scale([]) is None
    assert recommended_scale([5]) == 5
    assert recommended_scale(range(1, 11)) == pytest.approx(9.1)
    assert recommended_scale([3] * 95 + [40] * 5) == 3


@pytest.mark.parametrize(
    "how",
    [{"kind": "assertions", "scale": 0}, {"length_penalty": 0.1}, {"free_tokens": 5},
     {"kind": "assertions", "truncated": 0.5}, {"kind": "assertions-ratio", "length_penalty": 1, "free_tokens": 1}],
)  # fmt: skip
def test_rules_that_contradict_themselves(how):
    with pytest.raises(UsageError):
        RewardRule(**how)
