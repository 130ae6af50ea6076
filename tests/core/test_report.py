"""The report's table: which records it takes, in which order, and how it shows them."""

import pytest

from strop.core.errors import UsageError
from strop.core.records import Metric, Record
from strop.core.report import Column, Table, aligned, show


def metric(name, value, **fields):
    return Record.make("metric", {"name": name, "value": value, **fields})


def table(**options):
    columns = [Column.parse("heldout=pass@1,set=heldout"), Column.parse("tokens")]
    made = Table("iteration", columns, **options)
    for record in (
        metric("pass@1", 0.5, low=0.4, high=0.6, set="heldout", iteration=10),
        metric("pass@1", 0.1, low=0.05, high=0.2, set="heldout", iteration=2),
        metric("pass@1", 0.9, set="train", iteration=2),
        metric("tokens", 1000, iteration=2),
        metric("tokens", 234, iteration=2),
        metric("tokens", 7),
    ):
        made.add(record)
    return made


def test_rows_sort_as_numbers_and_columns_take_what_they_name():
    assert table().lines() == [
        ["iteration", "heldout", "tokens"],
        ["2", "0.100 [0.050, 0.200]", "234"],
        ["10", "0.500 [0.400, 0.600]", "-"],
    ]
    assert table(totals=True).lines()[1][2] == "1,234"
    assert aligned(table().lines()).splitlines()[2] == "10         0.500 [0.400, 0.600]       -"


def test_first_and_last():
    assert [(name, m.value) for name, m in table().first_and_last("heldout")] == [
        ("heldout_before", 0.1),
        ("heldout_after", 0.5),
    ]
    with pytest.raises(UsageError, match="at least two"):
        table().first_and_last("tokens")


def test_show():
    assert show(None) == show(Metric(name="x", value=None)) == "-"
    assert show(Metric(name="x", value=1234567)) == "1,234,567"


def test_column_syntax():
    with pytest.raises(UsageError, match="expected TITLE=METRIC"):
        Column.parse("a=b,c")
