"""strop report: metric records into a table and a curve."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from strop.cli.session import Session, tool
from strop.core import report
from strop.core.errors import DataError, UsageError, missing_extra
from strop.core.records import Metric, Record

Rows = Annotated[
    str, typer.Option("--rows", metavar="FIELD", help="The field whose values make the rows, e.g. a --tag of the runs.")
]
Columns = Annotated[
    list[str],
    typer.Option(
        "--column",
        metavar="TITLE=METRIC[,FIELD=VALUE]",
        help="A column (several times): the metric it shows, and fields a record must have.",
    ),
]
Totals = Annotated[
    bool, typer.Option("--totals", help="Add up records of the same cell; otherwise the last one counts.")
]
BeforeAfter = Annotated[
    list[str],
    typer.Option(
        "--before-after",
        metavar="TITLE",
        help="Write a column's first and last value as metrics TITLE_before and TITLE_after.",
        show_default=False,
    ),
]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", metavar="FILE", help="Draw the columns of --curve into FILE (.png, .svg, .pdf)."),
]
Curves = Annotated[
    list[str],
    typer.Option(
        "--curve", metavar="TITLE", help="A column to draw (several times); by itself the first.", show_default=False
    ),
]


@tool(reads=("metric",), writes=("metric",))
def command(
    io: Session,
    rows: Rows = "iteration",
    column: Columns = [],  # noqa: B006 (Typer copies it)
    totals: Totals = False,
    before_after: BeforeAfter = [],  # noqa: B006
    plot: PlotFile = None,
    curve: Curves = [],  # noqa: B006
) -> None:
    """Make a table and a curve of metric records.

    Reads metric records, shows those of the columns as a table on stderr, a row for each value of the --rows field, and
    passes every record through. Values with a 95 % interval show it, and the curve draws it as a band.

    \b
    Examples:
      strop report --rows iteration --column 'heldout=pass@1,set=heldout' --column tokens=sampled_tokens \\
        --before-after heldout --plot curve.png metrics.jsonl > results.jsonl

    \b
    Input fields:
      metric: name, value, low, high, and the fields that --rows and --column name

    \b
    Output fields:
      metric: name (TITLE_before, TITLE_after), value, low, high, n

    \b
    Memory:
      the cells of the table.
    """
    columns = [report.Column.parse(text) for text in column]
    titles = [one.title for one in columns]
    if not columns:
        raise UsageError("name at least one --column")
    for title in [*before_after, *curve]:
        if title not in titles:
            raise UsageError(f"no --column is called {title!r}")
    table = report.Table(rows, columns, totals)
    for record in io.records():
        try:
            if record.kind == "metric":
                table.add(record)
        except DataError as error:
            io.reject(error, record)
            continue
        io.write(record)
    for title in before_after:
        for name, metric in table.first_and_last(title):
            io.emit(
                Record.make(
                    "metric", Metric(name=name, value=metric.value, low=metric.low, high=metric.high, n=metric.n)
                )
            )
    if plot is not None:
        try:
            report.plot(table, curve or titles[:1], plot)
        except ImportError:
            raise missing_extra("matplotlib", "plot") from None
    if not io.quiet:
        sys.stderr.write(report.aligned(table.lines()) + "\n")
