"""The release's pruning: delete the worst pair, audit again, add back (Algorithm 1, sheet A4) [authors' release].

The audit after each deletion is the same fit as ever, only found faster: all folds at once, started from nothing but
with sums that are shared. A gap of zero has no sign (1e-12), which the release leaves to rounding noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from strop.core.audit.fast import Fits
from strop.core.audit.rules import is_auditable
from strop.core.audit.search import Found
from strop.core.audit.significance import ZERO_GAP

if TYPE_CHECKING:
    from numpy import ndarray

    from strop.core.audit.rules import FoldRule

SLACK = 1e-9
TIE = 1e-15
ALPHA = 0.5
SCORES = ("imbalance", "confidence", "hybrid")


def imbalance_scores(rows: ndarray, coefficients: ndarray) -> ndarray:
    """Blame of each pair [n]: sum over features of |coefficient| |d| where d points the way of the whole gap.

    `rows` [n, 2, d]; d is the pair's difference in standard deviations. Constant features and zero gaps are skipped.
    """
    import numpy as np

    scale = rows.reshape(-1, rows.shape[2]).std(axis=0)
    used = scale > 0
    difference = np.where(used, rows[:, 0] - rows[:, 1], 0.0) / np.where(used, scale, 1.0)
    gap = difference.mean(axis=0)
    used &= np.abs(gap) >= ZERO_GAP
    blamed = (difference * np.sign(gap) > 0) & used
    return np.asarray((np.abs(coefficients) * np.abs(difference) * blamed).sum(axis=1))


def confidence_scores(logits: ndarray) -> ndarray:
    """|p(right) - p(wrong)| of each pair [n], averaged over foldings; `logits` [R, 2 n] out of fold."""
    import numpy as np

    probability = 1 / (1 + np.exp(-logits))
    return np.asarray(np.abs(probability[:, 0::2] - probability[:, 1::2]).mean(axis=0))


def hybrid_scores(confidence: ndarray, imbalance: ndarray, alpha: float = ALPHA) -> ndarray:
    """Alpha minmax(confidence) + (1 - alpha) minmax(imbalance); a constant score counts as 0."""

    def minmax(values: ndarray) -> ndarray:
        spread = values.max() - values.min()
        return (values - values.min()) / spread if spread > 0 else values * 0

    return alpha * minmax(confidence) + (1 - alpha) * minmax(imbalance)


def greedy_prune(
    rows: ndarray,
    groups: ndarray,
    threshold: float,
    rule: FoldRule,
    *,
    score: str = "imbalance",
    adds_back: bool = True,
    tick: Callable[[], None] = lambda: None,
) -> Found:
    """Algorithm 1 on pairs `rows` [n, 2, d] under a fold rule; `score` is one of `SCORES`.

    `keep` is None where the threshold cannot be met: fewer than five groups would be left, or no pair is to blame any
    more (then deleting would go on for ever in order of ids). `trajectory` has a point for each deletion, with the
    pair.
    """
    import numpy as np

    left = np.arange(len(rows))
    found = Found(None)
    removed: int | None = None
    while True:
        fits = Fits(rows[left])
        foldings = rule.foldings(groups[left])
        logits = fits.held_out(foldings)
        auc = _mean_auc(logits)
        found.tried += 1
        found.trajectory.append({"pairs": len(left), "auc": auc, **({} if removed is None else {"removed": removed})})
        if auc <= threshold + SLACK:
            break
        blame = _blame(rows[left], fits, logits, score)
        worst = float(blame.max())
        if worst <= 0:
            return found
        place = int(np.flatnonzero(blame >= worst - TIE)[0])
        removed = int(left[place])
        left = np.delete(left, place)
        if not is_auditable(groups[left]):
            return found
        tick()
    deleted = sorted(set(range(len(rows))) - set(left.tolist()))
    found.details["num_removed"] = len(deleted)
    if adds_back:

        def audit(some: ndarray) -> float:
            found.tried += 1
            tick()
            return rule.auc(rows[some], groups[some])

        left = add_back(left, deleted, threshold, audit)
    found.details["num_added_back"] = len(left) - (len(rows) - len(deleted))
    found.keep = left
    if found.details["num_added_back"]:
        found.trajectory.append({"pairs": len(left), "auc": rule.auc(rows[left], groups[left])})
    return found


def _blame(rows: ndarray, fits: Fits, logits: ndarray, score: str) -> ndarray:
    import numpy as np

    if score == "confidence":
        return confidence_scores(logits)
    weights = fits.weights(np.ones((1, 2 * len(rows))))[0]
    imbalance = imbalance_scores(rows, weights[:-1])
    return imbalance if score == "imbalance" else hybrid_scores(confidence_scores(logits), imbalance)


def _mean_auc(logits: ndarray) -> float:
    import numpy as np

    from strop.core.audit.fast import pooled_auc

    return float(np.mean([pooled_auc(row[0::2], row[1::2]) for row in logits]))


def add_back(kept: ndarray, deleted: Sequence[int], threshold: float, audit: Callable[[ndarray], float]) -> ndarray:
    """Re-inserts deleted pairs in ascending order where the audit of the grown set allows, until a pass adds none."""
    import numpy as np

    kept = np.sort(kept)
    waiting: list[Any] = sorted(deleted)
    while True:
        still = []
        for pair in waiting:
            grown = np.insert(kept, np.searchsorted(kept, pair), pair)
            if audit(grown) <= threshold + SLACK:
                kept = grown
            else:
                still.append(pair)
        if len(still) == len(waiting):
            return kept
        waiting = still
