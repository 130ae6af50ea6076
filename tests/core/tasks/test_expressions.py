"""The expression parser against Python's own grammar (as an oracle, on text that the tests make)."""

from __future__ import annotations

import contextlib
import re
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.tasks.expressions import (
    MOST_DEPTH,
    ExpressionError,
    Operation,
    evaluate,
    leaves,
    operators_of,
    parse_expression,
    write_expression,
)

TREES = st.recursive(
    st.integers(0, 60),
    lambda children: st.builds(Operation, st.sampled_from("+-*/"), children, children),
    max_leaves=12,
)


def brute_force(text):
    """The value by Python's grammar, in fractions; None for a division by zero."""
    try:
        return Fraction(eval(re.sub(r"([0-9]+)", r"Fraction(\1)", text), {"Fraction": Fraction}))
    except ZeroDivisionError:
        return None


def value(node):
    try:
        return evaluate(node)
    except ExpressionError:
        return None


def spread(node, draw):
    """The tree as text with blanks and parentheses where they change nothing."""
    if not isinstance(node, Operation):
        text = str(node)
    else:
        text = f"({spread(node.left, draw)}){node.operator}({spread(node.right, draw)})"
    return f"({text})" if draw(st.booleans()) else " " * draw(st.integers(0, 2)) + text


@settings(deadline=None)
@given(TREES)
def test_written_with_few_parentheses_and_read_back(tree):
    text = write_expression(tree)
    assert parse_expression(text) == tree
    assert value(tree) == brute_force(text)
    # Each pair of parentheses is needed: without it the tree is another one.
    for opening in (match.start() for match in re.finditer(r"\(", text)):
        inside = [text[opening : i + 1] for i in range(opening, len(text))]
        closing = opening + next(i for i, part in enumerate(inside) if part.count("(") == part.count(")"))
        assert parse_expression(text[:opening] + text[opening + 1 : closing] + text[closing + 1 :]) != tree


@settings(deadline=None)
@given(TREES, st.data())
def test_parentheses_and_blanks_too_many(tree, data):
    text = spread(tree, data.draw)
    assert parse_expression(text) == tree
    assert value(tree) == brute_force(text)
    assert leaves(tree) == [int(n) for n in re.findall(r"[0-9]+", text)]
    assert operators_of(tree) == set(re.findall(r"[-+*/]", text))


@settings(deadline=None, max_examples=400)
@given(st.text(alphabet="0123456789+-*/() ", max_size=14))
def test_accepts_no_more_and_no_less_than_the_grammar(text):
    # Python also knows signs, "**", "//", leading zeros and the empty tuple, which this grammar does not.
    foreign = re.search(r"(^|[-+*/(])\s*[-+]|\*\s*\*|/\s*/|\(\s*\)|\)\s*\(|[0-9]\s*\(", text)
    try:
        tree = parse_expression(text)
    except ExpressionError:
        if not foreign:
            with pytest.raises(SyntaxError):
                compile(re.sub(r"\b0+(?=[0-9])", "", text.strip()), "", "eval")
        return
    assert not foreign
    assert value(tree) == brute_force(re.sub(r"\b0+(?=[0-9])", "", text.strip()))


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_an_expression_or_an_error(text):
    with contextlib.suppress(ExpressionError):
        assert leaves(parse_expression(text))


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("2 × 3 ÷ 4", "2*3/4"),
        ("2x3", "2*3"),
        ("(1 + 2) x 3", "(1+2)*3"),
        (r"\left(1+2\right) \times 3", "(1+2)*3"),
        ("[1+2]*{3−1}", "(1+2)*(3-1)"),
        (r"6 \div 2 \cdot 3", "6/2*3"),
    ],
)
def test_other_spellings(text, written):
    assert write_expression(parse_expression(text)) == written


@pytest.mark.parametrize(
    "text", ["", "()", "1+", "+1", "-3+4", "1 2", "2(3)", "(1", "1)", "1^2", "1.5", "x", "１+１", "1e3"]
)
def test_no_expression(text):
    with pytest.raises(ExpressionError):
        parse_expression(text)


def test_exact_division_has_no_value_with_a_remainder():
    assert evaluate(parse_expression("8/(3-8/3)")) == 24
    with pytest.raises(ExpressionError, match="8/3 leaves a remainder"):
        evaluate(parse_expression("8/(3-8/3)"), "exact")
    assert evaluate(parse_expression("8/2/2"), "exact") == 2
    with pytest.raises(ExpressionError, match="by zero"):
        evaluate(parse_expression("1/(2-2)"))


def test_hostile_text_is_refused_or_cheap():
    for text in ("(" * 100_000, "1+" * 100_000, "9" * 100_000, "(" * (MOST_DEPTH + 1) + "1" + ")" * (MOST_DEPTH + 1)):
        with pytest.raises(ExpressionError):
            parse_expression(text)
    # The longest chains that are allowed: no recursion, and a value of bounded size.
    assert evaluate(parse_expression("+".join(["1"] * 1000))) == 1000
    assert evaluate(parse_expression("*".join(["99999"] * 330))) == 99999**330
