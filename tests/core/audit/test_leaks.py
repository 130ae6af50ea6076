"""Probes on the answers' words and characters: what six counts do not see, texts without a token, other scripts."""

from functools import partial

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

from strop.core.audit.folds import stable_folds  # noqa: E402
from strop.core.audit.leaks import audit_texts, text_model  # noqa: E402
from strop.core.audit.probe import audit_pairs  # noqa: E402
from strop.core.audit.surface6 import feature_rows  # noqa: E402

KINDS = pytest.mark.parametrize("kind", ["tfidf", "ngrams"])
FOLDS = stable_folds(np.ones(20, int))


def audit(texts, kind):
    return audit_texts(texts, FOLDS[: len(texts)], partial(text_model, kind))


@KINDS
def test_words_that_six_counts_do_not_see(kind):
    texts = [(f"deed{i} reef{i}", f"good{i} moon{i}") for i in range(20)]
    rows = feature_rows([text for pair in texts for text in pair]).reshape(-1, 2, 6)
    assert audit_pairs(rows, FOLDS).auc == 0.5
    # The whole words are all different; what repeats is inside of them.
    assert audit(texts, "ngrams").auc == 1
    repeated = [(f"true deed{i}", f"fake deed{i}") for i in range(20)]
    found = audit(repeated, kind)
    assert (found.auc, found.accuracy, found.paired_accuracy) == (1, 1, 1)


@KINDS
def test_identical_answers_are_at_chance(kind):
    found = audit([(f"word{i % 3} here", f"word{i % 3} here") for i in range(20)], kind)
    assert (found.auc, found.paired_accuracy) == (0.5, 0.5)


@KINDS
def test_answers_without_any_text_are_at_chance(kind):
    found = audit([("", " ")] * 20, kind)
    assert (found.auc, found.paired_accuracy) == (0.5, 0.5)
    assert found.probability.tolist() == [0.5] * 40


@KINDS
def test_one_answer_with_text_among_empty_ones(kind):
    found = audit([("word", "")] + [("", "")] * 19, kind)
    assert found.probability.shape == (40,)
    assert np.isfinite(found.probability).all()


@KINDS
def test_answers_of_punctuation_alone(kind):
    assert audit([("?!", "...")] * 20, kind).auc == (0.5 if kind == "tfidf" else 1)


@KINDS
def test_words_of_another_script(kind):
    assert audit([(f"да {i}", f"нет {i}") for i in range(20)], kind).auc == 1
