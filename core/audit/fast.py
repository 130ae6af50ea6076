"""The probe of probe.py refitted for many foldings at once: Newton steps on all fits together, as matrix products.

Same optimum as scikit-learn's liblinear (standardised features, L2 with C = 1, the intercept penalised too), reached to
1e-8 and not to liblinear's 1e-4, so that AUCs differ in the fourth decimal at most. Shapes: n pairs, d features, R
foldings, B = 5 R fits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.core.audit.folds import NUM_FOLDS, random_folds

if TYPE_CHECKING:
    from numpy import ndarray

MAX_STEPS = 25
# Near the optimum the next step would be about the square of this one.
STEP_TOLERANCE = 1e-5
# Logits that differ by less are the same: equal rows must tie whatever the order of summation.
DECIMALS = 11
# Fits at a time: the arrays of one step hold 2 n numbers for each and should stay in the cache.
BATCH_FITS = 50


def draw_foldings(num_groups: int, num_foldings: int, seed: int | tuple[int, ...]) -> ndarray:
    """`num_foldings` random foldings from a seed of their own each: shape [R, num_groups]."""
    import numpy as np

    prefix = (seed,) if isinstance(seed, int) else seed
    return np.stack(
        [random_folds(num_groups, np.random.default_rng((*prefix, index))) for index in range(num_foldings)]
    )


def pair_foldings(groups: ndarray, num_foldings: int, seed: int | tuple[int, ...]) -> ndarray:
    """Random foldings of pairs [R, n] that never split a group; `groups` [n] are any numbers."""
    import numpy as np

    _, inverse = np.unique(groups, return_inverse=True)
    return draw_foldings(int(inverse.max()) + 1, num_foldings, seed)[:, inverse]


class Fits:
    """The probe over pairs of one set: `rows` [n, 2, d], the correct answer first.

    Everything a fit needs that does not depend on the folds is computed once.
    """

    def __init__(self, rows: ndarray) -> None:
        import numpy as np

        flat = rows.reshape(-1, rows.shape[2])
        scale = flat.std(axis=0)
        self.centred = (flat - flat.mean(axis=0)) / np.where(scale > 0, scale, 1.0)
        self.num_pairs, self.num_features = len(rows), rows.shape[2]
        self.augmented = np.hstack([self.centred, np.ones((len(flat), 1))])
        size = self.num_features + 1
        self._upper = np.triu_indices(size)
        self.products = self.augmented[:, self._upper[0]] * self.augmented[:, self._upper[1]]
        self.labels = np.tile([1.0, 0.0], self.num_pairs)

    def weights(self, train: ndarray, labels: ndarray | None = None) -> ndarray:
        """Weights on `augmented` [B, d + 1] of one fit for each row of `train` [B, 2 n] (1 where a row is fitted).

        `labels` [2 n] or [B, 2 n] replace the true ones. A feature that is constant in training has weight 0.
        """
        import numpy as np

        labels = self.labels if labels is None else labels
        size = self.num_features + 1
        counts = train.sum(axis=1, keepdims=True)
        moments = train @ self.products
        full = self.square(moments)
        mean = full[:, -1, :-1] / counts
        variance = np.einsum("bii->bi", full)[:, :-1] / counts - mean**2
        scale = np.sqrt(np.where(variance > 1e-12, variance, 1.0))
        # Rows of `augmented` times `change` are the rows standardised on the training part, then a one.
        change = np.zeros((len(train), size, size))
        index = np.arange(self.num_features)
        change[:, index, index] = 1 / scale
        change[:, -1, :-1] = -mean / scale
        change[:, -1, -1] = 1
        change[:, index, index] *= variance > 1e-12
        change[:, -1, :-1] *= variance > 1e-12
        identity = np.eye(size)
        # The first step, from zero, needs no curve: every probability is one half there.
        gradient = change.transpose(0, 2, 1) @ (((0.5 - labels) * train) @ self.augmented)[:, :, None]
        theta = -np.linalg.solve(change.transpose(0, 2, 1) @ (full / 4) @ change + identity, gradient)
        for _ in range(MAX_STEPS):
            raw = (change @ theta)[:, :, 0]
            probability = 1 / (1 + np.exp(-(raw @ self.augmented.T)))
            gradient = change.transpose(0, 2, 1) @ (((probability - labels) * train) @ self.augmented)[:, :, None]
            curvature = self.square((probability * (1 - probability) * train) @ self.products)
            curvature = change.transpose(0, 2, 1) @ curvature @ change + identity
            step = np.linalg.solve(curvature, gradient + theta)
            theta -= step
            if np.abs(step).max() < STEP_TOLERANCE:
                break
        return np.asarray((change @ theta)[:, :, 0])

    def square(self, upper: ndarray) -> ndarray:
        """Symmetric matrices [B, d + 1, d + 1] from their upper triangles [B, (d + 1)(d + 2) / 2]."""
        import numpy as np

        size = self.num_features + 1
        full = np.empty((len(upper), size, size))
        full[:, self._upper[0], self._upper[1]] = upper
        full[:, self._upper[1], self._upper[0]] = upper
        return full

    def held_out(self, foldings: ndarray, labels: ndarray | None = None) -> ndarray:
        """Logits [R, 2 n] of every row by the fit that did not see it; `foldings` [R, n] folds of the pairs.

        `labels` [R, 2 n] or [2 n] replace the true ones.
        """
        import numpy as np

        logits = np.empty((len(foldings), 2 * self.num_pairs))
        per_batch = max(1, BATCH_FITS // NUM_FOLDS)
        for start in range(0, len(foldings), per_batch):
            some = foldings[start : start + per_batch]
            held = np.repeat(some[:, None, :] == np.arange(NUM_FOLDS)[None, :, None], 2, axis=2)
            train = (~held).reshape(-1, 2 * self.num_pairs).astype(np.float64)
            given = labels
            if labels is not None and labels.ndim == 2:
                given = np.repeat(labels[start : start + per_batch], NUM_FOLDS, axis=0)
            all_logits = (self.weights(train, given) @ self.augmented.T).reshape(held.shape)
            logits[start : start + per_batch] = (all_logits * held).sum(axis=1)
        return logits.round(DECIMALS)

    def aucs(self, foldings: ndarray) -> ndarray:
        """The audit AUC of each folding, shape [R]."""
        import numpy as np

        logits = self.held_out(foldings)
        return np.array([pooled_auc(row[0::2], row[1::2]) for row in logits])


def pooled_auc(right: ndarray, wrong: ndarray) -> float:
    """P(right > wrong) + P(right = wrong) / 2 over all combinations, by sorting.

    >>> import numpy as np
    >>> pooled_auc(np.array([2.0, 1.0]), np.array([1.0, 0.0]))
    0.875
    """
    import numpy as np

    # Both sorted: looking up in order is several times faster than at random.
    right, ordered = np.sort(right), np.sort(wrong)
    below = np.searchsorted(ordered, right, "left").sum() + np.searchsorted(ordered, right, "right").sum()
    return float(below / (2 * len(right) * len(wrong)))


def quick_aucs(fits: Fits, foldings: ndarray) -> ndarray:
    """The audit AUC of each folding [R], each fit one Newton step away from the fit to all rows.

    Near chance the fit to four folds differs from the fit to five by little and the probability curve is almost
    straight, so one step leaves an error near 1e-5; it costs a tenth. For searching, not for reporting.
    """
    import numpy as np

    ones = np.ones((1, 2 * fits.num_pairs))
    theta = fits.weights(ones)[0]
    rows = fits.augmented
    probability = 1 / (1 + np.exp(-(rows @ theta)))
    residual = (probability - fits.labels)[:, None] * rows
    curved = (probability * (1 - probability))[:, None] * fits.products
    per_pair = np.hstack([residual[0::2] + residual[1::2], curved[0::2] + curved[1::2]])
    held = (foldings[:, None, :] == np.arange(NUM_FOLDS)[None, :, None]).reshape(-1, fits.num_pairs).astype(np.float64)
    sums = per_pair.sum(axis=0) - held @ per_pair
    size = rows.shape[1]
    curvature = fits.square(sums[:, size:]) + np.eye(size)
    fitted = theta - np.linalg.solve(curvature, (sums[:, :size] + theta)[:, :, None])[:, :, 0]
    index = np.arange(len(foldings))[:, None] * NUM_FOLDS + foldings
    own = fitted[index]
    right = np.einsum("rnk,nk->rn", own, rows[0::2]).round(DECIMALS)
    wrong = np.einsum("rnk,nk->rn", own, rows[1::2]).round(DECIMALS)
    return np.array([pooled_auc(a, b) for a, b in zip(right, wrong, strict=True)])
