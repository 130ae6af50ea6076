"""Python values as JSON and back, tuples, sets and keys that are no texts included.

JSON knows neither tuples nor keys other than texts, and a scorer may depend on them: what JSON would change is wrapped
in an object with one key that begins with "$". Everything else stays as it is, so that most values read as they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from fractions import Fraction
from typing import Any

# Integers up to here survive every JSON reader that we know of.
MOST_INT = 2**53

_TEXTS: dict[str, tuple[type[Any], Callable[[str], Any]]] = {
    "$decimal": (Decimal, Decimal),
    "$fraction": (Fraction, Fraction),
    "$datetime": (datetime, datetime.fromisoformat),
    "$date": (date, date.fromisoformat),
    "$time": (time, time.fromisoformat),
    "$complex": (complex, complex),
}
_LISTS: dict[str, tuple[type[Any], Callable[[list[Any]], Any]]] = {
    "$tuple": (tuple, tuple),
    "$set": (set, set),
    "$frozenset": (frozenset, frozenset),
}


def to_plain(value: Any) -> Any:
    """`value` as JSON values. Raises TypeError for what has no form here.

    >>> to_plain({1: (2, "a")})
    {'$items': [[1, {'$tuple': [2, 'a']}]]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str(value)
    if isinstance(value, int):
        return int(value) if abs(value) <= MOST_INT else {"$int": str(value)}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"$float": str(float(value))}
    if isinstance(value, list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {str(key): to_plain(item) for key, item in value.items()}
        return {"$items": [[to_plain(key), to_plain(item)] for key, item in value.items()]}
    return _wrapped(value)


def _wrapped(value: Any) -> Any:
    for mark, (kind, _) in _LISTS.items():
        if isinstance(value, kind):
            items = [to_plain(item) for item in value]
            return {mark: sorted(items, key=repr) if kind is not tuple else items}
    for mark, (kind, _) in _TEXTS.items():
        if isinstance(value, kind):
            return {mark: value.isoformat() if isinstance(value, date | time) else str(value)}
    if isinstance(value, timedelta):
        return {"$seconds": value.total_seconds()}
    # numpy's arrays and scalars, without importing numpy: they know their plain form.
    if hasattr(value, "tolist"):
        return to_plain(value.tolist())
    raise TypeError(f"a value of type {type(value).__name__} has no JSON form")


def from_plain(value: Any) -> Any:
    """The inverse of `to_plain` (numpy's types come back as Python's)."""
    if isinstance(value, list):
        return [from_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (mark, inner), = value.items()  # fmt: skip
        if mark in _LISTS:
            return _LISTS[mark][1](from_plain(inner))
        if mark in _TEXTS:
            return _TEXTS[mark][1](inner)
        if mark == "$items":
            return {from_plain(key): from_plain(item) for key, item in inner}
        if mark in ("$int", "$float"):
            return int(inner) if mark == "$int" else float(inner)
        if mark == "$seconds":
            return timedelta(seconds=inner)
    return {key: from_plain(item) for key, item in value.items()}
