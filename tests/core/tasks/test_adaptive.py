"""Stopping plans: against brute force, against simulation, and what they save."""

from __future__ import annotations

import math
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import UsageError
from strop.core.tasks.adaptive import (
    Progress,
    cheapest_plan,
    check_prior,
    confidence_plan,
    default_round_size,
    fixed_errors,
)
from strop.core.tasks.calibration import RULES, Tally, band_rule
from strop.core.tasks.prior import TERMINAL, UNIFORM, BetaMixture

BAND = band_rule(0.2, 0.8)
# One Beta, the fit of the same trials that BIC prefers; and a pool of middling tasks.
SINGLE = BetaMixture(((1.0, 0.0746456, 0.2740680),), "single")
MIDDLING = BetaMixture(((1.0, 2.0, 3.0),), "middling")


@cache
def like_fixed(prior: BetaMixture, attempts: int):
    errors, size = fixed_errors(BAND, prior, attempts), default_round_size(attempts)
    return cheapest_plan(BAND, prior, errors=errors, max_attempts=2 * attempts, round_size=size)


def outcomes_of(generator, prior: BetaMixture, num_tasks: int, num_attempts: int):
    """True rates drawn from the mixture, and for each task its attempts."""
    import numpy as np

    weights, a, b = (np.array(column) for column in zip(*prior.components, strict=True))
    which = generator.choice(len(weights), num_tasks, p=weights / weights.sum())
    rates = generator.beta(a[which], b[which])
    return rates, (generator.random((num_tasks, num_attempts)) < rates[:, None]).astype(np.uint8)


def run(plan, outcomes) -> tuple[str, int]:
    """What the command does for one task: rounds until none is wanted."""
    progress = Progress()
    row = outcomes.tobytes()
    while size := plan.next_round(progress):
        start = progress.tally.attempts
        for outcome in row[start : start + size]:
            progress.tally.add(bool(outcome))
    return plan.rule.verdict(progress.tally.successes, progress.tally.attempts), progress.tally.attempts


def is_wrong(verdict: str, rate: float) -> bool:
    """The truth is whether the rate lies in the band."""
    return (verdict == "accept") != (0.2 <= rate <= 0.8)


def test_fixed_errors_by_hand():
    # One attempt, uniform prior: failure says too_hard, wrong where p >= 0.2 with density 2(1-p): 0.8^2. Twice.
    assert fixed_errors(BAND, UNIFORM, 1) == pytest.approx(0.64)


def test_fixed_errors_agree_with_simulation():
    import numpy as np

    generator = np.random.default_rng(3)
    rates, outcomes = outcomes_of(generator, TERMINAL, 40_000, 8)
    wrong = [is_wrong(BAND.verdict(int(s), 8), p) for s, p in zip(outcomes.sum(axis=1), rates, strict=True)]
    assert np.mean(wrong) == pytest.approx(fixed_errors(BAND, TERMINAL, 8), abs=0.004)


def brute_force(prior: BetaMixture, max_attempts: int, price: float) -> tuple[float, float, float]:
    """The least loss over all stopping rules by recursion on sequences: (loss, attempts, errors)."""

    def joint(successes: int, attempts: int) -> tuple[float, float]:
        mass = math.exp(prior.log_sequence(successes, attempts - successes))
        regions = prior.regions(successes, attempts, (0.2, 0.8))
        index = {"too_hard": 0, "accept": 1, "too_easy": 2}[BAND.verdict(successes, attempts)]
        return mass, mass * (1 - regions[index])

    def best(successes: int, attempts: int) -> tuple[float, float, float]:
        if attempts == 0:
            stop = (math.inf, 0.0, 0.0)
            mass = 1.0
        else:
            mass, wrong = joint(successes, attempts)
            stop = (wrong, 0.0, wrong)
        if attempts == max_attempts:
            return stop
        one, other = best(successes, attempts + 1), best(successes + 1, attempts + 1)
        go = (price * mass + one[0] + other[0], mass + one[1] + other[1], one[2] + other[2])
        return stop if stop[0] <= go[0] else go

    return best(0, 0)


@pytest.mark.parametrize("prior", [TERMINAL, UNIFORM, MIDDLING])
@pytest.mark.parametrize("errors", [0.05, 0.15, 0.3])
def test_the_cheapest_plan_is_optimal(prior, errors):
    plan = cheapest_plan(BAND, prior, errors=errors, max_attempts=7)
    # Whatever the price, no stopping rule has a smaller loss than the dynamic programme's rule at that price; so none
    # that is as right as the plan is cheaper than the chord through its neighbours on the frontier allows.
    for price in (0.001, 0.005, 0.01, 0.03, 0.1):
        loss, _, _ = brute_force(prior, 7, price)
        assert plan.expected_errors + price * plan.expected_attempts >= loss - 1e-12
    prices = [10 ** (-step / 8) for step in range(40)]
    reached = [brute_force(prior, 7, price) for price in prices]
    assert any(
        attempts == pytest.approx(plan.expected_attempts) and wrong == pytest.approx(plan.expected_errors)
        for _, attempts, wrong in reached
    )


@pytest.mark.parametrize("prior", [TERMINAL, UNIFORM, SINGLE, MIDDLING])
@pytest.mark.parametrize("attempts", [8, 16, 32])
def test_a_plan_is_as_right_as_it_was_asked_to_be(prior, attempts):
    plan = like_fixed(prior, attempts)
    assert plan.is_reached
    assert plan.expected_errors <= fixed_errors(BAND, prior, attempts)
    assert plan.expected_attempts < attempts


@pytest.mark.parametrize("attempts", [8, 16, 32])
def test_at_least_35_percent_are_saved_at_the_same_rate_of_wrong_verdicts(attempts):
    plan = like_fixed(TERMINAL, attempts)
    assert 1 - plan.expected_attempts / attempts >= 0.35
    # Also under the other fit of the same trials, for which the default plan was not made.
    assert 1 - like_fixed(SINGLE, attempts).expected_attempts / attempts >= 0.35


@pytest.mark.parametrize("attempts", [8, 16])
def test_what_a_plan_expects_is_what_simulation_gives(attempts):
    import numpy as np

    plan = like_fixed(TERMINAL, attempts)
    generator = np.random.default_rng(attempts)
    rates, outcomes = outcomes_of(generator, TERMINAL, 30_000, plan.max_attempts)
    results = [run(plan, row) for row in outcomes]
    wrong = np.mean([is_wrong(verdict, p) for (verdict, _), p in zip(results, rates, strict=True)])
    used = np.mean([made for _, made in results])
    assert wrong == pytest.approx(plan.expected_errors, abs=0.004)
    assert used == pytest.approx(plan.expected_attempts, rel=0.02)


def test_a_confidence_plan_stops_exactly_where_it_is_sure_enough():
    plan = confidence_plan(BAND, TERMINAL, confidence=0.95, max_attempts=16)
    for attempts in range(1, 16):
        for successes in range(attempts + 1):
            sure = plan.confidence(successes, attempts) >= 0.95
            assert plan.stops[attempts][successes] == sure
            assert plan.settled(successes, attempts) == sure
    assert all(plan.stops[16])


@settings(max_examples=30)
@given(st.sampled_from([TERMINAL, UNIFORM]), st.floats(0.5, 0.98), st.floats(0.001, 0.019))
def test_more_confidence_never_takes_fewer_attempts(prior, confidence, more):
    low = confidence_plan(BAND, prior, confidence=confidence, max_attempts=12)
    high = confidence_plan(BAND, prior, confidence=confidence + more, max_attempts=12)
    # Of the errors that cannot be said: more attempts can move a rate over the edge of the band by its grid alone.
    assert high.expected_attempts >= low.expected_attempts - 1e-12


@given(st.integers(1, 40).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_confidence_is_the_posterior_probability_of_the_verdict(count):
    successes, attempts = count
    plan = like_fixed(TERMINAL, 8)
    regions = TERMINAL.regions(successes, attempts, (0.2, 0.8))
    index = {"too_hard": 0, "accept": 1, "too_easy": 2}[BAND.verdict(successes, attempts)]
    # Beyond the table, too.
    assert plan.confidence(successes, attempts) == pytest.approx(regions[index], abs=1e-9)


def test_an_unreachable_share_of_errors_is_said():
    plan = cheapest_plan(BAND, UNIFORM, errors=0.01, max_attempts=8)
    assert not plan.is_reached
    assert plan.expected_errors == pytest.approx(fixed_errors(BAND, UNIFORM, 8), abs=1e-9)


def test_the_first_round_is_always_made():
    certain = BetaMixture(((1.0, 0.01, 99.0),), "certain")
    plan = cheapest_plan(BAND, certain, errors=0.5, max_attempts=8)
    assert plan.next_round(Progress()) == 1
    assert plan.expected_attempts == pytest.approx(1)


def test_rounds_end_at_the_most_attempts_and_errors_are_made_up_for():
    plan = cheapest_plan(BAND, UNIFORM, errors=0.0, max_attempts=5, round_size=2)
    progress = Progress(Tally(bytearray(4), errors=3))
    assert plan.next_round(progress) == 1
    assert plan.next_round(Progress(Tally(errors=4))) == 2
    # As many failures of the machine as attempts allowed: the task is left.
    assert plan.next_round(Progress(Tally(errors=5))) == 0


def test_a_replay_makes_the_attempts_that_a_run_would_have_made():
    import numpy as np

    plan = like_fixed(TERMINAL, 16)
    _, outcomes = outcomes_of(np.random.default_rng(2), TERMINAL, 500, 32)
    for row in outcomes:
        used = plan.replay(Tally(bytearray(row.tobytes()), errors=40, stale=2))
        verdict, made = run(plan, row)
        assert (plan.rule.verdict(used.successes, used.attempts), used.attempts) == (verdict, made)
        assert (used.errors, used.stale) == (40, 2)
        assert plan.settled(used.successes, used.attempts) or used.attempts == 32


@pytest.mark.parametrize(("attempts", "size"), [(1, 1), (3, 1), (4, 2), (8, 4), (64, 4)])
def test_rounds_are_of_four_or_less(attempts, size):
    assert default_round_size(attempts) == size


def test_a_replay_that_runs_out_is_not_settled():
    plan = like_fixed(TERMINAL, 8)
    used = plan.replay(Tally(bytearray([1, 0])))
    assert (used.attempts, plan.settled(used.successes, used.attempts)) == (2, False)


def test_a_plan_describes_where_it_stops():
    lines = cheapest_plan(BAND, TERMINAL, errors=fixed_errors(BAND, TERMINAL, 8), max_attempts=16).describe()
    assert lines[0] == "after 1: go on"
    assert lines[2] == "after 3: too_hard at 0 of them"
    assert lines[6] == "after 7: too_hard at 0 of them; accept at 3-4; too_easy at 7 of them"
    assert lines[-1] == "after 16: too_hard at 0-3; accept at 4-12; too_easy at 13-16"


@pytest.mark.parametrize("name", sorted(RULES))
def test_rules_that_are_not_about_the_true_rate_cannot_be_settled(name):
    with pytest.raises(UsageError, match="give a --band"):
        cheapest_plan(RULES[name], TERMINAL, errors=0.05, max_attempts=8)


@pytest.mark.parametrize(("most", "size"), [(0, 1), (513, 1), (8, 9), (8, 0)])
def test_impossible_limits_are_usage_errors(most, size):
    with pytest.raises(UsageError, match="expected 1 to"):
        cheapest_plan(BAND, TERMINAL, errors=0.05, max_attempts=most, round_size=size)


@pytest.mark.parametrize("confidence", [0.0, 0.49, 1.0, 1.5, math.nan])
def test_impossible_confidences_are_usage_errors(confidence):
    with pytest.raises(UsageError, match="--confidence"):
        confidence_plan(BAND, TERMINAL, confidence=confidence, max_attempts=8)


def test_the_prior_is_checked_against_the_first_attempts():
    import numpy as np

    _, own = outcomes_of(np.random.default_rng(4), TERMINAL, 400, 2)
    _, other = outcomes_of(np.random.default_rng(4), MIDDLING, 400, 2)
    fits = check_prior(TERMINAL, [row.tobytes() for row in own], 2)
    assert fits.p_value > 0.001
    assert sum(fits.seen) == 400
    assert math.fsum(fits.expected) == pytest.approx(400)
    assert check_prior(TERMINAL, [row.tobytes() for row in other], 2).p_value < 1e-6


def test_the_check_is_a_g_test():
    from scipy.stats import power_divergence

    rows = [b"\x00\x00"] * 30 + [b"\x01\x00"] * 12 + [b"\x01\x01"] * 18 + [b"\x01"] * 5
    mine = check_prior(UNIFORM, rows, 2)
    theirs = power_divergence([30, 12, 18], [20, 20, 20], lambda_="log-likelihood")
    assert mine.seen == [30, 12, 18]
    assert mine.p_value == pytest.approx(theirs.pvalue)
    first = check_prior(UNIFORM, rows, 1)
    assert first.seen == [30, 35]
    assert first.p_value == pytest.approx(power_divergence([30, 35], lambda_="log-likelihood").pvalue)
