"""How sure an audit is: published intervals, p and ablations (method sheet audit-prune, A3, A7, A8), and hand cases."""

import csv
import json
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

from strop.core.audit.fast import Fits  # noqa: E402
from strop.core.audit.folds import release_folds, stable_folds  # noqa: E402
from strop.core.audit.probe import audit_pairs  # noqa: E402
from strop.core.audit.significance import (  # noqa: E402
    ablations,
    bootstrap_interval,
    feature_table,
    is_swappable,
    shuffle_p_value,
    swap_p_value,
)
from strop.core.audit.surface6 import NAMES, feature_rows  # noqa: E402

TRUTHFULQA = Path(__file__).resolve().parents[2] / "data" / "truthfulqa"


@pytest.fixture(scope="module")
def rows():
    with (TRUTHFULQA / "TruthfulQA.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    return feature_rows([row[name] for row in table for name in ("Best Answer", "Best Incorrect Answer")]).reshape(
        -1, 2, 6
    )


def test_published_ablations(rows):
    """Sheet A7: the AUC of all 790 pairs without a feature or a group of them, to three decimals."""
    published = {
        "word_count": 0.709, "neg_cnt": 0.641, "avg_token_len": 0.690, "type_token": 0.718, "neg_lead": 0.714,
        "hedge_rate": 0.707, "negation": 0.592, "hedging": 0.707, "length and regularity": 0.674,
    }  # fmt: skip
    found = ablations(rows, release_folds(790)[None])
    assert found == pytest.approx(published, abs=6e-4)


def test_single_features_and_their_weights(rows):
    """Sheet A8: the AUC of each feature alone, and coefficients of the fit to all pairs."""
    table = feature_table(rows)
    assert [row["feature"] for row in table] == list(NAMES)
    assert [row["auc"] for row in table] == pytest.approx([0.561, 0.664, 0.533, 0.509, 0.594, 0.518], abs=6e-4)
    assert [row["coefficient"] for row in table] == pytest.approx([0.23, 0.72, 0.25, 0.10, 0.09, 0.22], abs=6e-3)


def test_the_published_interval(rows):
    """Sheet A7: .688 to .738 on all pairs."""
    probability = audit_pairs(rows, release_folds(790)).probability
    ends = bootstrap_interval(probability[None, 0::2], probability[None, 1::2])
    assert ends == pytest.approx([0.688, 0.738], abs=1e-3)


def test_the_published_p_of_the_published_subset(rows):
    """Sheet A7: p = .0477 with 10,000 swaps; 1,000 have a standard error of .007."""
    ids = np.array(json.loads((TRUTHFULQA / "truthfulqa476_pair_ids.json").read_text())["pair_ids"])
    fits, folds = Fits(rows[ids]), release_folds(476)[None]
    assert swap_p_value(fits, folds, float(fits.aucs(folds)[0]), 1000) == pytest.approx(0.0477, abs=0.02)


def test_p_counts_what_reaches_the_observed_and_adds_one():
    fits, folds = Fits(np.random.default_rng(0).normal(size=(20, 2, 2))), stable_folds(np.ones(20, int))[None]
    assert swap_p_value(fits, folds, 1.1, 9) == 1 / 10
    assert swap_p_value(fits, folds, 0.0, 9) == 1


def test_p_of_flat_rows_counts_likewise():
    rows, labels = np.arange(20.0)[:, None], np.arange(20) % 2
    folds = np.arange(20) // 2 % 5
    assert shuffle_p_value(rows, labels, folds, 1.1, 9) == 1 / 10
    assert shuffle_p_value(rows, labels, folds, 0.0, 9) == 1


def test_labels_swap_within_groups_of_one_right_and_one_wrong_text():
    assert is_swappable("aabb", [True, False, False, True])
    assert not is_swappable("aab", [True, False, True])
    assert not is_swappable("aaa", [True, False, True])


def test_constant_features_and_rounding_noise_have_no_gap():
    rows = np.zeros((3, 2, 2))
    rows[:, 0, 0], rows[:, 1, 0] = [0.1, 0.2, 0.0], [0.0, 0.0, 0.3]
    assert rows[:, 0, 0].mean() != rows[:, 1, 0].mean()
    noisy, constant = feature_table(rows, ["noisy", "constant"])
    assert (noisy["gap"], noisy["auc"]) == (0.0, 5 / 9)
    assert (constant["gap"], constant["auc"], constant["coefficient"]) == (0.0, 0.5, 0.0)
