"""Pruning by a linear program: the most pairs whose mean differences stay within bounds, and a search over the bounds.

The logistic probe of a balanced set can only use mean differences between right and wrong answers: with none, its
weights are zero. So for bounds lo_j, hi_j on the mean standardised difference of each feature the largest set is

    max sum_i w_i   with   lo_j sum_i w_i <= sum_i w_i d_ij <= hi_j sum_i w_i,   0 <= w_i <= 1,

a linear program whose solution is whole but for a pair or so per bound (rounded at 1/2). The bounds are searched
(differential evolution), each set scored by its AUC averaged over many random foldings, so that no single one can be
fitted; the best are measured again on other foldings, and the largest that keeps the threshold there is taken. No
part of this is the release's. [derived for this project]
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.core.audit.fast import Fits, pair_foldings, quick_aucs
from strop.core.audit.rules import is_auditable

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy import ndarray

VALIDATION_FOLDINGS = 200
NUM_VALIDATED = 16
POPULATION = 8
# The share of evaluations that are drawn afresh before candidates are crossed.
FRESH_SHARE = 0.25
BISECTIONS = 9
# Sets whose AUC is further off the threshold say nothing about it.
AUC_REACH = 0.004
MIN_WIDTH = 0.002
# How far the chosen bounds may be widened at the end, and in how many halvings.
MAX_STRETCH, STRETCHES = 1.3, 6


@dataclass(slots=True)
class Found:
    """What a pruning found: indices of kept pairs (None: no set keeps the threshold), and how it came there.

    `trajectory` holds points {pairs, auc, ...} along the way, the whole set first; `tried` counts the sets scored.
    """

    keep: ndarray | None
    trajectory: list[dict[str, Any]] = field(default_factory=list)
    tried: int = 0
    details: dict[str, Any] = field(default_factory=dict)


class Program:
    """The linear program over pairs with standardised differences `differences` [n, d]."""

    def __init__(self, differences: ndarray) -> None:
        self.differences = differences

    def solve(self, low: ndarray, high: ndarray) -> ndarray | None:
        """Indices of the kept pairs for bounds [d], [d] around 0; None where there is no solution."""
        import numpy as np
        from scipy.optimize import linprog

        matrix = np.vstack([(self.differences - high).T, (low - self.differences).T])
        done = linprog(
            -np.ones(len(self.differences)), A_ub=matrix, b_ub=np.zeros(len(matrix)), bounds=(0, 1), method="highs"
        )
        if done.x is None:
            return None
        return np.flatnonzero(done.x > 0.5)


@dataclass(slots=True)
class _Candidate:
    value: float
    bounds: ndarray
    auc: float
    keep: ndarray


class _Search:
    def __init__(self, rows: ndarray, groups: ndarray, threshold: float, num_foldings: int, seed: int) -> None:
        flat = rows.reshape(-1, rows.shape[2])
        scale = flat.std(axis=0)
        self.varying = scale > 0
        self.rows, self.groups, self.threshold = rows, groups, threshold
        self.num_foldings, self.seed = num_foldings, seed
        self.program = Program((rows[:, 0] - rows[:, 1])[:, self.varying] / scale[self.varying])
        self.size = int(self.varying.sum())
        self.known: dict[bytes, _Candidate] = {}
        self.slope = 1.0
        self.widest: tuple[_Candidate, float] | None = None

    def auc(self, keep: ndarray) -> float:
        foldings = pair_foldings(self.groups[keep], self.num_foldings, (self.seed, 1))
        return float(quick_aucs(Fits(self.rows[keep]), foldings).mean())

    def evaluate(self, bounds: ndarray) -> _Candidate | None:
        keep = self.program.solve(bounds[: self.size], bounds[self.size :])
        if keep is None or not is_auditable(self.groups[keep]):
            return None
        key = keep.tobytes()
        if key not in self.known:
            self.known[key] = _Candidate(0.0, bounds, self.auc(keep), keep)
        found = self.known[key]
        found.value = self.value(found)
        return found

    def value(self, found: _Candidate) -> float:
        """Pairs kept, less what the AUC costs at the going rate of pairs for AUC; far from the threshold, nothing."""
        excess = found.auc - self.threshold
        return len(found.keep) - self.slope * excess - 1e5 * max(0.0, abs(excess) - AUC_REACH)

    def bisect(self, points: list[dict[str, Any]]) -> float | None:
        """The common bound at which the threshold is met, with the rate of pairs for AUC there; None: nowhere."""
        import numpy as np

        ones = np.ones(self.size)
        low, high = 0.0, 2 * float(np.abs(self.program.differences.mean(axis=0)).max())
        passed: list[tuple[int, float]] = []
        for step in range(BISECTIONS + 1):
            # The tightest bound first: if even that leaks, no bound will do.
            bound = 0.0 if step == 0 else (low + high) / 2
            found = self.evaluate(np.concatenate([-ones * bound, ones * bound]))
            if found is None or (step == 0 and found.auc > self.threshold):
                return None
            passed.append((len(found.keep), found.auc))
            points.append({"pairs": len(found.keep), "auc": found.auc, "bound": bound})
            if found.auc <= self.threshold:
                low = bound
            else:
                high = bound
        (n0, a0), (n1, a1) = passed[0], max(passed)
        self.slope = max(1.0, (n1 - n0) / max(1e-6, a1 - a0))
        return low

    def validate(self, keep: ndarray) -> tuple[float, float]:
        """Mean AUC over other foldings, and with one standard error as a margin, since the best of several is taken."""
        import numpy as np

        foldings = pair_foldings(self.groups[keep], VALIDATION_FOLDINGS, (self.seed, 3))
        aucs = Fits(self.rows[keep]).aucs(foldings)
        return float(aucs.mean()), float(aucs.mean() + aucs.std() / np.sqrt(len(aucs)))

    def stretch(self, best: _Candidate, mean: float) -> tuple[_Candidate, float]:
        """The chosen bounds, widened by one factor as far as the other foldings allow."""
        low, high = 1.0, MAX_STRETCH
        for _ in range(STRETCHES):
            factor = (low + high) / 2
            keep = self.program.solve(best.bounds[: self.size] * factor, best.bounds[self.size :] * factor)
            if keep is None or not is_auditable(self.groups[keep]) or self.validate(keep)[1] > self.threshold:
                high = factor
                continue
            low = factor
            if len(keep) > len((self.widest or (best, mean))[0].keep):
                self.widest = _Candidate(0.0, best.bounds * factor, self.auc(keep), keep), self.validate(keep)[0]
        return self.widest or (best, mean)

    def run(self, evaluations: int, scale: float, tick: Callable[[], None]) -> None:
        """Differential evolution over the bounds, around the common one; deterministic under the seed."""
        import numpy as np

        random = np.random.default_rng((self.seed, 2))
        people: list[_Candidate] = sorted(self.known.values(), key=lambda one: -self.value(one))
        for one in people:
            one.value = self.value(one)
        scale = max(scale, MIN_WIDTH)
        for step in range(evaluations):
            tick()
            people = sorted(people, key=lambda one: -one.value)[:POPULATION]
            if step < evaluations * FRESH_SHARE or len(people) < 3:
                low, high = random.uniform(0.1, 2.7, self.size), random.uniform(0.0, 3.3, self.size)
                bounds = scale * random.uniform(0.4, 1.0) * np.concatenate([-low, high])
            else:
                first, second, third = (
                    people[min(len(people) - 1, int(random.exponential(2)))].bounds for _ in range(3)
                )
                noise = random.normal(size=2 * self.size) * (random.random(2 * self.size) < 0.4)
                bounds = first + random.uniform(0.2, 0.9) * (second - third) + 0.18 * scale * noise
            if (bounds[self.size :] - bounds[: self.size] < MIN_WIDTH).any():
                continue
            found = self.evaluate(bounds)
            if found is not None and all(found is not one for one in people):
                people.append(found)


def lp_search(
    rows: ndarray,
    groups: ndarray,
    threshold: float,
    *,
    num_foldings: int,
    evaluations: int,
    seed: int,
    tick: Callable[[], None] = lambda: None,
) -> Found:
    """The largest set found of pairs `rows` [n, 2, d] whose mean AUC over random foldings is at most `threshold`.

    `groups` [n] share folds; `evaluations` bounds are tried, each on `num_foldings` foldings. `tick` is called
    for each.
    """
    import numpy as np

    everything = np.arange(len(rows))
    search = _Search(rows, groups, threshold, num_foldings, seed)
    whole = search.auc(everything)
    found = Found(None, [{"pairs": len(rows), "auc": whole}], tried=1)
    if whole <= threshold:
        found.keep = everything
        return found
    points: list[dict[str, Any]] = []
    scale = search.bisect(points) if search.size else None
    found.trajectory += sorted(points, key=lambda point: -point["pairs"])
    if scale is None:
        return found
    search.run(evaluations, scale, tick)
    found.tried += len(search.known)
    best: tuple[_Candidate, float] | None = None
    for one in sorted(search.known.values(), key=lambda one: -search.value(one))[:NUM_VALIDATED]:
        mean, with_margin = search.validate(one.keep)
        if with_margin <= threshold and (best is None or len(one.keep) > len(best[0].keep)):
            best = one, mean
    if best is None:
        # The search has fitted its foldings, or has found nothing close: the largest set well below will do.
        safe = [one for one in search.known.values() if one.auc <= threshold - AUC_REACH / 4]
        if not safe:
            return found
        chosen = max(safe, key=lambda one: len(one.keep))
        best = chosen, search.validate(chosen.keep)[0]
    best = search.stretch(*best)
    chosen, validated = best
    found.keep = chosen.keep
    found.trajectory.append({"pairs": len(chosen.keep), "auc": validated})
    found.details = {
        "low": chosen.bounds[: search.size].tolist(), "high": chosen.bounds[search.size :].tolist(),
        "search_auc": chosen.auc, "validation_auc": validated,
    }  # fmt: skip
    return found
