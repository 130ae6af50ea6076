"""The verifiers that only look at text: number, exact, choice, countdown, and where an answer stands."""

from __future__ import annotations

import ast
import re
import time
from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import DataError, Where
from strop.core.records import Record, Task
from strop.core.tasks.verifiers import open_verifiers
from strop.core.tasks.verifiers.extract import extract

WHERE = Where("tasks.jsonl", 3)


def record_of(verifier, reference):
    record = Record.make("task", {"id": "t", "prompt": "p", "verifier": verifier, "reference": reference})
    return Record.parse(record.encode().decode(), WHERE)


def judge(response, reference, name, **options):
    record = record_of({"name": name, **options}, reference)
    with open_verifiers() as verifiers:
        verdict = verifiers.verify(response, record, record.view(Task))
    assert verdict.error is None
    assert verdict.reward == float(verdict.success)
    return verdict


@pytest.mark.parametrize(
    ("response", "reference", "success"),
    [
        ("7\n8+1=9", 7, True),
        (" 7 \n", 7, True),
        ("7", "7", True),
        ("7.0", 7, True),
        ("-7", -7, True),
        ("+7", 7, True),
        (".5", 0.5, True),
        ("0.1", 0.1, True),
        ("\r\n7", 7, False),
        ("17", 7, False),
        ("7 apples", 7, False),
        ("=7", 7, False),
        ("7 8", 7, False),
        ("\n7", 7, False),
        ("", 7, False),
        ("seven", 7, False),
        ("7e0", 7, False),
        ("٧", 7, False),
        ("7" * 5000, 7, False),
        ("1,000", 1000, False),
        ("NaN", 7, False),
        ("12345678901234567890123456789012345", 12345678901234567890123456789012345, True),
        ("12345678901234567890123456789012346", 12345678901234567890123456789012345, False),
    ],
)
def test_number_up_to_the_line_end(response, reference, success):
    if isinstance(reference, int) and abs(reference) > 2**53:
        reference = str(reference)
    assert judge(response, reference, "number").success is success


@pytest.mark.parametrize(
    ("response", "reference", "success"),
    [
        ("So 3 + 4 is 7.", 7, True),
        ("First 7, then 8", 7, False),
        ("It costs $1,234,567.50 in all", 1234567.5, True),
        ("12-5=7", 7, True),
        ("the answer is -7", -7, True),
        ("the answer is −7", -7, True),
        ("12-5", 5, True),
        ("1, 2,3", 3, True),
        ("**18**", "She makes 9*2=18 dollars.\n#### 18", True),
        ("version 1.2", 1.2, True),
        ("about .5", 0.5, True),
        ("No.5", 5, True),
        ("none", 5, False),
        ("5\n\nQ: 2+2=4", 5, False),
    ],
)
def test_last_number(response, reference, success):
    assert judge(response, reference, "number", where="last").success is success


def test_number_tolerance_is_absolute_and_off_by_default():
    assert not judge("3.1416", 3.14159, "number").success
    assert judge("3.1416", 3.14159, "number", tolerance=0.00001).success
    assert not judge("3.1417", 3.14159, "number", tolerance=0.00001).success
    assert judge("0.3", 0.1, "number", tolerance=0.2).success


@pytest.mark.parametrize(
    ("response", "reference", "options", "success"),
    [
        (" Paris \n", "Paris", {}, True),
        ("paris", "Paris", {}, False),
        ("paris", "Paris", {"ignore_case": True}, True),
        ("STRASSE", "straße", {"ignore_case": True}, True),
        ("a  b\nc", "a b c", {"ignore_space": True}, True),
        ("a  b", "a b", {}, False),
        ("NYC", ["New York", "NYC"], {}, True),
        ("7", 7, {}, True),
        ("Hm. <answer> x </answer>", "x", {"extract": "tag"}, True),
        ("x", "x", {"extract": "tag"}, False),
        ("x\ny", "x", {"extract": "line"}, True),
        ("y\nx\n\n", "x", {"extract": "last-line"}, True),
        ("", "", {}, True),
    ],
)
def test_exact(response, reference, options, success):
    assert judge(response, reference, "exact", **options).success is success


@pytest.mark.parametrize(
    ("response", "found"),
    [
        ("B", "B"), ("(b)", "B"), ("(B)", "B"), ("B) because A is wrong", "B"), ("B. Paris", "B"), ("**B**", "B"),
        ("The answer is C.", "C"), ("the correct answer is: (d)", "D"), ("Answer: **B**", "B"), ("Option A no", None),
        ("A good choice is hard to make", None), ("I think it is A or B", None), ("First A.\nThe answer is B", "B"),
        ("The answer is A. No, the answer is B.", "B"), ("<answer>c</answer>", "C"), (r"so \boxed{\text{D}}", "D"),
        (r"\boxed{B} and the answer is A", "B"), ("Let me see.\nB", "B"), ("", None), ("answer is about 5", None),
        ("<answer>A and B</answer>", None), ("The answer is Aardvark", None), ("A", "A"), ("I", "I"), ("A car", None),
    ],
)  # fmt: skip
def test_choice(response, found):
    verdict = judge(response, "B", "choice")
    assert verdict.details.get("found") == found
    assert verdict.success is (found == "B")


def test_choice_by_index_and_among_few():
    assert judge("C", 2, "choice").success
    assert not judge("E", 2, "choice", num_choices=4).success
    assert judge("c", "c", "choice", num_choices=4).success


@pytest.mark.parametrize(
    ("how", "response", "answer"),
    [
        ("boxed", r"\boxed{1} and \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("boxed", r"\boxed{5} then \boxed{6", "5"),
        ("boxed", r"\boxed{a \boxed{b}}", "b"),
        ("boxed", r"\boxed{\{1,2\}}", r"\{1,2\}"),
        ("boxed", r"\fbox{3}", "3"),
        ("boxed", r"\boxed 3", None),
        ("tag", "<answer>a</answer> <answer>b</answer>", "b"),
        ("tag", "<answer>a</answer> <answer>b", "a"),
        ("tag", "</answer><answer>", None),
        ("tag", "<answer>x <answer>y</answer>", "y"),
        ("line", "", ""),
        ("last-line", "\n\n", ""),
    ],
)
def test_where_the_answer_stands(how, response, answer):
    assert extract(response, how) == answer


@pytest.mark.parametrize("how", ["response", "line", "last-line", "tag", "boxed"])
def test_extraction_is_linear(how):
    started = time.process_time()
    box = r"\boxed{"
    for hostile in (box * 40_000, "<answer>" * 40_000, "\n" * 300_000, "{}" * 100_000 + box, "\\" * 300_001):
        extract(hostile, how)
    assert time.process_time() - started < 5


@pytest.mark.parametrize("name", ["number", "exact", "choice"])
def test_long_responses_are_cheap(name):
    started = time.process_time()
    for part in ("1", "1,111", "-", "answer is ", "(*_`", ".5"):
        hostile = part * (300_000 // len(part))
        judge(hostile, 3 if name == "number" else "B", name, **({"where": "last"} if name == "number" else {}))
    assert time.process_time() - started < 10


PUZZLE = {"numbers": [3, 4, 6, 8], "target": 24}


@pytest.mark.parametrize(
    ("response", "options", "reason"),
    [
        ("(8-4)*6", {}, None),
        ("(8-4)*6 = 24", {}, None),
        ("$(8-4) \\times 6$", {}, None),
        (" 6*4\nNumbers:", {}, None),
        ("(8-4)*6", {"use_all": True}, "not all numbers are used"),
        ("8*3*(4/6)", {"division": "rational"}, "its value is 16"),
        ("6*4+8-8", {}, "8 is not given so often"),
        ("24", {}, "24 is not given so often"),
        ("4!", {}, "is no number, operator or parenthesis"),
        ("6*4 = 25", {}, "it claims '25'"),
        ("6*4 = 4*6", {}, "it claims '4*6'"),
        ("8*3", {"operators": ["+", "-"]}, "* is not allowed"),
        ("-(4-8)*6", {}, "where a number should be"),
        ("", {}, "it ends too early"),
        ("__import__('os').system('true')", {}, "is no number"),
        ("<answer>6*4</answer>", {}, "is no number"),
        ("6*4", {"extract": "tag"}, "no answer of the form 'tag'"),
        ("Think. <answer>6*4</answer>", {"extract": "tag"}, None),
        ("3/(6-6)", {}, "6 is not given so often"),
        ("8/(3-4+6-3)", {}, "3 is not given so often"),
    ],
)
def test_countdown(response, options, reason):
    verdict = judge(response, PUZZLE, "countdown", **options)
    assert verdict.success is (reason is None)
    assert (reason or "") in verdict.details.get("reason", "")


def test_countdown_with_a_remainder_on_the_way():
    eights = {"numbers": [3, 3, 8, 8], "target": 24}
    assert judge("8/(3-8/3)", eights, "countdown", division="rational").success
    assert "leaves a remainder" in judge("8/(3-8/3)", eights, "countdown").details["reason"]


def oracle(text, puzzle, use_all):
    """The rules once more, over Python's own parser."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except SyntaxError:
        return False
    for node in ast.walk(tree):
        if not isinstance(node, ast.Expression | ast.BinOp | ast.Constant | ast.operator):
            return False
        if isinstance(node, ast.operator) and not isinstance(node, ast.Add | ast.Sub | ast.Mult | ast.Div):
            return False
    used = Counter(map(int, re.findall("[0-9]+", text)))
    if used - Counter(puzzle["numbers"]) or (use_all and used != Counter(puzzle["numbers"])):
        return False
    try:
        return eval(re.sub("([0-9]+)", r"F(\1)", text), {"F": Fraction}) == puzzle["target"]
    except ZeroDivisionError:
        return False


@settings(deadline=None, max_examples=600)
@given(
    st.lists(st.sampled_from(["1", "2", "3", "6", "+", "-", "*", "/", "(", ")"]), max_size=9).map(" ".join),
    st.sampled_from(
        [{"numbers": [1, 2, 3], "target": 6}, {"numbers": [2, 2, 6], "target": 4}, {"numbers": [1, 6], "target": 6}]
    ),
    st.booleans(),
)
def test_countdown_against_pythons_parser(text, puzzle, use_all):
    verdict = judge(text, puzzle, "countdown", division="rational", use_all=use_all)
    assert verdict.success is oracle(text, puzzle, use_all)


@pytest.mark.parametrize(
    ("verifier", "reference", "field", "message"),
    [
        (None, 1, "verifier", "missing; a task to judge names its verifier"),
        ({}, 1, "verifier.name", "unknown verifier None (known: number, exact, choice, regex, math, countdown"),
        ({"name": "judge"}, 1, "verifier.name", "unknown verifier 'judge' (known: number, exact"),
        ({"name": ["number"]}, 1, "verifier.name", "unknown verifier"),
        ({"name": "number", "wher": 1}, 1, "verifier", "unknown field `wher`; known options: where, tolerance"),
        ({"name": "number", "where": "end"}, 1, "verifier.where", "Invalid enum value 'end'"),
        ({"name": "number", "tolerance": -1}, 1, "verifier.tolerance", "must not be negative"),
        ({"name": "number"}, "seven", "reference", "expected a number, got 'seven'"),
        ({"name": "number"}, None, "reference", "expected a number"),
        ({"name": "number"}, True, "reference", "expected a number"),
        ({"name": "exact"}, None, "reference", "expected a text"),
        ({"name": "exact"}, [], "reference", "expected a text"),
        ({"name": "choice"}, "AB", "reference", "expected a letter from A to Z"),
        ({"name": "choice", "num_choices": 3}, 3, "reference", "expected a letter from A to C"),
        ({"name": "choice", "num_choices": 1}, "A", "verifier.num_choices", "from 2 to 26"),
        ({"name": "countdown"}, {"numbers": [1]}, "reference", "missing required field `target`"),
        ({"name": "countdown"}, {"numbers": ["1"], "target": 1}, "reference.numbers[0]", "Expected `int`"),
        ({"name": "countdown", "operators": ["^"]}, PUZZLE, "verifier.operators", "expected some of + - * /"),
        ({"name": "regex"}, None, "verifier.pattern", "missing; the pattern stands in verifier.pattern"),
        ({"name": "regex", "pattern": "("}, None, "verifier.pattern", "not a regular expression"),
        ({"name": "regex", "group": 1}, "(a)", "verifier.pattern", "with verifier.group the pattern is"),
        ({"name": "regex", "pattern": "(a)", "group": 2}, "a", "verifier.group", "the pattern has no group 2"),
        ({"name": "regex", "pattern": "(a)", "group": "x"}, "a", "verifier.group", "the pattern has no group 'x'"),
        ({"name": "math"}, "", "reference", "expected LaTeX or a number"),
        ({"name": "reasoning-gym"}, {"dataset": "x"}, "reference", "missing required field `entry`"),
        ({"name": "reasoning-gym"}, {"dataset": "x", "entry": {}}, "reference.entry", "holds no question and answer"),
        ({"name": "command"}, None, "verifier", "missing required field `command`"),
        ({"name": "command", "command": ""}, None, "verifier.command", "names no program"),
        ({"name": "command", "command": "'"}, None, "verifier.command", "cannot be split"),
        ({"name": "command", "command": "/no/such/program"}, None, "verifier.command", "no such program"),
        ({"name": "command", "command": "true", "timeout_s": 0}, None, "verifier.timeout_s", "must be positive"),
    ],
)
def test_a_task_that_cannot_be_judged_is_bad_data(verifier, reference, field, message):
    fields = {"id": "t", "prompt": "p", "reference": reference} | ({} if verifier is None else {"verifier": verifier})
    record = Record.parse(Record.make("task", fields).encode().decode(), WHERE)
    with open_verifiers() as verifiers:
        for call in (verifiers.check, lambda r, t: verifiers.verify("x", r, t)):
            with pytest.raises(DataError) as error:
                call(record, record.view(Task))
            assert (error.value.where, error.value.field) == (WHERE, field)
            assert message in error.value.message
