"""How sure an audit is: cluster bootstrap over pairs, a permutation test, and what each feature carries (sheet A3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.core.audit.fast import Fits, pooled_auc
from strop.core.audit.surface6 import GROUPS, NAMES

if TYPE_CHECKING:
    from numpy import ndarray

RESAMPLES = 1000
SEED = 42
# A gap below this is zero: computed from z-scores it is rounding noise, whose sign means nothing. [measured]
ZERO_GAP = 1e-12


def bootstrap_interval(right: ndarray, wrong: ndarray, resamples: int = RESAMPLES, seed: int = SEED) -> list[float]:
    """95 % percentile interval of the pooled AUC over resampled pairs, on fixed out-of-fold scores [R, n] each.

    With several foldings (R > 1) resample number b uses folding b mod R.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    num_foldings, num_pairs = right.shape
    aucs = []
    for index in range(resamples):
        some = random.integers(0, num_pairs, num_pairs)
        folding = index % num_foldings
        aucs.append(pooled_auc(right[folding, some], wrong[folding, some]))
    return [float(end) for end in np.percentile(aucs, [2.5, 97.5])]


def swap_p_value(fits: Fits, foldings: ndarray, observed: float, permutations: int, seed: int = SEED) -> float:
    """P of the audit under swaps of right and wrong within pairs: (1 + #{null >= observed}) / (B + 1).

    The whole cross-validation is refitted for each swap, with folding b mod R; one-sided.
    """
    import numpy as np

    random = np.random.default_rng(seed)
    reached = 0
    per_batch = 40
    for start in range(0, permutations, per_batch):
        count = min(per_batch, permutations - start)
        swapped = random.random((count, fits.num_pairs)) < 0.5
        labels = np.empty((count, 2 * fits.num_pairs))
        labels[:, 0::2], labels[:, 1::2] = ~swapped, swapped
        logits = fits.held_out(foldings[np.arange(start, start + count) % len(foldings)], labels)
        for row, is_right in zip(logits, labels > 0, strict=True):
            reached += pooled_auc(row[is_right], row[~is_right]) >= observed
    return (1 + reached) / (permutations + 1)


def shuffle_p_value(
    rows: ndarray, labels: ndarray, folds: ndarray, observed: float, permutations: int, seed: int = SEED
) -> float:
    """P under plain shuffles of the labels of flat rows [n, d]: for data without pairs, where a swap is degenerate."""
    import numpy as np

    from strop.core.audit.probe import out_of_fold, score

    random = np.random.default_rng(seed)
    reached = 0
    for _ in range(permutations):
        shuffled = random.permutation(labels)
        reached += score(out_of_fold(rows, shuffled, folds), shuffled, paired=False).auc >= observed
    return (1 + reached) / (permutations + 1)


def is_swappable(groups: Sequence[Any], labels: Sequence[bool]) -> bool:
    """Whether labels can be swapped within groups: every group is one right and one wrong text."""
    members: dict[Any, list[bool]] = {}
    for group, label in zip(groups, labels, strict=True):
        members.setdefault(group, []).append(label)
    return all(sorted(some) == [False, True] for some in members.values())


def feature_table(rows: ndarray, names: Sequence[str] = NAMES) -> list[dict[str, Any]]:
    """For each feature of pairs [n, 2, d]: means, standardised gap, one-feature AUC, coefficient of the full fit.

    The gap is mean(right) - mean(wrong) in standard deviations over all rows; one below 1e-12 is reported as 0.
    """
    import numpy as np

    fits = Fits(rows)
    weights = fits.weights(np.ones((1, 2 * len(rows))))[0]
    table = []
    for index, name in enumerate(names):
        right, wrong = rows[:, 0, index], rows[:, 1, index]
        spread = rows[:, :, index].std()
        gap = float((right.mean() - wrong.mean()) / spread) if spread > 0 else 0.0
        table.append(
            {
                "feature": name,
                "mean_correct": float(right.mean()),
                "mean_incorrect": float(wrong.mean()),
                "gap": 0.0 if abs(gap) < ZERO_GAP else gap,
                "auc": pooled_auc(right, wrong),
                "coefficient": float(weights[index]),
            }
        )
    return table


def ablations(rows: ndarray, foldings: ndarray) -> dict[str, float]:
    """Mean audit AUC [R foldings] without each feature and without each group of features. Six features only."""
    left_out = {name: (name,) for name in NAMES} | GROUPS
    found = {}
    for name, members in left_out.items():
        kept = [index for index, feature in enumerate(NAMES) if feature not in members]
        found[name] = float(Fits(rows[:, :, kept]).aucs(foldings).mean())
    return found


