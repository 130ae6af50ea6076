"""strop doctor: what is here, what each tool would miss, and how to get it."""

from __future__ import annotations

from typing import Annotated

import typer

from strop.cli.main import COMMANDS
from strop.cli.session import Session, tool
from strop.core import doctor
from strop.core.errors import UsageError
from strop.core.records import Record

Need = Annotated[
    str | None,
    typer.Option(
        "--need",
        metavar="NAME[,NAME]",
        help="Exit 1 unless these are here: tools, or parts as the first column names them.",
        show_default=False,
    ),
]
Deep = Annotated[
    bool, typer.Option("--deep", help="Also import what is installed and compute on the device; takes a minute.")
]
Records = Annotated[bool, typer.Option("--records", help="Write check records instead of the table.")]


@tool(reads=(), writes=("check",))
def command(io: Session, need: Need = None, deep: Deep = False, records: Records = False) -> None:
    """Say what is here, what each tool would miss, and how to get it.

    Looks at Python, the extras of strop, the device, Docker, bubblewrap and the cached models, without importing any of
    them, and says for each tool what would not work and which command brings it. A part that is not here is no error:
    the exit status is 1 only if something named by --need is missing, or if --deep finds something broken.

    \b
    Examples:
      strop doctor
      strop doctor --need train,envs && make
      strop doctor --deep --records | jq -r 'select(.ok == false) | .get'

    \b
    Input fields:
      none; stdin is not read.

    \b
    Output fields:
      a table; with --records
      check: name, of (part or tool), ok (true, false, or null: absent, which
      may be fine), found, get (the command that brings it), details

    \b
    Memory:
      constant; --deep that of the packages it imports, one at a time.
    """
    parts = list(doctor.part_checks())
    wanted = [name for name in (need or "").split(",") if name]
    names = [part.name for part in parts] + list(COMMANDS)
    for name in wanted:
        if name not in names:
            raise UsageError(f"--need {name!r}: known are {', '.join(names)}")
    tools = list(doctor.tool_checks(COMMANDS, parts))
    if deep:
        parts += doctor.deep_checks(parts)
    for of, checks in (("part", parts), ("tool", tools)):
        if records:
            for check in checks:
                values = {"name": check.name, "of": of, "ok": check.ok, "found": check.found, "get": check.get}
                io.emit(Record.make("check", {**values, "details": check.details}))
        else:
            io.print(_table(of, checks))
    if missing := [check.name for check in (*parts, *tools) if check.name in wanted and not check.ok]:
        io.say_no(f"missing: {', '.join(missing)}")
    if broken := [check.name for check in parts if check.ok is False]:
        io.say_no(f"broken: {', '.join(broken)}")


def _table(of: str, checks: list[doctor.Check]) -> str:
    """Lines of name, mark and findings; the command that brings a thing stands below it, ready to be copied."""
    width = max(len(check.name) for check in checks)
    marks = {True: "ok", False: "BAD", None: "-"} if of == "part" else {True: "ok", False: "no", None: "-"}
    lines = []
    for check in checks:
        lines.append(f"{check.name:<{width}}  {marks[check.ok]:<3}  {check.found}")
        if check.get:
            lines.append(f"{'':<{width}}       get: {check.get}")
    title = "What is here" if of == "part" else "What each tool can do"
    return "\n".join([title, *(f"  {line}" for line in lines), ""])
