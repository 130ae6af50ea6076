"""Other ways to as many pairs: the order of the fixed prefix, AFLite against the release's AUCs, chance."""

import csv
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")

from strop.core.audit.baselines import BASELINES, aflite, baseline, prefix_order, random_subset  # noqa: E402
from strop.core.audit.fast import Fits, pair_foldings  # noqa: E402
from strop.core.audit.surface6 import feature_rows  # noqa: E402

CSV = Path(__file__).resolve().parents[2] / "data" / "truthfulqa" / "TruthfulQA.csv"


def features(texts):
    return feature_rows([text for pair in texts for text in pair]).reshape(-1, 2, 6)


@pytest.fixture(scope="module")
def texts():
    with CSV.open(newline="", encoding="utf-8") as file:
        return [(row["Best Answer"], row["Best Incorrect Answer"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def rows(texts):
    return features(texts)


def fresh_auc(rows, keep):
    return float(Fits(rows[keep]).aucs(pair_foldings(keep, 40, 1)).mean())


def test_the_prefix_takes_pairs_without_negation_and_with_small_length_gaps_first():
    texts = [("no", "no"), ("abcd", "ab"), ("ab", "ab"), ("not", "yes"), ("abcd", "abc"), ("cd", "cd")]
    assert prefix_order(texts, features(texts)).tolist() == [2, 5, 4, 1, 0, 3]


@pytest.mark.parametrize(("size", "auc", "reach"), [(401, 0.444, 0.015), (476, 0.4515, 0.02), (588, 0.587, 0.01)])
def test_aflite_overshoots_as_the_release_says(rows, size, auc, reach):
    """Sheet A7: AFLite on the six features at equal size; at 476 pairs .4515 +- .0135 over six seeds."""
    assert fresh_auc(rows, aflite(rows, size, 0)) == pytest.approx(auc, abs=reach)


def test_chance_leaves_the_leak(rows):
    """Sheet A7: random 476 pairs have .715 +- .010 over ten draws."""
    aucs = [fresh_auc(rows, random_subset(len(rows), 476, seed)) for seed in range(5)]
    assert np.mean(aucs) == pytest.approx(0.715, abs=0.01)


@pytest.mark.parametrize("name", BASELINES)
def test_a_baseline_keeps_as_many_pairs_as_are_asked_for_in_order(texts, rows, name):
    kept = baseline(name, texts[:60], rows[:60], 37, 0)
    assert len(kept) == 37
    assert (np.diff(kept) > 0).all()
    assert kept.tolist() == baseline(name, texts[:60], rows[:60], 37, 0).tolist()


@pytest.mark.parametrize("size", [0, 61])
def test_aflite_refuses_a_size_that_cannot_be(rows, size):
    with pytest.raises(ValueError, match=f"{size} of 60 pairs"):
        aflite(rows[:60], size, 0)
