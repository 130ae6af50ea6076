"""Beyond linear: boosted trees on the six features, and pruning until they are near chance too.

Mean differences of zero blind the linear probe, not trees, which read counts and combinations. Two ways lead to sets
that trees cannot read: deleting the pairs that trees out of fold find easiest (AFLite's idea with trees), and the
linear program of search.py over indicators of steps and of pairs of steps, which bounds what shallow trees can split
on. Neither is the release's. [derived for this project]
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from strop.core.audit.fast import Fits, pair_foldings
from strop.core.audit.probe import Audit, audit_pairs
from strop.core.audit.rules import is_auditable
from strop.core.audit.search import Found, Program, lp_search

if TYPE_CHECKING:
    from numpy import ndarray

NUM_FOLDINGS = 8
SEARCH_FOLDINGS = 4
# The share of pairs that a round deletes.
ROUND_SHARE = 0.02
# Steps of a feature for the program: its quartiles; indicators rarer than this are left out.
QUANTILES = 4
RAREST = 0.02
BISECTIONS = 6
LINEAR_FOLDINGS = 100
ROUNDS_OF_BOTH = 6


def boosted_trees() -> Any:
    """100 boosted trees of depth 3, scikit-learn's other defaults, seed 0."""
    from sklearn.ensemble import HistGradientBoostingClassifier

    return HistGradientBoostingClassifier(max_iter=100, max_depth=3, random_state=0)


def tree_audits(rows: ndarray, groups: ndarray, num_foldings: int, seed: int | tuple[int, ...]) -> list[Audit]:
    """The audit of pairs [n, 2, d] by trees on each of `num_foldings` random foldings."""
    return [audit_pairs(rows, folds, boosted_trees) for folds in pair_foldings(groups, num_foldings, seed)]


def mean_auc(audits: list[Audit]) -> float:
    """Mean AUC over audits."""
    return sum(audit.auc for audit in audits) / len(audits)


def margin_prune(
    rows: ndarray, groups: ndarray, threshold: float, seed: int, tick: Callable[[], None] = lambda: None
) -> Found:
    """Deletes, a fiftieth a round, the pairs with the largest p(right) - p(wrong) until the trees' AUC is low enough.

    Each round draws its own foldings, so that none can be fitted.
    """
    import numpy as np

    left = np.arange(len(rows))
    found = Found(None)
    while is_auditable(groups[left]):
        audits = tree_audits(rows[left], groups[left], SEARCH_FOLDINGS, (seed, 4, found.tried))
        auc = mean_auc(audits)
        found.tried += 1
        found.trajectory.append({"pairs": len(left), "auc": auc})
        if auc <= threshold:
            found.keep = left
            break
        margin = np.mean([audit.probability[0::2] - audit.probability[1::2] for audit in audits], axis=0)
        drop = max(1, int(len(left) * ROUND_SHARE))
        left = np.delete(left, np.argsort(-margin, kind="stable")[:drop])
        tick()
    return found


def step_columns(rows: ndarray) -> ndarray:
    """Standardised differences [n, m] of the features, of their steps (x > quartile), and of products of two steps."""
    import numpy as np

    flat = rows.reshape(-1, rows.shape[2])
    columns = [rows[:, :, index] for index in range(rows.shape[2])]
    steps = []
    for index in range(rows.shape[2]):
        for cut in np.unique(np.quantile(flat[:, index], np.arange(1, QUANTILES) / QUANTILES)):
            step = (rows[:, :, index] > cut).astype(np.float64)
            if RAREST < step.mean() < 1 - RAREST:
                steps.append((index, step))
    columns += [step for _, step in steps]
    for place, (feature, step) in enumerate(steps):
        columns += [step * other for another, other in steps[:place] if another != feature]
    kept = [column for column in columns if column.std() > 0 and (step_mean(column) > RAREST or column.max() > 1)]
    return np.stack([(column[:, 0] - column[:, 1]) / column.std() for column in kept], axis=1)


def step_mean(column: ndarray) -> float:
    """How common a step is."""
    return float(abs(column).mean())


def program_prune(rows: ndarray, groups: ndarray, threshold: float, seed: int) -> Found:
    """The program over `step_columns` with one common bound, as loose as trees and the linear probe both allow."""
    import numpy as np

    program = Program(step_columns(rows))
    width = program.differences.shape[1]
    found = Found(None)
    low, high = 0.0, 0.2
    for step in range(BISECTIONS + 1):
        bound = 0.0 if step == 0 else (low + high) / 2
        keep = program.solve(np.full(width, -bound), np.full(width, bound))
        if keep is None or not is_auditable(groups[keep]):
            if step > 0:
                high = bound
            continue
        auc = worst_auc(rows[keep], groups[keep], seed)
        found.tried += 1
        found.trajectory.append({"pairs": len(keep), "auc": auc})
        if auc <= threshold:
            low = bound
            if found.keep is None or len(keep) > len(found.keep):
                found.keep = keep
        elif step > 0:
            high = bound
    return found


def worst_auc(rows: ndarray, groups: ndarray, seed: int) -> float:
    """The larger of the trees' and the linear probe's mean AUC over random foldings."""
    trees = mean_auc(tree_audits(rows, groups, NUM_FOLDINGS, (seed, 5)))
    return max(trees, linear_auc(rows, groups, seed))


def linear_auc(rows: ndarray, groups: ndarray, seed: int) -> float:
    """The linear probe's mean AUC over random foldings."""
    return float(Fits(rows).aucs(pair_foldings(groups, LINEAR_FOLDINGS, (seed, 5))).mean())


def prune_both(
    rows: ndarray,
    groups: ndarray,
    threshold: float,
    *,
    evaluations: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Found:
    """Prunes until neither trees nor the linear probe read the set: both ways, the larger set wins.

    One way is the program over steps; the other deletes what trees find easiest and then searches bounds for the linear
    probe, in turns, since each undoes a little of the other. `details` says what each way kept.
    """
    import numpy as np

    by_program = program_prune(rows, groups, threshold, seed)
    left: ndarray | None = np.arange(len(rows))
    points = list(by_program.trajectory)
    tried = by_program.tried
    for turn in range(ROUNDS_OF_BOTH):
        assert left is not None
        trees = margin_prune(rows[left], groups[left], threshold, seed + turn, tick)
        points += trees.trajectory
        tried += trees.tried
        if trees.keep is None:
            left = None
            break
        left = left[trees.keep]
        linear = lp_search(
            rows[left], groups[left], threshold, num_foldings=LINEAR_FOLDINGS, evaluations=evaluations // 4,
            seed=seed + turn, tick=tick,
        )  # fmt: skip
        tried += linear.tried
        if linear.keep is None:
            left = None
            break
        left = left[linear.keep]
        auc = worst_auc(rows[left], groups[left], seed)
        points.append({"pairs": len(left), "auc": auc})
        if auc <= threshold:
            break
    else:
        left = None
    kept = {
        "by_program": None if by_program.keep is None else len(by_program.keep),
        "by_margin": None if left is None else len(left),
    }
    ways = [way for way in (by_program.keep, left) if way is not None]
    best = max(ways, key=len) if ways else None
    return Found(best, points, tried, kept)
