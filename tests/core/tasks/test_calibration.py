"""Wilson intervals, admission rules and verdicts, and what counts as an attempt."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import DataError, UsageError, Where
from strop.core.records import Record
from strop.core.tasks.calibration import (
    RULES,
    Tally,
    band_rule,
    calibration_fields,
    choose_rule,
    learnability,
    parse_band,
    read_attempt,
    wilson_interval,
)

counts = st.integers(1, 200).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n)))


def rollout(**fields) -> Record:
    line = json.dumps({"kind": "rollout", "id": "r", "task": "t", **fields})
    return Record.parse(line, Where("in.jsonl", 7))


def tally(outcomes, errors=0, stale=0) -> Tally:
    return Tally(bytearray(outcomes), errors, stale)


@pytest.mark.parametrize(
    ("successes", "attempts", "low", "high"),
    [
        # By hand from (p + z2/2n +- z sqrt(p(1-p)/n + z2/4n2)) / (1 + z2/n) with z2 = 3.841459.
        (0, 1, 0.0, 0.793450),  # z2 / (1 + z2)
        (1, 1, 0.206549, 1.0),
        (0, 5, 0.0, 0.434482),  # z2 / (5 + z2)
        (1, 5, 0.036223, 0.624465),
        (4, 8, 0.215216, 0.784784),
        (8, 8, 0.675592, 1.0),  # 8 / (8 + z2)
        (50, 100, 0.403832, 0.596168),
    ],
)
def test_wilson_by_hand(successes, attempts, low, high):
    assert wilson_interval(successes, attempts) == pytest.approx((low, high), abs=2e-6)


@given(counts)
def test_wilson_agrees_with_scipy(count):
    from scipy.stats import binomtest

    theirs = binomtest(*count).proportion_ci(method="wilson")
    assert wilson_interval(*count) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


@given(counts)
def test_wilson_holds_the_rate_and_rises_with_successes(count):
    successes, attempts = count
    low, high = wilson_interval(successes, attempts)
    assert 0 <= low <= successes / attempts <= high <= 1
    if successes < attempts:
        more = wilson_interval(successes + 1, attempts)
        assert more[0] > low
        assert more[1] > high
    wider_known = wilson_interval(successes * 4, attempts * 4)
    assert wider_known[1] - wider_known[0] < high - low


@pytest.mark.parametrize("count", [(0, 0), (2, 1), (-1, 3)])
def test_wilson_refuses_impossible_counts(count):
    with pytest.raises(ValueError, match="successes of"):
        wilson_interval(*count)


def test_learnability_is_largest_at_one_half():
    assert learnability(0.5) == 0.25
    assert learnability(0) == learnability(1) == 0
    assert learnability(0.2) == pytest.approx(0.16)


def test_the_band_is_closed():
    rule = band_rule(0.2, 0.8)
    verdicts = [rule.verdict(successes, 5) for successes in range(6)]
    assert verdicts == ["too_hard", "accept", "accept", "accept", "accept", "too_easy"]
    assert rule.verdict(0, 0) == "invalid"
    assert rule.admits(5) == (0.2, 0.8)
    assert rule.admits(8) == (0.25, 0.75)


@given(counts, st.floats(0, 1), st.floats(0, 1))
def test_a_band_says_what_its_definition_says(count, one, other):
    successes, attempts = count
    low, high = sorted((one, other))
    rate = successes / attempts
    expected = "too_hard" if rate < low else "too_easy" if rate > high else "accept"
    assert band_rule(low, high).verdict(successes, attempts) == expected


@given(counts, st.sampled_from([band_rule(0.2, 0.8), band_rule(0.45, 0.55), *RULES.values()]))
def test_verdicts_are_monotone_in_successes(count, rule):
    successes, attempts = count
    order = ["too_hard", "accept", "too_easy"]
    if successes < attempts:
        assert order.index(rule.verdict(successes, attempts)) <= order.index(rule.verdict(successes + 1, attempts))
    admitted = rule.admits(attempts)
    accepted = [s / attempts for s in range(attempts + 1) if rule.verdict(s, attempts) == "accept"]
    assert admitted == ((accepted[0], accepted[-1]) if accepted else None)


def test_a_narrow_band_can_be_out_of_reach():
    rule = band_rule(0.45, 0.55)
    assert rule.admits(5) is None
    assert [rule.verdict(s, 5) for s in (2, 3)] == ["too_hard", "too_easy"]
    assert rule.admits(2) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("name", "attempts", "verdicts"),
    [
        ("frognano-half", 4, "hhaee"),
        # Odd: 1/2 is out of reach, the two nearest rates stand in.
        ("frognano-half", 5, "hhaaee"),
        ("frognano-half", 1, "he"),
        ("frognano-round5", 4, "haaee"),
        ("frognano-round5", 5, "haaeee"),
        ("frognano-round5", 1, "he"),
        ("learnable", 4, "haaae"),
        ("learnable", 1, "he"),
    ],
)
def test_rules_by_name(name, attempts, verdicts):
    letters = {"too_hard": "h", "accept": "a", "too_easy": "e"}
    rule = RULES[name]
    assert "".join(letters[rule.verdict(s, attempts)] for s in range(attempts + 1)) == verdicts


def test_the_record_says_what_stood_in_for_one_half():
    fields = calibration_fields(tally([1, 0, 1, 0, 0]), RULES["frognano-half"])
    assert fields["rule"] == "frognano-half"
    assert fields["admits"] == [0.4, 0.6]
    assert fields["verdict"] == "accept"
    assert calibration_fields(tally([1]), RULES["frognano-half"])["admits"] is None


def test_choosing_a_rule():
    assert choose_rule(None, None).band == (0.2, 0.8)
    assert choose_rule("0.1:0.9", None).name == "band 0.1:0.9"
    assert choose_rule(None, "learnable") is RULES["learnable"]
    with pytest.raises(UsageError, match="give one"):
        choose_rule("0.1:0.9", "learnable")
    with pytest.raises(UsageError, match="expected one of frognano-half"):
        choose_rule(None, "frognano")


@pytest.mark.parametrize("text", ["", "0.2", "0.2:", ":0.8", "a:b", "0.8:0.2", "-0.1:0.5", "0.5:1.5", "nan:1", "0:inf"])
def test_bad_bands_are_usage_errors(text):
    with pytest.raises(UsageError, match="--band"):
        band_rule(*parse_band(text))


def test_calibration_fields_by_hand():
    fields = calibration_fields(tally([1, 0, 0, 1, 0, 0, 0, 0], errors=2, stale=3), band_rule(0.2, 0.8))
    low, high = wilson_interval(2, 8)
    assert fields == {
        "successes": 2, "attempts": 8, "errors": 2, "stale": 3, "pass_rate": 0.25, "low": low, "high": high,
        "learnability": 0.1875, "verdict": "accept", "rule": "band 0.2:0.8", "admits": [0.25, 0.75],
    }  # fmt: skip


def test_nothing_that_counts_is_invalid_and_has_no_numbers():
    fields = calibration_fields(tally([], errors=4), band_rule(0.2, 0.8))
    assert fields["verdict"] == "invalid"
    assert (fields["successes"], fields["attempts"], fields["errors"]) == (0, 0, 4)
    assert [fields[name] for name in ("pass_rate", "low", "high", "learnability", "admits")] == [None] * 5


@pytest.mark.parametrize(
    ("fields", "outcome"),
    [
        ({"success": True}, True),
        ({"success": False, "reward": 1.0}, False),
        ({"reward": 1}, True),
        ({"reward": 1.5}, True),
        # Partial credit is not a pass.
        ({"reward": 0.99}, False),
        ({"reward": -1}, False),
        ({"error": "sandbox lost"}, None),
        ({"error": "sandbox lost", "reward": 0.0, "success": False}, None),
        ({"error": None, "success": True}, True),
    ],
)
def test_what_an_attempt_counts_as(fields, outcome):
    assert read_attempt(rollout(**fields)).outcome is outcome


@pytest.mark.parametrize("fields", [{}, {"success": None, "reward": None, "error": None}, {"response": "text"}])
def test_an_attempt_without_outcome_is_bad_data(fields):
    with pytest.raises(DataError, match=r"in\.jsonl:7: success: missing, as are reward and error"):
        read_attempt(rollout(**fields))


@pytest.mark.parametrize(
    ("line", "field"),
    [
        ('{"kind":"rollout","id":"r","task":7,"success":true}', "task"),
        ('{"kind":"rollout","id":"r","task":"t","success":1}', "success"),
        ('{"kind":"rollout","id":"r","task":"t","reward":"1"}', "reward"),
        ('{"kind":"rollout","id":"r","task":"t","reward":1e999}', "reward"),
        ('{"kind":"rollout","id":"r","task":"t","success":true,"statement_version":"2"}', "statement_version"),
    ],
)
def test_wrong_types_name_the_field(line, field):
    with pytest.raises(DataError) as caught:
        read_attempt(Record.parse(line, Where("in.jsonl", 7)))
    assert caught.value.field == field
    assert caught.value.where == Where("in.jsonl", 7)


@given(st.lists(st.sampled_from([True, False, None])))
def test_errors_shrink_the_number_of_attempts(outcomes):
    counted = Tally()
    for outcome in outcomes:
        counted.add(outcome)
    fields = calibration_fields(counted, band_rule(0.2, 0.8))
    assert fields["errors"] == outcomes.count(None)
    assert fields["attempts"] == len(outcomes) - outcomes.count(None)
    assert fields["successes"] == outcomes.count(True)
    if fields["attempts"]:
        assert math.isclose(fields["pass_rate"] * fields["attempts"], fields["successes"])
