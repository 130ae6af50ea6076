"""What is believed of a task's true pass rate before any attempt: a mixture of Beta distributions.

A mixture stays one under attempts, so that all posteriors are in closed form: after s successes and f failures the
component w Beta(a, b) has weight proportional to w B(a+s, b+f)/B(a, b) and is Beta(a+s, b+f). Pure Python.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

from msgspec import Struct

from strop.core.errors import UsageError
from strop.core.records import Record
from strop.core.tasks.calibration import Tally, read_attempt

# A component knows at most as much of a task as this many attempts would tell. Without the bound, maximum likelihood on
# a few tries a task runs towards a point mass (the likelihood is flat there: 0.05 nats over 712 pairs of the trials).
MAX_CONCENTRATION = 100.0
MIN_SHAPE = 1e-3
# Of the continued fraction of I_x(a, b): about sqrt(max(a, b)) terms are needed.
MAX_TERMS = 10_000
TINY = 1e-300


# EM keeps a component that has no task left instead of dividing by nothing.
MIN_WEIGHT = 1e-12
START_MEANS = (0.02, 0.2, 0.8)
MAX_CLIMBS = 2000
# Distance (in logs of weights and shapes) that a step covers when it has arrived.
FIXED_POINT = 1e-8

Components = list[tuple[float, float, float]]
Table = list[tuple[int, int, float]]


@dataclass(frozen=True, slots=True)
class BetaMixture:
    """Components (weight, a, b): weights above 0 that sum to 1, shapes above 0."""

    components: tuple[tuple[float, float, float], ...]
    name: str

    def masses(self, num_attempts: int, cuts: tuple[float, float]) -> list[tuple[float, float, float]]:
        """For s = 0..n: the integrals of p^s (1-p)^(n-s) under the mixture, below, between and above the two `cuts`.

        They are the joint masses of one sequence with s successes and of the true rate's region; their sum is the
        sequence's probability.
        """
        return [self._mass(successes, num_attempts - successes, cuts) for successes in range(num_attempts + 1)]

    def _mass(self, successes: int, failures: int, cuts: tuple[float, float]) -> tuple[float, float, float]:
        below = between = above = 0.0
        for weight, a, b in self.components:
            mass = weight * math.exp(log_beta(a + successes, b + failures) - log_beta(a, b))
            first = incomplete_beta(a + successes, b + failures, cuts[0])
            # The upper tail by symmetry: 1 - I would cancel.
            last = incomplete_beta(b + failures, a + successes, 1 - cuts[1])
            below += mass * first
            above += mass * last
            between += mass * max(0.0, 1 - first - last)
        return below, between, above

    def regions(self, successes: int, attempts: int, cuts: tuple[float, float]) -> tuple[float, float, float]:
        """Posterior probabilities that the true rate lies below, between and above `cuts`, after these attempts."""
        below, between, above = self._mass(successes, attempts - successes, cuts)
        total = below + between + above
        return below / total, between / total, above / total

    def probability(self, successes: int, attempts: int) -> float:
        """Of s successes in n attempts, in any order (beta-binomial)."""
        return math.comb(attempts, successes) * math.exp(self.log_sequence(successes, attempts - successes))

    def log_sequence(self, successes: int, failures: int) -> float:
        """Log-probability (nats) of one sequence with so many successes and failures."""
        logs = [
            math.log(weight) + log_beta(a + successes, b + failures) - log_beta(a, b)
            for weight, a, b in self.components
        ]
        top = max(logs)
        return top + math.log(math.fsum(math.exp(value - top) for value in logs))


# Fitted by `fit_mixture` (two components) to the 712 pairs of model and task in the evaluation assets of the public
# repository hamishivi/tmax (Apache-2.0): 8 models at the 89 tasks of Terminal-Bench 2.0, five tries each, 3,505
# attempts that count; an agent's timeout is a failed attempt, failures of the machinery and trials without a reward are
# left out. Its first component lies on the bound MAX_CONCENTRATION. tests/core/tasks/test_prior.py fits it again.
TERMINAL = BetaMixture(((0.732493, 1.427985, 98.572015), (0.267507, 1.689608, 0.505215)), "terminal")
UNIFORM = BetaMixture(((1.0, 1.0, 1.0),), "uniform")
NAMED = {prior.name: prior for prior in (TERMINAL, UNIFORM)}


def with_doubt(fitted: BetaMixture, num_tasks: int) -> BetaMixture:
    """The mixture with a uniform component that weighs as one task beside the `num_tasks` it was fitted to.

    So a prior from few tasks is never certain of what it did not see.
    """
    share = 1 / (num_tasks + 1)
    kept = tuple((weight * (1 - share), a, b) for weight, a, b in fitted.components)
    return BetaMixture((*kept, (share, 1.0, 1.0)), fitted.name)


class _Calibrated(Struct):
    successes: int
    attempts: int


def count_records(records: Iterable[Record]) -> Counter[tuple[int, int]]:
    """{(successes, attempts): tasks} of an earlier run: from its calibrated tasks, or its rollouts if there are none.

    Raises DataError for a bad record.
    """
    calibrated: Counter[tuple[int, int]] = Counter()
    tallies: dict[tuple[str, int], Tally] = {}
    for record in records:
        if record.kind == "rollout":
            attempt = read_attempt(record)
            tallies.setdefault((attempt.task, attempt.version), Tally()).add(attempt.outcome)
        elif record.kind == "task":
            counted = record.get("calibration", _Calibrated | None)
            if counted is not None and counted.attempts:
                calibrated[counted.successes, counted.attempts] += 1
    return calibrated or Counter((tally.successes, tally.attempts) for tally in tallies.values() if tally.attempts)


def parse_components(text: str) -> BetaMixture:
    """`W:A:B[,W:A:B]...` as a mixture, weights scaled to sum to 1. Raises UsageError."""
    try:
        components = [tuple(float(part) for part in item.split(":")) for item in text.split(",")]
        if any(len(component) != 3 or not all(0 < part < math.inf for part in component) for component in components):
            raise ValueError
    except ValueError:
        raise UsageError(f"--prior {text}: expected W:A:B[,W:A:B]..., all above 0, as in 0.7:1:20,0.3:2:1") from None
    total = math.fsum(component[0] for component in components)
    return BetaMixture(tuple((w / total, a, b) for w, a, b in components), text)


def log_beta(a: float, b: float) -> float:
    """Logarithm of Euler's Beta function."""
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


def incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete Beta function I_x(a, b), the probability of at most x under Beta(a, b).

    By its continued fraction (DLMF 8.17.22), evaluated from the front (Lentz 1976), on the side where it converges
    fast; within 2e-12 of scipy's for shapes from 0.003 to 1000.

    >>> round(incomplete_beta(2, 3, 0.5), 12)
    0.6875
    """
    if x <= 0 or x >= 1:
        return float(x >= 1)
    front = math.exp(a * math.log(x) + b * math.log1p(-x) - log_beta(a, b))
    if x < (a + 1) / (a + b + 2):
        return front / a * _fraction(a, b, x)
    return 1 - front / b * _fraction(b, a, 1 - x)


def _fraction(a: float, b: float, x: float) -> float:
    # 1/(1 + d1/(1 + d2/(1 + ...))), Lentz's ratios of successive convergents multiplied up.
    value, upper, lower = 1.0, 1.0, 0.0
    for j in range(1, MAX_TERMS):
        m = j // 2
        if j % 2:
            term = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        else:
            term = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        lower = 1 / (1 + term * lower or TINY)
        upper = 1 + term / upper or TINY
        value *= upper * lower
        if abs(upper * lower - 1) < 1e-15:
            break
    return 1 / value


def fit_mixture(counts: Mapping[tuple[int, int], int], num_components: int = 2, name: str = "fitted") -> BetaMixture:
    """Maximum likelihood of a Beta mixture from counts {(successes, attempts): number of tasks}.

    EM over components; the shapes climb by the fixed point for the Polya distribution of Minka 2000 ("Estimating a
    Dirichlet distribution"), whose digamma differences are finite sums for whole counts. A component's a + b stays at
    or below `MAX_CONCENTRATION`. Several fixed starts, the best likelihood wins; components by ascending mean.
    Raises ValueError without any attempt.
    """
    table = [(s, n, float(tasks)) for (s, n), tasks in sorted(counts.items()) if n > 0 and tasks > 0]
    if not table:
        raise ValueError("no attempts to fit a prior to")
    starts = combinations(START_MEANS, num_components)
    fits = [_climb([(1 / num_components, 2 * mean, 2 * (1 - mean)) for mean in start], table) for start in starts]
    components = max(fits, key=lambda fit: _log_likelihood(fit, table))
    return BetaMixture(tuple(sorted(components, key=lambda part: part[1] / (part[1] + part[2]))), name)


def _log_likelihood(components: Components, table: Table) -> float:
    mixture = BetaMixture(tuple(components), "")
    return math.fsum(tasks * mixture.log_sequence(s, n - s) for s, n, tasks in table)


def _climb(components: Components, table: Table) -> Components:
    """EM to its fixed point, each pair of steps extrapolated (SQUAREM, Varadhan and Roland 2008) where that climbs."""
    value = _log_likelihood(components, table)
    for _ in range(MAX_CLIMBS):
        first = _step(components, table)
        second = _step(first, table)
        start, middle, end = (_logs(step) for step in (components, first, second))
        change = [m - s for s, m in zip(start, middle, strict=True)]
        bend = [e - 2 * m + s for s, m, e in zip(start, middle, end, strict=True)]
        size, curve = math.hypot(*change), math.hypot(*bend)
        if size < FIXED_POINT or curve == 0:
            return second
        stride = max(1.0, size / curve)
        far = [s + 2 * stride * c + stride * stride * d for s, c, d in zip(start, change, bend, strict=True)]
        leap = _step(_within_bounds(far), table)
        reached = _log_likelihood(leap, table)
        components, value = (leap, reached) if reached >= value else (second, _log_likelihood(second, table))
    return components


def _logs(components: Components) -> list[float]:
    return [math.log(part) for component in components for part in component]


def _within_bounds(logs: list[float]) -> Components:
    parts = [math.exp(min(max(part, -50.0), 50.0)) for part in logs]
    return _bounded([(parts[i], parts[i + 1], parts[i + 2]) for i in range(0, len(parts), 3)])


def _bounded(components: Components) -> Components:
    total = math.fsum(weight for weight, _, _ in components)
    kept = []
    for weight, a, b in components:
        a, b = max(a, MIN_SHAPE), max(b, MIN_SHAPE)
        scale = min(1.0, MAX_CONCENTRATION / (a + b))
        kept.append((max(weight / total, MIN_WEIGHT), a * scale, b * scale))
    return kept


def _step(components: Components, table: Table) -> Components:
    """One EM step: each task's share in each component, then one fixed-point step of each component's shapes."""
    shares = []
    for s, n, tasks in table:
        logs = [math.log(w) + log_beta(a + s, b + n - s) - log_beta(a, b) for w, a, b in components]
        top = max(logs)
        masses = [math.exp(value - top) for value in logs]
        total = math.fsum(masses)
        shares.append([tasks * mass / total for mass in masses])
    stepped = []
    for k, (_, a, b) in enumerate(components):
        rises_a = math.fsum(share[k] * _rise(a, s) for share, (s, _, _) in zip(shares, table, strict=True))
        rises_b = math.fsum(share[k] * _rise(b, n - s) for share, (s, n, _) in zip(shares, table, strict=True))
        rises = math.fsum(share[k] * _rise(a + b, n) for share, (_, n, _) in zip(shares, table, strict=True))
        weight = math.fsum(share[k] for share in shares)
        stepped.append((weight, a * rises_a / rises, b * rises_b / rises))
    return _bounded(stepped)


def _rise(shape: float, count: int) -> float:
    """digamma(shape + count) - digamma(shape)."""
    return math.fsum(1 / (shape + i) for i in range(count))
