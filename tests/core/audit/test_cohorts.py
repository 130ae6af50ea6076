"""Heads of two sets on one cohort: exact McNemar against hand values and scipy, wins in either style."""

import pytest

np = pytest.importorskip("numpy")
pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

from hypothesis import given  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from strop.core.audit.cohorts import HEADS, as_metrics, compare_heads, mcnemar, wins  # noqa: E402

# Right answers deny and are long; a cohort is flipped where the wrong ones do and are.
LEAKY = [(f"no it is not so and never was {i}", f"it is {i}") for i in range(12)]
FLIPPED = [(wrong, right) for right, wrong in LEAKY]
EVEN = LEAKY[:6] + FLIPPED[:6]


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [(0, 0, 1), (1, 0, 1), (0, 5, 2 / 32), (3, 3, 1), (1, 8, 2 * 10 / 512), (10, 2, 2 * 79 / 4096)],
)
def test_mcnemar_by_hand(only_first, only_second, p):
    assert mcnemar(only_first, only_second) == p


@given(st.integers(0, 60), st.integers(0, 60))
def test_mcnemar_is_the_binomial_test(only_first, only_second):
    stats = pytest.importorskip("scipy.stats")
    if only_first + only_second:
        known = stats.binomtest(only_first, only_first + only_second).pvalue
        assert mcnemar(only_first, only_second) == pytest.approx(known, rel=1e-9)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_wins_where_the_style_is_the_one_it_learned(head):
    assert wins(head, LEAKY, LEAKY) == [True] * 12
    assert wins(head, LEAKY, FLIPPED) == [False] * 12


def test_identical_answers_are_no_win():
    assert wins("features", LEAKY, [("same", "same")]) == [False]


def test_answers_without_words_teach_nothing():
    assert wins("tfidf", [("?!", "...")] * 6, LEAKY[:2]) == [False, False]


def test_heads_of_two_sets_on_a_flipped_cohort():
    found = compare_heads(LEAKY, FLIPPED, FLIPPED)
    assert [one.head for one in found] == list(HEADS)
    for one in found:
        assert (one.full, one.pruned, one.only_full, one.only_pruned, one.n) == (0, 1, 0, 12, 12)
        assert one.p == 2 / 2**12
    metrics = as_metrics("flipped", found)
    assert metrics[:3] == [
        {"name": "head_full", "value": 0, "n": 12, "of": "flipped, head on features"},
        {"name": "head_pruned", "value": 1, "n": 12, "of": "flipped, head on features"},
        {"name": "mcnemar_p", "value": 2 / 2**12, "n": 12, "of": "flipped, head on features"},
    ]


def test_the_same_set_twice_differs_in_nothing():
    for one in compare_heads(LEAKY, LEAKY, EVEN):
        assert (one.full, one.pruned, one.p) == (0.5, 0.5, 1)
