"""The verifier `countdown`: an expression over the given numbers that has the target as its value.

The reference is {"numbers": [...], "target": N, "solution": "..."}; the solution is not looked at.

Rules: each given number is used at most once (`use_all`: exactly once) and no other number occurs; the operators are
those of `operators`; there are no signs. `division`: with "exact" (default) a division that leaves a remainder is not
allowed, as in the television game, with "rational" quotients are fractions. Values are exact, intermediate ones may be
negative, and no limit is set on them.

The expression may be followed by "= TARGET". `extract` (see extract.py) says where it stands; expressions are parsed
(expressions.py), never evaluated as code.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import msgspec

from strop.core.errors import DataError
from strop.core.tasks.expressions import Division, ExpressionError, evaluate, leaves, operators_of, parse_expression
from strop.core.tasks.verifiers.extract import How, extract
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

OPERATORS = ("+", "-", "*", "/")


class CountdownOptions(Options):
    """The rules; see above."""

    extract: How = "line"
    use_all: bool = False
    division: Division = "exact"
    operators: tuple[str, ...] = OPERATORS


class Puzzle(msgspec.Struct):
    """The reference."""

    numbers: list[int]
    target: int
    solution: str | None = None


class CountdownVerifier(PlainVerifier):
    """Parses the expression and checks it against the rules."""

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options = options_of(task, CountdownOptions)
        if not options.operators or not set(options.operators) <= set(OPERATORS):
            raise DataError(f"expected some of {' '.join(OPERATORS)}", field="verifier.operators")
        _puzzle(task)

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the value is the target; otherwise `reason` says which rule was broken."""
        options = options_of(task, CountdownOptions)
        puzzle = _puzzle(task)
        answer = extract(response, options.extract)
        if answer is None:
            return Verdict.of(False, reason=f"no answer of the form {options.extract!r}")
        try:
            reason = _fault(answer, puzzle, options)
        except ExpressionError as error:
            reason = str(error)
        return Verdict.of(reason is None, found=shown(answer), reason=reason)


def _puzzle(task: Task) -> Puzzle:
    try:
        return msgspec.convert(task.reference, Puzzle)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DataError(message, field="reference" + path.rstrip("`")) from None


def _fault(answer: str, puzzle: Puzzle, options: CountdownOptions) -> str | None:
    expression, equals, value = answer.strip().strip("$").strip().partition("=")
    if equals and value.strip() != str(puzzle.target):
        return f"it claims {shown(value.strip())!r}"
    tree = parse_expression(expression)
    # First which numbers there are: then none can be large.
    used = Counter(leaves(tree))
    if foreign := used - Counter(puzzle.numbers):
        return f"{min(foreign)} is not given so often"
    if options.use_all and used != Counter(puzzle.numbers):
        return "not all numbers are used"
    if other := operators_of(tree) - set(options.operators):
        return f"{min(other)} is not allowed"
    found = evaluate(tree, options.division)
    return None if found == puzzle.target else f"its value is {found}"
