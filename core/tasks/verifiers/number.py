"""The verifier `number`: the answer is one number.

`where`:
- "line" (default): the response up to its first line feed, blanks aside, must be a plain decimal number and nothing
  else. Where a few-shot prompt is continued, what a base model writes after the line end does not count.
- "last": the last number in the response; thousands separators (1,234,567), a leading dollar sign and a final full
  stop are taken as such. A reference that is a text is read in the same way, so that "... #### 18" means 18.

Numbers are compared by value, exactly, as decimals (7 is 7.0); with `tolerance` by absolute difference.
"""

from __future__ import annotations

import re
from decimal import Decimal, localcontext
from typing import TYPE_CHECKING, Any, Literal

from strop.core.errors import DataError
from strop.core.tasks.verifiers.extract import extract
from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

# ASCII on purpose: \d would take digits of every script. A numeral longer than this is no answer, and costs no time.
MOST_CHARS = 1000
PLAIN = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
# A sign belongs to a number unless a digit stands before it, as in 12-5.
IN_TEXT = re.compile(
    r"(?<![0-9])(?<![0-9]\.)[+-]?\$?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9A-Za-z])\.[0-9]+)"
)
MINUS_SIGN = "\u2212"


class NumberOptions(Options):
    """`where` the number stands, and the absolute `tolerance`."""

    where: Literal["line", "last"] = "line"
    tolerance: float = 0.0


class NumberVerifier(PlainVerifier):
    """Compares one number with the reference, a number or a text that holds one."""

    def check(self, task: Task) -> None:
        """Raises DataError where the options or the reference do not fit."""
        options = options_of(task, NumberOptions)
        if options.tolerance < 0:
            raise DataError("must not be negative", field="verifier.tolerance")
        _reference(task.reference, options)

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """Success where the numbers are equal."""
        options = options_of(task, NumberOptions)
        found = _find(response, options)
        value = None if found is None else _value(found)
        if value is None:
            return Verdict.of(False)
        expected = _reference(task.reference, options)
        return Verdict.of(_is_equal(value, expected, options.tolerance), found=shown(found))

    def answer(self, response: str, task: Task) -> str | None:
        """The number, without what does not change its value; `tolerance` is not used."""
        found = _find(response, options_of(task, NumberOptions))
        value = None if found is None else _value(found)
        if value is None:
            return None
        with localcontext() as context:
            context.prec = 2 * MOST_CHARS
            return f"{value.normalize():f}" if value else "0"


def _find(text: str, options: NumberOptions) -> str | None:
    if options.where == "line":
        line = extract(text, "line") or ""
        return line if len(line) <= MOST_CHARS and PLAIN.fullmatch(line) else None
    numbers: list[str] = IN_TEXT.findall(text.replace(MINUS_SIGN, "-"))
    return numbers[-1] if numbers else None


def _value(numeral: str) -> Decimal | None:
    return Decimal(numeral.replace(",", "").replace("$", "")) if len(numeral) <= MOST_CHARS else None


def _reference(reference: Any, options: NumberOptions) -> Decimal:
    if isinstance(reference, int | float) and not isinstance(reference, bool):
        return Decimal(str(reference))
    found = _find(reference, options) if isinstance(reference, str) else None
    value = None if found is None else _value(found)
    if value is None:
        raise DataError(f"expected a number, got {shown(repr(reference))}", field="reference")
    return value


def _is_equal(value: Decimal, expected: Decimal, tolerance: float) -> bool:
    if not tolerance:
        return value == expected
    with localcontext() as context:
        context.prec = 2 * MOST_CHARS
        return abs(value - expected) <= Decimal(str(tolerance))
