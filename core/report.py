"""Metric records into a table: rows by one field, columns by metric and fields; and the first and last of a column."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.core.errors import UsageError
from strop.core.records import Metric, Record

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, slots=True)
class Column:
    """One column: the metric it shows, and fields that must be equal for a record to count.

    >>> Column.parse("heldout=pass@1,set=heldout")
    Column(title='heldout', metric='pass@1', where=(('set', 'heldout'),))
    """

    title: str
    metric: str
    where: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, text: str) -> Column:
        """From `METRIC`, or `TITLE=METRIC[,FIELD=VALUE]...`. Raises UsageError."""
        title, equals, rest = text.partition("=")
        if not equals:
            return cls(title, title)
        metric, *conditions = rest.split(",")
        pairs = [tuple(condition.split("=", 1)) for condition in conditions]
        if not metric or any(len(pair) != 2 for pair in pairs):
            raise UsageError(f"--column {text!r}: expected TITLE=METRIC[,FIELD=VALUE]...")
        return cls(title, metric, tuple((pair[0], pair[1]) for pair in pairs))

    def takes(self, record: Record, name: str) -> bool:
        """Whether a metric record of this name belongs into the column."""
        return name == self.metric and all(str(record.get(key)) == value for key, value in self.where)


@dataclass(slots=True)
class Table:
    """Metrics by row and column. A later record of the same cell replaces an earlier one, unless `totals` adds them."""

    rows_by: str
    columns: list[Column]
    totals: bool = False
    cells: dict[Any, dict[str, Metric]] = field(default_factory=dict)

    def add(self, record: Record) -> None:
        """Places a metric record where it belongs; records without the row field are left out."""
        row = record.get(self.rows_by)
        if row is None or isinstance(row, (list, dict)):
            return
        metric = record.view(Metric)
        for column in self.columns:
            if column.takes(record, metric.name):
                cells = self.cells.setdefault(row, {})
                before = cells.get(column.title)
                if self.totals and before is not None and before.value is not None and metric.value is not None:
                    metric = Metric(name=metric.name, value=before.value + metric.value)
                cells[column.title] = metric

    def rows(self) -> list[Any]:
        """The rows, sorted: numbers by size, then text."""
        return sorted(self.cells, key=lambda row: (isinstance(row, str), row))

    def lines(self) -> list[list[str]]:
        """The table as text, its head first. A value with an interval reads `0.313 [0.254, 0.378]`."""
        head = [self.rows_by, *(column.title for column in self.columns)]
        body = [
            [str(row), *(show(self.cells[row].get(column.title)) for column in self.columns)] for row in self.rows()
        ]
        return [head, *body]

    def first_and_last(self, title: str) -> list[tuple[str, Metric]]:
        """(`TITLE_before`, first row's metric) and (`TITLE_after`, last row's) of a column."""
        filled = [self.cells[row][title] for row in self.rows() if title in self.cells[row]]
        if len(filled) < 2:
            raise UsageError(f"--before-after {title}: the column has {len(filled)} values, expected at least two")
        return [(f"{title}_before", filled[0]), (f"{title}_after", filled[-1])]


def show(metric: Metric | None) -> str:
    """A metric as people read it; a dash where there is none."""
    if metric is None or metric.value is None:
        return "-"
    value = metric.value
    text = f"{value:,}" if isinstance(value, int) else f"{value:.3f}" if abs(value) < 1000 else f"{value:,.0f}"
    return text if metric.low is None or metric.high is None else f"{text} [{metric.low:.3f}, {metric.high:.3f}]"


def aligned(lines: Iterable[list[str]]) -> str:
    """Lines of cells as a plain table, columns right-aligned but the first."""
    table = list(lines)
    first, *others = (max(map(len, column)) for column in zip(*table, strict=True))
    rows = (
        [line[0].ljust(first), *(cell.rjust(width) for cell, width in zip(line[1:], others, strict=True))]
        for line in table
    )
    return "\n".join("  ".join(row) for row in rows)


def plot(table: Table, titles: list[str], path: Path) -> None:
    """Draws columns over the rows, with their intervals as bands, into an image file (PNG, SVG, PDF by its name)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 4.0), layout="constrained")
    for title in titles:
        points = [
            (row, cell)
            for row in table.rows()
            if (cell := table.cells[row].get(title)) is not None and cell.value is not None
        ]
        xs = [row for row, _ in points]
        (line,) = axes.plot(xs, [cell.value for _, cell in points], marker="o", label=title)
        banded = [(row, cell.low, cell.high) for row, cell in points if cell.low is not None and cell.high is not None]
        if banded:
            rows, lows, highs = zip(*banded, strict=True)
            axes.fill_between(rows, lows, highs, color=line.get_color(), alpha=0.18, linewidth=0)
    axes.set_xlabel(table.rows_by)
    axes.grid(alpha=0.3)
    if len(titles) > 1:
        axes.legend()
    else:
        axes.set_ylabel(titles[0])
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
