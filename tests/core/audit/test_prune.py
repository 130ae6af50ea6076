"""The deletion of one pair at a time: blame by hand, its three scores, add-back, and where it stops."""

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

from strop.core.audit.prune import (  # noqa: E402
    SCORES,
    add_back,
    confidence_scores,
    greedy_prune,
    hybrid_scores,
    imbalance_scores,
)
from strop.core.audit.rules import parse_rule  # noqa: E402

STABLE = parse_rule("stable", 0)


@pytest.fixture(scope="module")
def rows():
    rows = np.random.default_rng(0).normal(size=(60, 2, 2))
    rows[:, 0, 0] += 0.8
    return rows


def test_only_differences_that_point_the_way_of_the_gap_are_blamed():
    rows = np.zeros((4, 2, 2))
    rows[:, 0, 0] = [2, 1, 0, -1]
    rows[:, 1, 1] = [0, 0, 2, 0]
    scale = rows.reshape(-1, 2).std(axis=0)
    found = imbalance_scores(rows, np.array([-3.0, 0.5]))
    assert found.tolist() == pytest.approx([6 / scale[0], 3 / scale[0], 1 / scale[1], 0])


def test_a_gap_of_rounding_noise_has_no_sign():
    rows = np.array([[[0.1], [0]], [[0.2], [0]], [[0], [0.3]]])
    # One tenth and two tenths less three tenths is not zero in binary.
    assert (rows[:, 0] - rows[:, 1]).mean() != 0
    assert imbalance_scores(rows, np.ones(1)).tolist() == [0.0] * 3


def test_confidence_and_hybrid_by_hand():
    logits = np.array([[0.0, 0.0, np.log(3), 0.0], [0.0, 0.0, np.log(3), -np.log(3)]])
    assert confidence_scores(logits).tolist() == pytest.approx([0, (0.25 + 0.5) / 2])
    mixed = hybrid_scores(np.array([1.0, 2.0, 3.0]), np.array([8.0, 4.0, 0.0]), alpha=0.25)
    assert mixed.tolist() == pytest.approx([0.75, 0.125 + 0.375, 0.25])
    assert hybrid_scores(np.ones(2), np.array([0.0, 1.0])).tolist() == [0, 0.5]


@pytest.mark.parametrize("score", SCORES)
def test_every_score_reaches_the_threshold_and_says_what_it_deleted(rows, score):
    found = greedy_prune(rows, np.arange(60), 0.55, STABLE, score=score, adds_back=False)
    assert STABLE.auc(rows[found.keep], found.keep) <= 0.55
    removed = [point["removed"] for point in found.trajectory[1:]]
    assert sorted({*found.keep.tolist(), *removed}) == list(range(60))
    assert found.details == {"num_removed": len(removed), "num_added_back": 0}


def test_add_back_only_adds_and_keeps_the_threshold(rows):
    bare = greedy_prune(rows, np.arange(60), 0.55, STABLE, adds_back=False)
    full = greedy_prune(rows, np.arange(60), 0.55, STABLE)
    assert set(bare.keep) <= set(full.keep)
    assert len(full.keep) - len(bare.keep) == full.details["num_added_back"]
    assert STABLE.auc(rows[full.keep], full.keep) <= 0.55 + 1e-9


def test_add_back_passes_until_one_adds_nothing():
    """4 is welcome only beside 7, which the first pass adds after it has asked for 4."""
    asked = []

    def audit(some):
        asked.append(some.tolist())
        return 0.5 if set(some.tolist()) in ({0, 9, 7}, {0, 9, 7, 4}) else 0.6

    assert add_back(np.array([9, 0]), [4, 7], 0.53, audit).tolist() == [0, 4, 7, 9]
    assert asked == [[0, 4, 9], [0, 7, 9], [0, 4, 7, 9]]


def test_identical_pairs_are_never_blamed(rows):
    same = np.concatenate([rows, np.repeat(rows[:10, :1], 2, axis=1)])
    found = greedy_prune(same, np.arange(70), 0.55, STABLE, adds_back=False)
    assert set(range(60, 70)) <= set(found.keep)


def test_nothing_to_blame_stops(rows):
    same = np.repeat(rows[:20, :1], 2, axis=1)
    found = greedy_prune(same, np.arange(20), 0.4, STABLE)
    assert found.keep is None
    assert len(found.trajectory) == 1


def test_deleting_stops_before_fewer_than_five_groups():
    """The pairs of four questions of six leak; the rest is fewer than five questions, which cannot be audited."""
    rows, groups = np.zeros((60, 2, 1)), np.arange(60) % 6
    rows[groups < 4, 0] = 1.0
    found = greedy_prune(rows, groups, 0.5, STABLE)
    assert found.keep is None
    assert found.trajectory[-1]["pairs"] >= 20
