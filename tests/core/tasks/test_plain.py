"""Python values through JSON and back."""

from __future__ import annotations

import math
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.tasks.plain import from_plain, to_plain

HASHABLE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.fractions()
    | st.decimals(allow_nan=False)
    | st.dates() | st.datetimes() | st.times() | st.complex_numbers(allow_nan=False, allow_infinity=False),
    lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)  # fmt: skip
VALUES = st.recursive(
    HASHABLE | st.sets(HASHABLE, max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner)
        | st.dictionaries(HASHABLE | st.just("$tuple"), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(VALUES)
def test_round_trip_through_json(value):
    back = from_plain(msgspec.json.decode(msgspec.json.encode(to_plain(value))))
    assert back == value
    assert type(back) is type(value)


def test_plain_values_read_as_they_are():
    value = {"a": [1, 2.5, "x", None, True, {"b": []}]}
    assert to_plain(value) == value
    assert to_plain({"a": (1, {2})}) == {"a": {"$tuple": [1, {"$set": [2]}]}}


def test_the_form_of_a_set_does_not_depend_on_its_order():
    assert to_plain({"b", "a", "c"}) == {"$set": ["a", "b", "c"]}


def test_what_json_lacks():
    assert math.isnan(from_plain(to_plain(float("nan"))))
    assert from_plain(to_plain([float("-inf"), 10**30])) == [float("-inf"), 10**30]
    assert from_plain(to_plain(timedelta(days=1, seconds=2))) == timedelta(days=1, seconds=2)
    for value in (date(2024, 2, 29), datetime(2024, 2, 29, 1, 2), time(3, 4), Decimal("1.10"), Fraction(1, 3), 1 + 2j):
        assert from_plain(to_plain(value)) == value


def test_numpy_values_come_back_as_pythons():
    value = {"a": np.arange(3), "b": np.float32(0.5), "c": np.str_("x"), "d": np.bool_(True), "e": np.float64(2.0)}
    assert from_plain(to_plain(value)) == {"a": [0, 1, 2], "b": 0.5, "c": "x", "d": True, "e": 2.0}


def test_an_unknown_type_is_an_error():
    with pytest.raises(TypeError, match="a value of type object has no JSON form"):
        to_plain([object()])
