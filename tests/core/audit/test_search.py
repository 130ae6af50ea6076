"""The linear program by hand, and the search over its bounds: seeds, thresholds that ask nothing and too much."""

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("scipy", reason="scipy is missing (extra audit)")

from strop.core.audit.fast import Fits, pair_foldings  # noqa: E402
from strop.core.audit.search import Program, lp_search  # noqa: E402


def leaky(num_pairs=80, shift=0.8, seed=0):
    """Pairs of two features of which the first is larger in right answers."""
    rows = np.random.default_rng(seed).normal(size=(num_pairs, 2, 2))
    rows[:, 0, 0] += shift
    return rows


def search(rows, threshold, groups=None, seed=0):
    groups = np.arange(len(rows)) if groups is None else groups
    return lp_search(rows, groups, threshold, num_foldings=10, evaluations=20, seed=seed)


def test_the_program_keeps_the_most_pairs_whose_mean_difference_is_within_bounds():
    differences = np.array([[1.0]] * 6 + [[-1.0]] * 3)
    assert len(Program(differences).solve(np.zeros(1), np.zeros(1))) == 6
    # n of +1 and 3 of -1: (n - 3) / (n + 3) <= 1/4 holds up to n = 5.
    assert len(Program(differences).solve(np.full(1, -0.25), np.full(1, 0.25))) == 8
    assert len(Program(differences).solve(np.full(1, -1.0), np.full(1, 1.0))) == 9


def test_the_program_keeps_nothing_where_every_difference_points_one_way():
    assert len(Program(np.ones((9, 1))).solve(np.zeros(1), np.zeros(1))) == 0


def test_a_search_meets_the_threshold_on_foldings_that_it_has_not_used():
    rows = leaky()
    found = search(rows, 0.56)
    assert 20 < len(found.keep) < 80
    assert (np.diff(found.keep) > 0).all()
    aucs = Fits(rows[found.keep]).aucs(pair_foldings(found.keep, 60, (0, 9)))
    assert aucs.mean() <= 0.57
    assert found.trajectory[0]["pairs"] == 80
    assert found.trajectory[-1] == {"pairs": len(found.keep), "auc": found.details["validation_auc"]}


def test_the_seed_decides_a_search():
    first, second = search(leaky(), 0.56, seed=3), search(leaky(), 0.56, seed=3)
    assert first.keep.tolist() == second.keep.tolist()
    assert first.details == second.details


def test_a_set_within_the_threshold_stays_whole():
    found = search(leaky(shift=0.0), 0.9)
    assert found.keep.tolist() == list(range(80))
    assert found.tried == 1


def test_a_threshold_that_no_set_keeps():
    assert search(leaky(), 0.1).keep is None


def test_a_leak_in_every_pair_leaves_nothing():
    rows = np.zeros((30, 2, 1))
    rows[:, 0] = 1.0
    assert search(rows, 0.53).keep is None


def test_identical_pairs_are_at_chance_and_stay():
    rows = np.repeat(np.random.default_rng(0).normal(size=(20, 1, 2)), 2, axis=1)
    assert len(search(rows, 0.5).keep) == 20


def test_constant_features_bound_nothing():
    rows = np.dstack([leaky(), np.ones((80, 2))])
    found = search(rows, 0.56)
    assert len(found.details["low"]) == 2
    assert found.keep.tolist() == search(leaky(), 0.56).keep.tolist()


def test_a_part_with_fewer_than_five_groups_is_no_set():
    """Pairs of two questions of six alone have no gap, so whoever does not look keeps just these."""
    rows, groups = np.zeros((60, 2, 1)), np.arange(60) % 6
    rows[groups < 4, 0] = 1.0
    assert search(rows, 0.53, groups).keep is None
