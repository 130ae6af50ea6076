"""Choices and the split: fixed values, because tasks made last year must come out again."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from strop.core.tasks.draws import Draws, is_heldout


def test_golden_choices():
    draws = Draws(12345)
    assert [draws.below(100) for _ in range(8)] == [41, 1, 82, 29, 36, 19, 56, 16]
    assert [Draws(7).between(-3, 3), Draws(8).pick("abcdef")] == [-1, "b"]
    letters = list("abcdefgh")
    Draws(3).shuffle(letters)
    assert "".join(letters) == "heafgcdb"


def test_golden_split():
    assert [i for i in range(60) if is_heldout(f"{i}+1", 0.1)] == [4, 6, 15, 35, 38, 42, 46, 51, 53]


@given(st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_larger_share_holds_all_of_a_smaller(question, one, other):
    if is_heldout(question, min(one, other)):
        assert is_heldout(question, max(one, other))


def test_shares_and_choices_are_even():
    held = sum(is_heldout(str(i), 0.3) for i in range(10_000))
    assert abs(held - 3000) < 5 * (10_000 * 0.3 * 0.7) ** 0.5
    draws = Draws(1)
    counts = Counter(draws.between(1, 6) for _ in range(6000))
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 25
    assert sorted(counts) == [1, 2, 3, 4, 5, 6]
