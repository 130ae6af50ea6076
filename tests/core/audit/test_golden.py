"""Audits known to the last digit (method sheet audit-prune, A4, A7, A8) and the published subset, replayed."""

import csv
import json
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

from strop.core.audit.fast import Fits, pair_foldings, quick_aucs  # noqa: E402
from strop.core.audit.folds import release_folds, stable_folds  # noqa: E402
from strop.core.audit.probe import audit_pairs, out_of_fold, score, stratified_folds  # noqa: E402
from strop.core.audit.prune import add_back, greedy_prune, imbalance_scores  # noqa: E402
from strop.core.audit.rules import parse_rule  # noqa: E402
from strop.core.audit.surface6 import feature_rows, surface6  # noqa: E402

ROOT = Path(__file__).resolve().parents[3]
TRUTHFULQA = ROOT / "tests" / "data" / "truthfulqa"
SHARED = ROOT.parent / "shared" / "data"
RELEASE = json.loads((TRUTHFULQA / "truthfulqa476_pair_ids.json").read_text())


def features(right, wrong):
    return feature_rows([text for pair in zip(right, wrong, strict=True) for text in pair]).reshape(-1, 2, 6)


@pytest.fixture(scope="module")
def rows():
    with (TRUTHFULQA / "TruthfulQA.csv").open(newline="", encoding="utf-8") as file:
        table = list(csv.DictReader(file))
    return features([row["Best Answer"] for row in table], [row["Best Incorrect Answer"] for row in table])


def shared(name):
    path = SHARED / name
    if not path.exists():
        pytest.skip(f"no {path.parent.name} beside the checkout")
    return path.read_text(encoding="utf-8").splitlines()


def test_the_features_of_a_sentence():
    assert surface6("There's no proof; it could not, and may not.") == pytest.approx((9, 3, 33 / 9, 8 / 9, 1, 2 / 9))
    assert surface6("") == (0, 0, 0, 0, 0, 0)
    assert surface6("don\u2019t")[1] == 0
    assert surface6("Note that")[4] == 0


@pytest.mark.parametrize("size", ["790", "476", "387"])
def test_the_folds_of_the_release(size):
    known = json.loads((TRUTHFULQA / "release_folds.json").read_text())[size]
    assert release_folds(int(size)).tolist() == known


def test_both_audits_of_truthfulqa(rows):
    assert audit_pairs(rows, stable_folds(np.ones(790, int))).auc == pytest.approx(0.71620013, abs=1e-6)
    assert audit_pairs(rows, release_folds(790)).auc == pytest.approx(0.7145, abs=5e-5)


def test_the_published_subset_has_its_auc_and_comes_back_from_its_removals(rows):
    ids = np.array(RELEASE["pair_ids"])
    audit = audit_pairs(rows[ids], release_folds(476))
    assert audit.auc == RELEASE["final_auc"]
    assert audit.accuracy == pytest.approx(0.522059, abs=1e-6)
    removed = RELEASE["recorded_removal_order_first_403"]
    rule = parse_rule("release", 0)
    left = np.array(sorted(set(range(790)) - set(removed)))
    kept = add_back(left, removed, 0.53, lambda some: rule.auc(rows[some], some))
    assert kept.tolist() == RELEASE["pair_ids"]


def test_the_fast_probe_is_the_probe(rows):
    foldings = pair_foldings(np.arange(790), 3, 5)
    slow = [audit_pairs(rows, one).auc for one in foldings]
    assert Fits(rows).aucs(foldings) == pytest.approx(slow, abs=1e-4)
    assert quick_aucs(Fits(rows), foldings) == pytest.approx(slow, abs=5e-4)


@pytest.mark.parametrize(("name", "size"), [("stable", 510), ("release", 504)])
def test_an_honest_greedy_run(rows, name, size):
    """Sheet A4b and A8: 510 pairs on stable folds, 504 on the release's with zero gaps skipped."""
    found = greedy_prune(rows, np.arange(790), 0.53, parse_rule(name, 0))
    assert len(found.keep) == size


def test_piqa_to_the_last_digit():
    items = [json.loads(line) for line in shared("piqa/valid.jsonl")]
    labels = [int(line) for line in shared("piqa/valid-labels.lst")]
    right, wrong = (
        [f"{item['goal']} {item[f'sol{1 + (label if side else 1 - label)}']}"
         for item, label in zip(items, labels, strict=True)]
        for side in (True, False)
    )  # fmt: skip
    assert audit_pairs(features(right, wrong), release_folds(len(items))).auc == 0.508615866704714


def test_fever_symmetric_stratified_and_by_components():
    items = [json.loads(line) for line in shared("fever_symmetric/fever_symmetric_dev.jsonl")]
    rows = feature_rows([item["claim"] for item in items])
    labels = np.array([int(item["gold_label"] == "SUPPORTS") for item in items])
    audit = score(out_of_fold(rows, labels, stratified_folds(labels)), labels, paired=False)
    assert audit.auc == 0.4165469692617064
    root = list(range(len(items)))

    def find(index):
        while root[index] != index:
            index = root[index]
        return index

    seen = {}
    for index, item in enumerate(items):
        for key in ("claim", "evidence"):
            other = seen.setdefault((key, item[key]), index)
            root[find(index)] = find(other)
    numbers = {}
    groups = np.array([numbers.setdefault(find(index), len(numbers)) for index in range(len(items))])
    assert len(numbers) == 163
    folds = stable_folds(np.bincount(groups))[groups]
    assert score(out_of_fold(rows, labels, folds), labels, paired=False).auc == 0.5


def test_a_zero_gap_blames_nobody():
    rows = np.zeros((6, 2, 1))
    rows[:3, 0], rows[3:, 1] = 1.0, 1.0
    assert imbalance_scores(rows, np.ones(1)).tolist() == [0.0] * 6


def test_an_infeasible_threshold_stops():
    rows = np.ones((20, 2, 6))
    assert greedy_prune(rows, np.arange(20), 0.4, parse_rule("stable", 0)).keep is None
