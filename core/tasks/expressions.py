"""Arithmetic expressions: a tokenizer, a parser and an evaluator. No eval, no floats, no recursion on hostile input.

    sum     = product (("+" | "-") product)*
    product = atom (("*" | "/") atom)*
    atom    = NUMBER | "(" sum ")"

Operators of one rank bind to the left. There are no signs: -3 is no atom. NUMBER is a run of ASCII digits. Other
spellings are read as the same operators: x and the multiplication sign, the division sign, the minus sign and dashes,
\\times, \\cdot, \\div; [ ] and { } are parentheses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

MOST_CHARS = 2000
MOST_DEPTH = 100
MOST_DIGITS = 15

Division = Literal["exact", "rational"]

SPELLINGS = {
    "\\times": "*", "\\cdot": "*", "\\div": "/", "\\left": "", "\\right": "", "\u00d7": "*", "\u22c5": "*",
    "\u00b7": "*", "\u00f7": "/", "\u2212": "-", "\u2013": "-", "[": "(", "]": ")", "{": "(", "}": ")",
}  # fmt: skip
TOKEN = re.compile(r"\s*(?:([0-9]+)|([-+*/()]))")
TIMES_AS_LETTER = re.compile(r"(?<=[0-9)\s])x(?=[0-9(\s])", re.IGNORECASE)
RANK = {"+": 1, "-": 1, "*": 2, "/": 2}


class ExpressionError(ValueError):
    """Not an expression, or one without a value."""


@dataclass(frozen=True, slots=True)
class Operation:
    """`left operator right`."""

    operator: str
    left: Node
    right: Node


Node = int | Operation


def parse_expression(text: str) -> Node:
    """The tree of `text`. Raises ExpressionError.

    >>> parse_expression("1+2*3")
    Operation(operator='+', left=1, right=Operation(operator='*', left=2, right=3))
    """
    if len(text) > MOST_CHARS:
        raise ExpressionError(f"longer than {MOST_CHARS} characters")
    # Operator precedence with two stacks; an opening parenthesis is a mark on the stack of operators.
    values: list[Node] = []
    operators: list[str] = []
    depth, wants_value = 0, True
    for token in _tokens(text):
        if wants_value != (token.isdigit() or token == "("):  # noqa: S105
            raise ExpressionError(f"{token!r} where {'a number' if wants_value else 'an operator'} should be")
        if token.isdigit():
            values.append(int(token))
            wants_value = False
        elif token == "(":  # noqa: S105
            depth += 1
            if depth > MOST_DEPTH:
                raise ExpressionError(f"more than {MOST_DEPTH} parentheses inside one another")
            operators.append(token)
        elif token == ")":  # noqa: S105
            depth -= 1
            if depth < 0:
                raise ExpressionError("a closing parenthesis too many")
            _reduce(values, operators, 0)
            operators.pop()
        else:
            _reduce(values, operators, RANK[token])
            operators.append(token)
            wants_value = True
    if wants_value or depth:
        raise ExpressionError("it ends too early")
    _reduce(values, operators, 0)
    return values[0]


def _reduce(values: list[Node], operators: list[str], rank: int) -> None:
    while operators and operators[-1] != "(" and RANK[operators[-1]] >= rank:
        right = values.pop()
        values.append(Operation(operators.pop(), values.pop(), right))


def _tokens(text: str) -> Iterator[str]:
    for spelling, operator in SPELLINGS.items():
        text = text.replace(spelling, operator)
    text = TIMES_AS_LETTER.sub("*", text).strip()
    position = 0
    while position < len(text):
        match = TOKEN.match(text, position)
        if match is None:
            raise ExpressionError(f"{text[position : position + 10]!r} is no number, operator or parenthesis")
        if match.group(1) and len(match.group(1)) > MOST_DIGITS:
            raise ExpressionError(f"a number of more than {MOST_DIGITS} digits")
        position = match.end()
        yield match.group(1) or match.group(2)


def leaves(node: Node) -> list[int]:
    """The numbers of the expression, from left to right."""
    found: list[int] = []
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Operation):
            waiting += [current.right, current.left]
        else:
            found.append(current)
    return found


def operators_of(node: Node) -> set[str]:
    """The operators that occur."""
    found: set[str] = set()
    waiting = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Operation):
            found.add(current.operator)
            waiting += [current.right, current.left]
    return found


def evaluate(node: Node, division: Division = "rational") -> Fraction:
    """The exact value. With division "exact" a quotient must be whole: 7/2 has no value.

    Raises ExpressionError for a division by zero or, with "exact", one with a remainder.
    """
    # A stack of its own: a chain of a thousand terms is as deep as it is long.
    values: list[Fraction] = []
    waiting: list[Node | str] = [node]
    while waiting:
        current = waiting.pop()
        if isinstance(current, Operation):
            waiting += [current.operator, current.right, current.left]
        elif isinstance(current, int):
            values.append(Fraction(current))
        else:
            right = values.pop()
            values.append(_apply(current, values.pop(), right, division))
    return values[0]


def _apply(operator: str, left: Fraction, right: Fraction, division: Division) -> Fraction:
    if operator == "+":
        return left + right
    if operator == "-":
        return left - right
    if operator == "*":
        return left * right
    if right == 0:
        raise ExpressionError("a division by zero")
    quotient = left / right
    if division == "exact" and quotient.denominator != 1:
        raise ExpressionError(f"{left}/{right} leaves a remainder")
    return quotient


def write_expression(node: Node) -> str:
    """Text with no more parentheses than are needed, read back as the same tree."""
    if not isinstance(node, Operation):
        return str(node)
    rank = RANK[node.operator]
    left, right = write_expression(node.left), write_expression(node.right)
    if isinstance(node.left, Operation) and RANK[node.left.operator] < rank:
        left = f"({left})"
    if isinstance(node.right, Operation) and RANK[node.right.operator] <= rank:
        right = f"({right})"
    return f"{left}{node.operator}{right}"
