"""Adaptive attempts: make them in rounds and stop at a task once its verdict is worth no more of them.

What is minimised is known here: a task's verdict follows from its pass rate by the band, it is wrong where the true
rate lies in another region than the one it names, and a prior says how likely each true rate is
(`strop.core.tasks.prior`). So the best rule can be computed instead of guessed. Two are offered:

* `cheapest_plan`: the rule that needs the fewest attempts on average for a wanted share of right verdicts. Optimal
  stopping by dynamic programming over (successes, attempts): at a price c for an attempt, a task stops where the
  expected loss of stopping is at most that of going on; c is raised until the share of wrong verdicts reaches what is
  asked. It spends attempts where they change verdicts, and gives up early on tasks at the edge of the band.
* `confidence_plan`: a task stops once its verdict is right with the asked probability, given its attempts.

Both are tables over (attempts, successes), so that a run can say beforehand what it will cost and why it stopped. Our
choice: the paper (frognano sheet, 1.3) makes a fixed, undisclosed number of attempts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol

from strop.core.errors import UsageError
from strop.core.records import Record, Task
from strop.core.tasks.calibration import ACCEPT, TOO_HARD, Rule, Tally

if TYPE_CHECKING:
    from strop.core.tasks.prior import BetaMixture

# Prices tried in the search for the cheapest plan: from "attempts are free" to "an attempt costs a wrong verdict".
PRICES = (1e-12, 1.0)
NUM_BISECTIONS = 60
# Sequences of more attempts have probabilities too near to the smallest float.
MOST_ATTEMPTS = 512


class Attempts(Protocol):
    """What makes attempts: for each (task record, its view, sample indices) the rollout records, in that order."""

    def attempt(self, requests: Sequence[tuple[Record, Task, range]]) -> Iterator[Record]:
        """Rollouts of all requests. A task that cannot be attempted gives none and is reported by the maker."""
        ...


@dataclass(frozen=True, slots=True)
class Plan:
    """When to stop: `stops[n][s]` after n attempts with s successes, `confidences[n][s]` = P(verdict right | s, n).

    `expected_attempts` and `expected_errors` (share of wrong verdicts) are exact means over tasks drawn from `prior`;
    `asked` is the confidence that was asked for, a task's own or the mean, as `per_task` says.
    """

    rule: Rule
    prior: BetaMixture
    max_attempts: int
    round_size: int
    stops: list[list[bool]]
    confidences: list[list[float]]
    expected_attempts: float
    expected_errors: float
    asked: float
    per_task: bool

    @property
    def is_reached(self) -> bool:
        """Whether the plan gives the confidence asked of it (a task's own cannot be promised)."""
        return self.per_task or 1 - self.expected_errors >= self.asked - 1e-12

    def confidence(self, successes: int, attempts: int) -> float:
        """The posterior probability that the verdict on a task with these attempts is right."""
        if attempts <= self.max_attempts:
            return self.confidences[attempts][successes]
        return _confidence(self.prior, self.rule, successes, attempts)

    def settled(self, successes: int, attempts: int) -> bool:
        """Whether no more attempts are wanted for what they would bring, rather than because they ran out."""
        if attempts < self.max_attempts and self.stops[attempts][successes]:
            return True
        return attempts > 0 and self.confidence(successes, attempts) >= self.asked

    def next_round(self, progress: Progress) -> int:
        """How many attempts a task gets next; 0 ends it.

        Errors of the machine are made up for, but a task with as many errors as attempts allowed is left.
        """
        attempts = progress.tally.attempts
        if attempts >= self.max_attempts or progress.tally.errors >= self.max_attempts:
            return 0
        if self.stops[attempts][progress.tally.successes]:
            return 0
        return min(self.round_size, self.max_attempts - attempts)

    def replay(self, tally: Tally) -> Tally:
        """The attempts that the plan would have made of those in `tally`.

        A round is filled from the attempts that count; errors of the machine are kept in the count.
        """
        used = Progress()
        while size := self.next_round(used):
            given = tally.outcomes[used.tally.attempts : used.tally.attempts + size]
            used.tally.outcomes += given
            if len(given) < size:
                break
        return Tally(used.tally.outcomes, tally.errors, tally.stale, tally.caps)

    def describe(self) -> list[str]:
        """The plan in words: for each number of attempts after which a task can stop, at which successes it does."""
        lines = []
        for attempts in range(self.round_size, self.max_attempts + 1, self.round_size):
            stops: dict[str, list[int]] = {}
            for successes in range(attempts + 1):
                if self.stops[attempts][successes]:
                    stops.setdefault(self.rule.verdict(successes, attempts), []).append(successes)
            parts = [f"{verdict} at {_spans(found)}" for verdict, found in stops.items()]
            lines.append(f"after {attempts}: " + ("; ".join(parts) if parts else "go on"))
        return lines


@dataclass(slots=True)
class Progress:
    """How far the attempts at one task are. `tally` says what counts; `made` includes errors of the machine."""

    tally: Tally = field(default_factory=Tally)

    @property
    def made(self) -> int:
        """Attempts made, whatever became of them."""
        return self.tally.attempts + self.tally.errors


def _spans(numbers: Sequence[int]) -> str:
    first, last = numbers[0], numbers[-1]
    return f"{first} of them" if first == last else f"{first}-{last}"


def _confidence(prior: BetaMixture, rule: Rule, successes: int, attempts: int) -> float:
    assert rule.band is not None
    regions = prior.regions(successes, attempts, rule.band)
    return regions[_region(rule.verdict(successes, attempts))]


def _region(verdict: str) -> int:
    return 0 if verdict == TOO_HARD else 1 if verdict == ACCEPT else 2


class _Masses:
    """Joint masses of a sequence of attempts and of its verdict being wrong: arrays `path[n][s]`, `wrong[n][s]`.

    A sequence's mass is the sum of those of its two continuations, so only the longest ones are integrated.
    """

    def __init__(self, prior: BetaMixture, rule: Rule, max_attempts: int) -> None:
        import numpy as np

        assert rule.band is not None
        regions_SR = np.array(prior.masses(max_attempts, rule.band))
        self.path: list[Any] = []
        self.wrong: list[Any] = []
        for attempts in range(max_attempts, -1, -1):
            total_S = regions_SR.sum(axis=1)
            # Without attempts nothing is said, which is as bad as saying something wrong.
            right_S = np.zeros(1)
            if attempts:
                named_S = [_region(rule.verdict(successes, attempts)) for successes in range(attempts + 1)]
                right_S = regions_SR[np.arange(attempts + 1), named_S]
            self.path.append(total_S)
            self.wrong.append(total_S - right_S)
            regions_SR = regions_SR[:-1] + regions_SR[1:]
        self.path.reverse()
        self.wrong.reverse()


def _evaluate(masses: _Masses, round_size: int, decide: Callable[[int, Any, Any], Any]) -> _Found:
    """Backward induction over the number of attempts n under a stopping rule.

    `decide(n, attempts_S, wrong_S)` says at which s = 0..n a task stops, given the masses of attempts still to come and
    of wrong verdicts if it goes on. The first round is always made.
    """
    import numpy as np

    most = len(masses.path) - 1
    stops: list[Any] = [None] * most + [np.ones(most + 1, bool)]
    attempts: list[Any] = [None] * most + [np.zeros(most + 1)]
    wrong: list[Any] = [None] * most + [masses.wrong[most]]
    for n in range(most - 1, -1, -1):
        size = min(round_size, most - n)
        ways = [math.comb(size, j) for j in range(size + 1)]
        attempts_S = size * masses.path[n] + sum(w * attempts[n + size][j : j + n + 1] for j, w in enumerate(ways))
        wrong_S = sum(w * wrong[n + size][j : j + n + 1] for j, w in enumerate(ways))
        stops[n] = decide(n, attempts_S, wrong_S) if n else np.zeros(1, bool)
        attempts[n] = np.where(stops[n], 0.0, attempts_S)
        wrong[n] = np.where(stops[n], masses.wrong[n], wrong_S)
    return _Found(stops, float(attempts[0][0]), float(wrong[0][0]))


@dataclass(frozen=True, slots=True)
class _Found:
    """A stopping rule with its expected attempts a task and its share of wrong verdicts."""

    stops: list[Any]
    attempts: float
    errors: float


def _at_price(masses: _Masses, round_size: int, price: float) -> _Found:
    """The rule that minimises P(wrong verdict) + price * attempts."""
    return _evaluate(masses, round_size, lambda n, attempts_S, wrong_S: masses.wrong[n] <= price * attempts_S + wrong_S)


def default_round_size(attempts: int) -> int:
    """Attempts at a task between two looks, for plans that are as right as `attempts` fixed ones: four at most.

    Rounds of one save little more (47 instead of 43 % at 8 attempts, 62 instead of 60 % at 16), but take four times as
    many turns of the engine.
    """
    return max(1, min(4, attempts // 2))


def _check(rule: Rule, max_attempts: int, round_size: int) -> None:
    if rule.band is None:
        raise UsageError(f"{rule.name} says nothing of the true rate, so no verdict can be settled; give a --band")
    if not 1 <= max_attempts <= MOST_ATTEMPTS:
        raise UsageError(f"--max-attempts {max_attempts}: expected 1 to {MOST_ATTEMPTS}")
    if not 1 <= round_size <= max_attempts:
        raise UsageError(f"--round-size {round_size}: expected 1 to --max-attempts, {max_attempts}")


def _plan(
    rule: Rule, prior: BetaMixture, round_size: int, masses: _Masses, found: _Found, asked: float, *, per_task: bool
) -> Plan:
    stops = [row.tolist() for row in found.stops]
    confidences = [(1 - w / p).tolist() for w, p in zip(masses.wrong, masses.path, strict=True)]
    most = len(stops) - 1
    return Plan(rule, prior, most, round_size, stops, confidences, found.attempts, found.errors, asked, per_task)


def cheapest_plan(rule: Rule, prior: BetaMixture, *, errors: float, max_attempts: int, round_size: int = 1) -> Plan:
    """The cheapest plan, of those that are optimal at some price, whose share of wrong verdicts is at most `errors`.

    Such plans lie apart, so it can be more right than asked; no stopping rule that is as right takes fewer attempts on
    average. Where `max_attempts` cannot bring the share down so far, the plan that comes nearest (`is_reached` is then
    false). Raises UsageError for a rule that is not about the true rate.
    """
    _check(rule, max_attempts, round_size)
    masses = _Masses(prior, rule, max_attempts)
    low, high = PRICES
    best = _at_price(masses, round_size, low)
    for _ in range(NUM_BISECTIONS):
        middle = math.sqrt(low * high)
        found = _at_price(masses, round_size, middle)
        if found.errors <= errors:
            low, best = middle, found
        else:
            high = middle
    return _plan(rule, prior, round_size, masses, best, 1 - errors, per_task=False)


def confidence_plan(
    rule: Rule, prior: BetaMixture, *, confidence: float, max_attempts: int, round_size: int = 1
) -> Plan:
    """The plan that stops at a task once P(verdict right | its attempts) >= `confidence`. Raises UsageError."""
    _check(rule, max_attempts, round_size)
    if not 0.5 <= confidence < 1:
        raise UsageError(f"--confidence {confidence}: expected at least 0.5 and less than 1")
    masses = _Masses(prior, rule, max_attempts)
    found = _evaluate(masses, round_size, lambda n, _, __: masses.wrong[n] <= (1 - confidence) * masses.path[n])
    return _plan(rule, prior, round_size, masses, found, confidence, per_task=True)


@lru_cache(maxsize=64)
def fixed_errors(rule: Rule, prior: BetaMixture, attempts: int) -> float:
    """The share of wrong verdicts after a fixed number of attempts at each task, over tasks drawn from `prior`."""
    assert rule.band is not None
    return math.fsum(
        math.comb(attempts, successes) * (math.fsum(regions) - regions[_region(rule.verdict(successes, attempts))])
        for successes, regions in enumerate(prior.masses(attempts, rule.band))
    )


@dataclass(frozen=True, slots=True)
class PriorCheck:
    """How tasks' first attempts compare with the prior: tasks with 0, 1, ... successes, seen and expected."""

    seen: list[int]
    expected: list[float]
    p_value: float


def check_prior(prior: BetaMixture, outcomes: Sequence[bytes | bytearray], size: int) -> PriorCheck:
    """A likelihood-ratio (G) test of the prior on the first `size` attempts of each task that has so many.

    `size` is 1 or 2, and no stopping may have chosen which tasks have so many. A plan is as good as its prior; a small
    p-value says that the tasks are of another kind than it describes.
    """
    seen = [0] * (size + 1)
    for made in outcomes:
        if len(made) >= size:
            seen[made[:size].count(1)] += 1
    total = sum(seen)
    expected = [total * prior.probability(successes, size) for successes in range(size + 1)]
    g = max(0.0, 2 * math.fsum(o * math.log(o / e) for o, e in zip(seen, expected, strict=True) if o))
    # The chi-squared survival function with one and with two degrees of freedom.
    return PriorCheck(seen, expected, math.erfc(math.sqrt(g / 2)) if size == 1 else math.exp(-g / 2))
