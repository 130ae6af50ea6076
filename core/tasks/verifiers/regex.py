"""The verifier `regex`: the response matches a pattern (Python's `re`).

The pattern is the option `pattern`, or else the reference. With `group` the text of that group must be the reference.
Matching runs in a child process: a pattern that takes exponential time on some response fails that response
(`verdict.timeout`) and stops nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from strop.core.errors import DataError
from strop.core.tasks.verifiers.child import Child, MachineFault, ResponseFault, ask
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

CPU_LIMIT_S = 2.0
FLAGS = {"ignore_case": re.IGNORECASE, "multiline": re.MULTILINE, "dotall": re.DOTALL}


class RegexOptions(Options):
    """`match`: "search" anywhere, or "full" for the whole response (blanks around it aside)."""

    pattern: str | None = None
    group: int | str | None = None
    match: Literal["search", "full"] = "search"
    ignore_case: bool = False
    multiline: bool = False
    dotall: bool = False

    @property
    def flags(self) -> int:
        """As `re` takes them."""
        return sum(flag for name, flag in FLAGS.items() if getattr(self, name))


class RegexVerifier(PlainVerifier):
    """Matches patterns in a child process."""

    def __init__(self) -> None:
        self._child = Child("strop.core.tasks.verifiers.regex:worker", cpu_limit_s=CPU_LIMIT_S)

    def check(self, task: Task) -> None:
        """Raises DataError where the pattern, the group or the reference do not fit."""
        options = options_of(task, RegexOptions)
        field = "reference" if options.pattern is None else "verifier.pattern"
        try:
            compiled = re.compile(_pattern(task, options), options.flags)
        except (re.error, OverflowError, RecursionError) as error:
            raise DataError(f"not a regular expression: {error}", field=field) from None
        if options.group is None:
            return
        if options.pattern is None or not isinstance(task.reference, str):
            raise DataError(
                "with verifier.group the pattern is verifier.pattern, and the reference the text to find",
                field="reference" if options.pattern is not None else "verifier.pattern",
            )
        groups = compiled.groups if isinstance(options.group, int) else compiled.groupindex
        if (isinstance(groups, int) and not 0 <= int(options.group) <= groups) or (
            not isinstance(groups, int) and options.group not in groups
        ):
            raise DataError(f"the pattern has no group {options.group!r}", field="verifier.group")

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the pattern matches, and its group is the reference."""
        options = options_of(task, RegexOptions)
        request = [_pattern(task, options), int(options.flags), options.match, options.group, response]
        try:
            found = ask(self._child, request, [*request[:-1], ""])
        except ResponseFault as fault:
            return Verdict.of(False, **fault.details)
        except MachineFault as fault:
            return Verdict.failed(f"verifier regex: {fault}")
        if options.group is None:
            return Verdict.of(found is not None)
        return Verdict.of(found == task.reference, found=shown(found))

    def close(self) -> None:
        """Ends the child process."""
        self._child.close()


def _pattern(task: Task, options: RegexOptions) -> str:
    pattern = task.reference if options.pattern is None else options.pattern
    if not isinstance(pattern, str):
        raise DataError("missing; the pattern stands in verifier.pattern or is the reference", field="verifier.pattern")
    return pattern


def worker() -> Callable[[Any], str | None]:
    """The child's handler: the text of the group (the whole match without one), or None."""

    def handle(request: Any) -> str | None:
        pattern, flags, how, group, response = request
        compiled = re.compile(pattern, flags)
        match = compiled.fullmatch(response.strip()) if how == "full" else compiled.search(response)
        return None if match is None else match.group(group or 0)

    return handle
