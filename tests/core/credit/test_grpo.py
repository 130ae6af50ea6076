"""Group advantages in plain Python: hand-computed values, properties, and the traps that neighbours fell into."""

import math
import statistics
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.credit.grpo import EPSILON, group_advantages, share_without_signal, zero_variance

REWARDS = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=40)


def test_golden_values_of_the_sheet():
    """gaca.md 2.9: rewards 10, 0, 0 of attempts with 3, 2 and 3 steps."""
    rewards = [10, 0, 0]
    assert group_advantages(rewards, std=False) == pytest.approx([6.6667, -3.3333, -3.3333], abs=5e-5)
    assert group_advantages(rewards) == pytest.approx([1.1547, -0.5774, -0.5774], abs=5e-5)
    rows = [3, 2, 3]
    assert group_advantages(rewards, std=False, weights=rows) == pytest.approx([6.25, -3.75, -3.75])
    assert group_advantages(rewards, weights=rows) == pytest.approx([1.2076, -0.7246, -0.7246], abs=5e-5)


def test_all_row_statistics_are_those_of_repeated_values():
    rewards, rows = [0.1, 0.7, 1.0, 0.4], [5, 1, 2, 9]
    spread = [r for r, n in zip(rewards, rows, strict=True) for _ in range(n)]
    mean, std = statistics.fmean(spread), statistics.stdev(spread)
    expected = [(r - mean) / (std + EPSILON) for r in rewards]
    assert group_advantages(rewards, weights=rows) == pytest.approx(expected, rel=1e-12)


def test_rloo_compares_with_the_mean_of_the_others():
    rewards = [1.0, 0.0, 0.5, 0.25]
    expected = [r - statistics.fmean(rewards[:i] + rewards[i + 1 :]) for i, r in enumerate(rewards)]
    assert group_advantages(rewards, std=False, baseline="rloo") == pytest.approx(expected, rel=1e-12)


def test_rloo_over_rows_leaves_whole_attempts_out():
    rewards, rows = [1.0, 0.0, 0.5], [2, 3, 1]
    others = [(0 * 3 + 0.5) / 4, (2 * 1.0 + 0.5) / 3, (2 * 1.0 + 0) / 5]
    found = group_advantages(rewards, std=False, baseline="rloo", weights=rows)
    assert found == pytest.approx([r - o for r, o in zip(rewards, others, strict=True)])


def test_eight_equal_rewards_give_exactly_zero():
    """float32 implementations give +0.029 for eight rewards of 0.3 at epsilon 1e-6."""
    for std in (True, False):
        for baseline in ("mean", "rloo"):
            assert group_advantages([0.3] * 8, std=std, baseline=baseline) == [0.0] * 8
            assert group_advantages([0.3] * 3, weights=[7, 1, 2], std=std, baseline=baseline) == [0.0] * 3


@pytest.mark.parametrize("baseline", ["mean", "rloo"])
def test_seven_equal_rewards_and_another_leave_no_residue(baseline):
    """NeMo-RL #4158: a leave-one-out deviation from E[x^2] - E[x]^2 is a rounding residue, the advantage -2,075."""
    rewards = [0.3] * 7 + [0.1 + 0.2 - 0.5]
    found = group_advantages(rewards, baseline=baseline)
    bound = (8 - 1) / math.sqrt(8) * (8 / 7 if baseline == "rloo" else 1)
    assert max(map(abs, found)) <= bound
    assert len(set(found[:7])) == 1
    assert math.isclose(found[7], -7 * found[0], rel_tol=1e-9)


def test_a_large_common_offset_does_not_matter():
    """E[x^2] - E[x]^2 would lose everything here; two passes lose nothing."""
    plain = group_advantages([0.0, 1.0, 0.0, 0.0])
    assert group_advantages([1e9, 1e9 + 1, 1e9, 1e9]) == pytest.approx(plain, rel=1e-9)


def test_a_group_of_one_is_zero_and_raw_under_verl():
    assert group_advantages([7.5]) == [0.0]
    assert group_advantages([7.5], std=False, raw_single=True) == [7.5]
    assert group_advantages([7.5], raw_single=True) == pytest.approx([7.5 / (1 + 1e-6)])
    # A second step makes a second value, whose statistics then rest on two.
    assert group_advantages([7.5], weights=[2], raw_single=True) == [0.0]


def test_no_members_and_an_unknown_baseline():
    assert group_advantages([]) == []
    with pytest.raises(ValueError, match="mean, rloo"):
        group_advantages([1, 2], baseline="median")


@given(REWARDS, st.booleans(), st.sampled_from(["mean", "rloo"]))
def test_advantages_of_a_group_sum_to_zero(rewards, std, baseline):
    found = group_advantages(rewards, std=std, baseline=baseline)
    assert all(map(math.isfinite, found))
    assert abs(math.fsum(found)) <= 1e-9 * (1 + math.fsum(map(abs, found)))


@given(REWARDS, st.randoms(), st.booleans())
def test_permutation_of_members_permutes_advantages(rewards, random, std):
    order = list(range(len(rewards)))
    random.shuffle(order)
    found = group_advantages(rewards, std=std)
    assert group_advantages([rewards[i] for i in order], std=std) == [found[i] for i in order]


@given(REWARDS)
def test_zero_variance_is_judged_on_raw_values(rewards):
    found = group_advantages(rewards)
    assert zero_variance(rewards) == (len(set(rewards)) == 1)
    if zero_variance(rewards):
        assert found == [0.0] * len(rewards)


@given(st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=20))
def test_no_advantage_is_larger_than_a_deviation_allows(rewards):
    """|r - mean| / std (ddof 1) is at most (n - 1)/sqrt(n): no residue is ever blown up."""
    bound = (len(rewards) - 1) / math.sqrt(len(rewards))
    assert all(abs(a) <= bound * (1 + 1e-9) for a in group_advantages(rewards))


def test_share_without_signal():
    """OpenRLHF #1250: 70 % at p = 0.18 and groups of two."""
    assert share_without_signal(0.18, 2) == pytest.approx(0.7048)
    assert share_without_signal(0.18, 1) == 1.0
    assert share_without_signal(0.0, 8) == share_without_signal(1.0, 8) == 1.0


def test_the_module_needs_no_numpy():
    code = "import sys, strop.core.credit.grpo, strop.core.credit.stream; sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
