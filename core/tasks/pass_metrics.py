"""Pass rates over a set of tasks: pass@1, avg@k, unbiased pass@k, with bootstrap intervals over tasks.

Three different things that are often mixed up:

* pass@1: the chance that one attempt succeeds, averaged over tasks; all attempts are used.
* avg@k: the mean success of k attempts at each task. It estimates the same as pass@1 and is never called pass@k.
* pass@k: the chance that at least one of k attempts succeeds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from strop.core.errors import UsageError
from strop.core.seeds import derive_seed

NUM_RESAMPLES = 10_000


def pass_at_k(attempts: int, successes: int, k: int) -> float:
    """Unbiased pass@k of one task, 1 - C(n-c, k)/C(n, k), as a product that neither overflows nor cancels.

    Chen et al. 2021 (arXiv:2107.03374), section 2.1: 1 - prod_{i=n-c+1}^{n} (1 - k/i). Needs 1 <= k <= n and
    0 <= c <= n; ValueError otherwise.

    >>> pass_at_k(5, 2, 2)
    0.7
    """
    if not 1 <= k <= attempts or not 0 <= successes <= attempts:
        raise ValueError(f"pass@{k} of {successes} successes in {attempts} attempts")
    if attempts - successes < k:
        return 1.0
    return 1.0 - math.prod(1 - k / i for i in range(attempts - successes + 1, attempts + 1))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `num_tasks` tasks with the ends of its 95 % interval; `num_left_out` had too few attempts.

    `value` is None without any task, the ends without at least two.
    """

    name: str
    value: float | None
    low: float | None
    high: float | None
    num_tasks: int
    num_left_out: int


def bootstrap_interval(
    values: Sequence[float], seed: int, num_resamples: int = NUM_RESAMPLES
) -> tuple[float, float] | None:
    """Ends of the 95 % percentile bootstrap interval of the mean of `values`, or None for fewer than two values.

    Tasks are what is resampled: they differ more than attempts at one task do, and the interval speaks of other tasks
    of the same kind. Equal values are drawn together by their multinomial count, which has the same distribution as
    drawing one by one. Where all values are equal the interval is that one point, however few they are.
    """
    if len(values) < 2:
        return None
    import numpy as np

    counts = Counter(values)
    distinct_D = np.array(sorted(counts))
    weights_D = np.array([counts[value] for value in sorted(counts)]) / len(values)
    draws_BD = np.random.default_rng(seed).multinomial(len(values), weights_D, size=num_resamples)
    low, high = np.quantile(draws_BD @ distinct_D / len(values), [0.025, 0.975])
    return float(low), float(high)


def estimate(name: str, values: Sequence[float], num_left_out: int, seed: int) -> Estimate:
    """The mean of per-task values with its interval."""
    if not values:
        return Estimate(name, None, None, None, 0, num_left_out)
    ends = bootstrap_interval(values, derive_seed(seed, "bootstrap", name))
    low, high = ends if ends is not None else (None, None)
    return Estimate(name, math.fsum(values) / len(values), low, high, len(values), num_left_out)


def pass_estimates(outcomes: Sequence[bytes | bytearray], ks: Sequence[int], seed: int) -> list[Estimate]:
    """pass@1, then avg@k and pass@k for each k > 1, over tasks given by their outcomes (1 a success, 0 a failure).

    Tasks without attempts are left out of all; those with fewer than k of avg@k and pass@k. avg@k takes a task's first
    k attempts in order, so that every task weighs by the same number.
    """
    counted = [task for task in outcomes if len(task)]
    missing = len(outcomes) - len(counted)
    found = [estimate("pass@1", [pass_at_k(len(task), task.count(1), 1) for task in counted], missing, seed)]
    for k in sorted(set(ks) - {1}):
        enough = [task for task in counted if len(task) >= k]
        left_out = len(outcomes) - len(enough)
        found.append(estimate(f"avg@{k}", [task[:k].count(1) / k for task in enough], left_out, seed))
        found.append(estimate(f"pass@{k}", [pass_at_k(len(task), task.count(1), k) for task in enough], left_out, seed))
    return found


def parse_ks(text: str) -> list[int]:
    """`1,4,8` as numbers. Raises UsageError unless all are whole and at least 1."""
    try:
        ks = [int(part) for part in text.split(",")]
    except ValueError:
        ks = [0]
    if min(ks) < 1:
        raise UsageError(f"--k {text}: expected whole numbers from 1 on, e.g. 1,4,8")
    return ks
