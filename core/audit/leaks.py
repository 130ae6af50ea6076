"""What else a question-blind reader can use: words and characters of the answers, by tf-idf and a linear probe.

Cleaning six features certifies these six. The probes here look at the answers' own words (1- and 2-grams) and at
character 2- to 5-grams inside of words; no model, no embedding. [measured: sheet A8]
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from strop.core.audit.folds import NUM_FOLDS
from strop.core.audit.probe import Audit, pair_labels, score

if TYPE_CHECKING:
    from numpy import ndarray

KINDS = ("features", "tfidf", "ngrams")


def text_model(kind: str) -> Any:
    """The probe on texts: `tfidf` (word 1- and 2-grams) or `ngrams` (character 2- to 5-grams within words)."""
    from sklearn.feature_extraction.text import TfidfVectorizer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline

    how: dict[str, Any] = (
        {"analyzer": "word", "ngram_range": (1, 2), "token_pattern": r"(?u)\b\w+\b"}
        if kind == "tfidf"
        else {"analyzer": "char_wb", "ngram_range": (2, 5)}
    )
    return make_pipeline(
        TfidfVectorizer(sublinear_tf=True, **how), LogisticRegression(C=1.0, solver="liblinear", random_state=42)
    )


def fit_texts(model: Any, texts: Sequence[str], labels: ndarray) -> Any:
    """A `text_model` fitted to texts [n] with labels [n]; None where no text has a token."""
    return model.fit(texts, labels) if any(map(model[0].build_analyzer(), texts)) else None


def audit_texts(texts: Sequence[tuple[str, str]], folds: ndarray, make_model: Callable[[], Any]) -> Audit:
    """The audit of pairs (right, wrong) by a model of texts, under one folding [n].

    A text without any known token still gets a probability: the intercept's. Where no text of a training part has a
    token at all, the answers say nothing and count as even.
    """
    import numpy as np

    labels = pair_labels(len(texts))
    flat = np.array([text for pair in texts for text in pair], dtype=object)
    row_folds = np.repeat(folds, 2)
    probability = np.full(len(flat), 0.5)
    for fold in range(NUM_FOLDS):
        held = row_folds == fold
        if not held.any():
            continue
        model = fit_texts(make_model(), flat[~held], labels[~held])
        if model is not None:
            probability[held] = model.predict_proba(flat[held])[:, 1]
    return score(probability, labels, paired=True)
