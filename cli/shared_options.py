"""The options that every tool has, declared once; session.py obeys them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

SHARED = "Shared options"

Files = Annotated[
    list[str], typer.Argument(metavar="[FILE]...", help="Files to read; none, or -, is stdin.", show_default=False)
]
OutputPath = Annotated[
    str,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="Write to FILE, which appears whole or not at all; - is stdout.",
        rich_help_panel=SHARED,
    ),
]
Only = Annotated[
    str | None,
    typer.Option("--only", metavar="KIND[,KIND]", help="Write only records of these kinds.", rich_help_panel=SHARED),
]
KeepGoing = Annotated[
    bool,
    typer.Option("--keep-going", help="Set bad records aside, go on, and exit 1 at the end.", rich_help_panel=SHARED),
]
RejectsPath = Annotated[
    Path | None,
    typer.Option(
        "--rejects",
        metavar="FILE",
        help="Where --keep-going puts bad lines, each with its reason.",
        rich_help_panel=SHARED,
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Only errors on stderr.", rich_help_panel=SHARED)]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="More on stderr: what is loaded, timings.", rich_help_panel=SHARED)
]
LogJson = Annotated[bool, typer.Option("--log-json", help="Messages on stderr as JSON lines.", rich_help_panel=SHARED)]
ShowProgress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Progress on stderr; by itself on a terminal when stdout is not a pipe.",
        rich_help_panel=SHARED,
    ),
]
LineBuffered = Annotated[
    bool | None,
    typer.Option(
        "--line-buffered/--block-buffered",
        help="Hand over each record at once, or in blocks; slow tools do the first by themselves.",
        rich_help_panel=SHARED,
    ),
]
Tag = Annotated[
    list[str],
    typer.Option(
        "--tag",
        metavar="KEY=VALUE",
        help="Add this field to each metric record made here (several times); e.g. iteration=3.",
        show_default=False,
        rich_help_panel=SHARED,
    ),
]
Schema = Annotated[
    bool,
    typer.Option(
        "--schema", help="Print the JSON Schema of what is read and written, and exit.", rich_help_panel=SHARED
    ),
]
ShowConfig = Annotated[
    bool,
    typer.Option(
        "--show-config", help="Print each option's value and where it comes from, and exit.", rich_help_panel=SHARED
    ),
]
Resume = Annotated[
    Path | None,
    typer.Option(
        "--resume",
        metavar="FILE",
        help="Continue FILE, which a killed run wrote: only what is missing is done and appended.",
        rich_help_panel=SHARED,
    ),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Say what would be done, with counts and an estimate of tokens, and stop.",
        rich_help_panel=SHARED,
    ),
]

# Name of the parameter -> (type and declaration, default).
COMMON: dict[str, tuple[Any, Any]] = {
    "output": (OutputPath, "-"),
    "only": (Only, None),
    "keep_going": (KeepGoing, False),
    "rejects": (RejectsPath, None),
    "quiet": (Quiet, False),
    "verbose": (Verbose, False),
    "log_json": (LogJson, False),
    "progress": (ShowProgress, None),
    "line_buffered": (LineBuffered, None),
    "tag": (Tag, []),
    "schema": (Schema, False),
    "show_config": (ShowConfig, False),
}
# Only for tools that take long.
SLOW: dict[str, tuple[Any, Any]] = {"resume": (Resume, None), "dry_run": (DryRun, False)}
