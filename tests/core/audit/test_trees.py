"""What trees see and a linear probe does not, and the two ways to a set that trees cannot read."""

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

from strop.core.audit import trees  # noqa: E402
from strop.core.audit.trees import (  # noqa: E402
    linear_auc,
    margin_prune,
    mean_auc,
    program_prune,
    prune_both,
    step_columns,
    tree_audits,
    worst_auc,
)

GROUPS = np.arange(120)


@pytest.fixture(autouse=True)
def few_foldings(monkeypatch):
    """Trees take a third of a second for one folding or two; the sets here are plain enough for that."""
    monkeypatch.setattr(trees, "SEARCH_FOLDINGS", 1)
    monkeypatch.setattr(trees, "NUM_FOLDINGS", 2)
    monkeypatch.setattr(trees, "ROUND_SHARE", 0.1)


@pytest.fixture(scope="module")
def rows():
    """Right answers lie at the middle of one feature, wrong ones at both ends: no mean difference, but a shape."""
    random = np.random.default_rng(0)
    rows = random.normal(size=(120, 2, 2)) * 0.3
    rows[:, 1, 0] += np.where(np.arange(120) % 2, 1.0, -1.0)
    # Of forty pairs the two sides are drawn alike: what can be kept.
    rows[80:, 0] = random.normal(size=(40, 2))
    rows[80:, 1] = random.normal(size=(40, 2))
    return rows


def tree_auc(rows, keep):
    return mean_auc(tree_audits(rows[keep], GROUPS[keep], 3, 7))


def test_trees_read_a_shape_that_the_linear_probe_cannot(rows):
    assert linear_auc(rows, GROUPS, 0) < 0.55
    assert tree_auc(rows, GROUPS) > 0.75
    assert worst_auc(rows, GROUPS, 0) > 0.75


def test_pruning_by_margins(rows):
    found = margin_prune(rows, GROUPS, 0.6, 0)
    assert tree_auc(rows, found.keep) < 0.7
    assert set(found.keep) < set(range(120))
    sizes = [point["pairs"] for point in found.trajectory]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[-1] == len(found.keep)
    assert margin_prune(rows, GROUPS, 0.6, 0).keep.tolist() == found.keep.tolist()


def test_margins_keep_a_set_that_trees_cannot_read_whole():
    even = np.random.default_rng(1).normal(size=(40, 2, 2))
    assert margin_prune(even, np.arange(40), 0.9, 0).keep.tolist() == list(range(40))


def test_margins_stop_before_fewer_than_five_groups():
    separate = np.zeros((60, 2, 1))
    separate[:, 0] = 1.0
    found = margin_prune(separate, np.arange(60) % 6, 0.3, 0)
    assert found.keep is None
    assert found.trajectory[-1]["pairs"] >= 5


def test_columns_of_steps_and_of_pairs_of_steps():
    rows = np.zeros((40, 2, 2))
    rows[:20, 0, 0] = rows[:, 1, 1] = 1.0
    columns = step_columns(rows)
    # Feature 0 (a quarter of all rows), feature 1 (half of them), no quartile of feature 0 below 1 but 0 itself.
    assert columns.shape[0] == 40
    assert np.unique(columns[:, 0]).tolist() == pytest.approx([0, 1 / rows[:, :, 0].std()])
    assert (columns[:, 1] == -1 / rows[:, :, 1].std()).all()


def test_the_program_over_steps(rows):
    found = program_prune(rows, GROUPS, 0.62, 0)
    assert 5 <= len(found.keep) < 120
    assert worst_auc(rows[found.keep], GROUPS[found.keep], 0) <= 0.62


def test_both_ways_and_the_larger_set_wins(rows):
    found = prune_both(rows, GROUPS, 0.62, evaluations=20, seed=0)
    assert worst_auc(rows[found.keep], GROUPS[found.keep], 0) <= 0.62
    assert len(found.keep) == max(size or 0 for size in found.details.values())
    assert set(found.details) == {"by_program", "by_margin"}


def test_neither_way_meets_a_threshold_that_is_too_low():
    separate = np.zeros((40, 2, 1))
    separate[:, 0] = 1.0
    found = prune_both(separate, np.arange(40), 0.3, evaluations=4, seed=0)
    assert found.keep is None
    assert found.details == {"by_program": None, "by_margin": None}
