"""What adaptive attempts save against a fixed number of them, at the same rate of wrong verdicts.

Run as a script: prints a table, in well under a minute. True rates are drawn from the Beta mixture fitted to the
terminal trials (`strop.core.tasks.prior.TERMINAL`), attempts from the rates; the truth is whether the rate lies in the
band. A fixed number of attempts and the plan see the same attempts of the same tasks. Intervals are over seeds
(Student's t). Below: what becomes of the same plans where the tasks are of another kind than the prior says, and of
plans whose prior was fitted to an earlier run over such tasks.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter
from dataclasses import dataclass

import numpy as np

from strop.core.tasks.adaptive import Plan, cheapest_plan, confidence_plan, default_round_size, fixed_errors
from strop.core.tasks.calibration import ACCEPT, Tally, band_rule
from strop.core.tasks.prior import TERMINAL, BetaMixture, fit_mixture, with_doubt

BAND = (0.2, 0.8)
RULE = band_rule(*BAND)
SEEDS = range(1, 9)
TASKS = 3000
T_95_7_DEGREES = 2.365
NUMBERS = (8, 16, 32)
BAR = 0.35
OTHER_TRUTHS = (
    TERMINAL,
    # One Beta instead of two, fitted to the same trials; BIC prefers it, by 14.
    BetaMixture(((1.0, 0.0746456, 0.2740678),), "one Beta, same trials"),
    BetaMixture(((1.0, 0.5, 0.5),), "Beta(1/2, 1/2)"),
    BetaMixture(((1.0, 1.0, 3.0),), "Beta(1, 3)"),
    BetaMixture(((1.0, 2.0, 3.0),), "Beta(2, 3)"),
    BetaMixture(((1.0, 1.0, 1.0),), "uniform"),
)


EARLIER_TASKS, EARLIER_ATTEMPTS = 200, 8


@dataclass
class Outcome:
    """One seed: shares of wrong verdicts and the share of attempts saved."""

    fixed: float
    adaptive: float
    saved: float


def draw(truth: BetaMixture, seed: int, num_attempts: int) -> tuple[np.ndarray, np.ndarray]:
    """True rates of TASKS tasks, and their attempts."""
    generator = np.random.default_rng([20261201, seed])
    weights, a, b = (np.array(column) for column in zip(*truth.components, strict=True))
    which = generator.choice(len(weights), TASKS, p=weights / weights.sum())
    rates = generator.beta(a[which], b[which])
    return rates, (generator.random((TASKS, num_attempts)) < rates[:, None]).astype(np.uint8)


def simulate(plan: Plan, truth: BetaMixture, number: int, seed: int) -> Outcome:
    """Both ways on the same attempts. A verdict is wrong if it accepts what lies outside, or the other way round."""
    rates, outcomes = draw(truth, seed, max(plan.max_attempts, number))
    inside = (rates >= BAND[0]) & (rates <= BAND[1])
    fixed = adaptive = used = 0
    for row, truly in zip(outcomes, inside, strict=True):
        made = row.tobytes()
        tally = plan.replay(Tally(bytearray(made)))
        used += tally.attempts
        fixed += (RULE.verdict(made[:number].count(1), number) == ACCEPT) != truly
        adaptive += (RULE.verdict(tally.successes, tally.attempts) == ACCEPT) != truly
    return Outcome(fixed / TASKS, adaptive / TASKS, 1 - used / TASKS / number)


def interval(values: list[float]) -> tuple[float, float, float]:
    """Mean and the ends of its 95 % interval over seeds."""
    mean = statistics.fmean(values)
    half = T_95_7_DEGREES * statistics.stdev(values) / math.sqrt(len(values))
    return mean, mean - half, mean + half


def plan_for(number: int, prior: BetaMixture = TERMINAL) -> Plan:
    """The default of `strop calibrate --adaptive -n NUMBER`."""
    errors = fixed_errors(RULE, prior, number)
    size = default_round_size(number)
    return cheapest_plan(RULE, prior, errors=errors, max_attempts=2 * number, round_size=size)


def fitted_to_an_earlier_run(truth: BetaMixture) -> BetaMixture:
    """What --prior FILE makes of a few earlier tasks of the same kind."""
    _, outcomes = draw(truth, 0, EARLIER_ATTEMPTS)
    counts = Counter((int(s), EARLIER_ATTEMPTS) for s in outcomes[:EARLIER_TASKS].sum(axis=1))
    return with_doubt(fit_mixture(counts), EARLIER_TASKS)


def row(name: str, plan: Plan, truth: BetaMixture, number: int) -> tuple[str, bool]:
    """One line of the table, and whether the bar is met."""
    found = [simulate(plan, truth, number, seed) for seed in SEEDS]
    fixed, _, _ = interval([item.fixed for item in found])
    adaptive, _, _ = interval([item.adaptive for item in found])
    more, more_low, more_high = interval([item.adaptive - item.fixed for item in found])
    saved, low, high = interval([item.saved for item in found])
    line = (
        f"{name:<24} {number:>3}  {fixed:>7.2%} {adaptive:>9.2%}  {more:>+7.2%} [{more_low:+.2%}, {more_high:+.2%}]"
        f"  {saved:>6.1%} [{low:.1%}, {high:.1%}]"
    )
    return line, more_low <= 0 and low >= BAR


def main() -> None:
    """Prints the tables."""
    head = f"{'':<24} {'N':>3}  {'fixed':>7} {'adaptive':>9}  {'more errors [95 %]':<26} {'attempts saved [95 %]'}"
    print(f"adaptive attempts, band {BAND[0]}:{BAND[1]}, {len(SEEDS)} seeds x {TASKS} tasks; shares of wrong verdicts")
    print(head)
    met, saved = True, []
    plans = {number: plan_for(number) for number in NUMBERS}
    for number, plan in plans.items():
        line, good = row("cheapest plan", plan, TERMINAL, number)
        met = met and good
        saved.append(line.split("]")[1].split("[")[0].strip())
        print(line)
        print(f"{'  exact':<24} {number:>3}  {fixed_errors(RULE, TERMINAL, number):>7.2%} {plan.expected_errors:>9.2%}"
              f"{'':<30} {1 - plan.expected_attempts / number:>6.1%}")  # fmt: skip
    for number, size in ((8, 1), (16, 8), (32, 8)):
        errors = fixed_errors(RULE, TERMINAL, number)
        plan = cheapest_plan(RULE, TERMINAL, errors=errors, max_attempts=2 * number, round_size=size)
        print(row(f"--round-size {size}", plan, TERMINAL, number)[0])
    for number, confidence in ((8, 0.90), (16, 0.95), (32, 0.97)):
        plan = confidence_plan(RULE, TERMINAL, confidence=confidence, max_attempts=2 * number, round_size=4)
        print(row(f"--confidence {confidence}", plan, TERMINAL, number)[0])
    print("the same plans where the tasks are of another kind")
    for truth in OTHER_TRUTHS[1:]:
        for number, plan in plans.items():
            print(row(truth.name, plan, truth, number)[0])
    print(f"with a prior fitted to {EARLIER_TASKS} earlier tasks of that kind, {EARLIER_ATTEMPTS} attempts at each")
    for truth in OTHER_TRUTHS[2:]:
        prior = fitted_to_an_earlier_run(truth)
        print(row(truth.name, plan_for(8, prior), truth, 8)[0])
    # The line for the table of tests/bench/run.sh.
    print(
        f"| calibrate --adaptive, attempts saved | {', '.join(saved)} | N = {', '.join(map(str, NUMBERS))} each "
        f"| at least {BAR:.0%}, no more wrong verdicts | {'ok' if met else 'MISSED'} |"
    )


if __name__ == "__main__":
    main()
