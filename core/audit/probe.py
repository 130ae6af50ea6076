"""The audit: a logistic probe on surface features under grouped cross-validation, by scikit-learn (sheet A3).

Rows of pairs are interleaved, the right answer (label 1) first. The AUC is one over the pool of all out-of-fold
probabilities. An AUC below one half counts as no leak. [inferred]
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.audit.folds import NUM_FOLDS

if TYPE_CHECKING:
    from numpy import ndarray

MakeModel = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Audit:
    """One audit: `probability` [rows] of being right, out of fold; `paired_accuracy` is None for flat rows."""

    auc: float
    accuracy: float
    paired_accuracy: float | None
    probability: ndarray


def logistic() -> Any:
    """Standardised features into an L2 logistic regression: C = 1, liblinear, seed 42 [authors' release]."""
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    return make_pipeline(
        StandardScaler(), LogisticRegression(C=1.0, solver="liblinear", max_iter=2000, random_state=42)
    )


def out_of_fold(rows: ndarray, labels: ndarray, folds: ndarray, make_model: MakeModel = logistic) -> ndarray:
    """P(right) of each row [n, d] by the model fitted to the other folds; `folds` [n].

    A fold without rows is left out; a training part with one label alone gives its share of right ones.
    """
    import numpy as np

    probability = np.empty(len(labels), dtype=np.float64)
    for fold in range(NUM_FOLDS):
        held = folds == fold
        if not held.any():
            continue
        seen = labels[~held]
        if seen.min() == seen.max():
            probability[held] = float(seen[0])
            continue
        model = make_model().fit(rows[~held], seen)
        probability[held] = model.predict_proba(rows[held])[:, 1]
    return probability


def score(probability: ndarray, labels: ndarray, *, paired: bool) -> Audit:
    """AUC over the pool, accuracy at p >= 1/2 over rows, and how often the right answer of a pair scores higher.

    Ties within a pair count one half.
    """
    import numpy as np
    from sklearn.metrics import roc_auc_score

    accuracy = float(((probability >= 0.5) == (labels == 1)).mean())
    paired_accuracy = None
    if paired:
        difference = probability[0::2] - probability[1::2]
        paired_accuracy = float(((difference > 0) + 0.5 * (difference == 0)).mean())
    return Audit(float(roc_auc_score(labels, probability)), accuracy, paired_accuracy, np.asarray(probability))


def audit_pairs(rows: ndarray, folds: ndarray, make_model: MakeModel = logistic) -> Audit:
    """The audit of pairs: `rows` [n, 2, d], `folds` [n]."""
    labels = pair_labels(len(rows))
    flat = rows.reshape(-1, rows.shape[2])
    import numpy as np

    return score(out_of_fold(flat, labels, np.repeat(folds, 2), make_model), labels, paired=True)


def pair_labels(num_pairs: int) -> ndarray:
    """1, 0, 1, 0, ...: shape [2 n]."""
    import numpy as np

    return np.tile([1, 0], num_pairs)


def stratified_folds(labels: ndarray) -> ndarray:
    """The release's folds for rows without groups: StratifiedKFold(5, shuffled, seed 42) [authors' release]."""
    import numpy as np
    from sklearn.model_selection import StratifiedKFold

    folds = np.empty(len(labels), dtype=np.int64)
    splitter = StratifiedKFold(NUM_FOLDS, shuffle=True, random_state=42)
    for fold, (_, held) in enumerate(splitter.split(np.zeros((len(labels), 1)), labels)):
        folds[held] = fold
    return folds


def coefficients(rows: ndarray, labels: ndarray) -> ndarray:
    """Coefficients of the probe on standardised features, fitted to all rows [n, d] at once: shape [d]."""
    import numpy as np

    return np.asarray(logistic().fit(rows, labels)[-1].coef_[0])
