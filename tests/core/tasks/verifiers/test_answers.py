"""The answers that verifiers read without a reference: equal answers are equal texts, and no reference is needed."""

import pytest

from strop.core.errors import DataError, Where
from strop.core.records import Record, Task
from strop.core.tasks.verifiers import VERIFIERS, open_verifier, open_verifiers
from strop.core.tasks.verifiers.verdict import ReadsAnswer

RECORD = Record.make("rollout", {"id": "r"})
RECORD.where = Where("-", 3)


def answer(response, **verifier):
    with open_verifiers() as verifiers:
        return verifiers.answer(response, RECORD, Task(id="t", verifier=verifier))


@pytest.mark.parametrize(
    ("response", "options", "expected"),
    [
        ("7.0\n8+1=9", {"name": "number"}, "7"),
        ("+100", {"name": "number"}, "100"),
        ("-0.0", {"name": "number"}, "0"),
        (".50", {"name": "number"}, "0.5"),
        ("seven", {"name": "number"}, None),
        ("so it costs $1,234.50.", {"name": "number", "where": "last"}, "1234.5"),
        ("1" * 40 + "0", {"name": "number"}, "1" * 40 + "0"),
        ("1" * 1001, {"name": "number"}, None),
        ("<answer> Paris  City </answer>", {"name": "exact", "extract": "tag", "ignore_case": True,
                                           "ignore_space": True}, "paris city"),
        ("Paris", {"name": "exact", "extract": "tag"}, None),
        ("The answer is (b).", {"name": "choice"}, "B"),
        ("The answer is E.", {"name": "choice", "num_choices": 4}, None),
        ("A good choice is hard to find", {"name": "choice"}, None),
        ("so \\boxed{ \\frac{1} {2} }", {"name": "math"}, "\\frac{1}{2}"),
        ("one half", {"name": "math"}, None),
        ("<answer>a b</answer>", {"name": "reasoning-gym"}, "a b"),
    ],
)  # fmt: skip
def test_answers(response, options, expected):
    assert answer(response, **options) == expected


@pytest.mark.parametrize("pair", [("7", "7.00"), ("1e3", "1000"), ("1,000", "1000"), ("-3", "3"), ("0.1", "0.10")])
def test_numbers_are_one_answer_where_the_verifier_takes_them_for_equal(pair):
    verifier = open_verifier("number")
    task = Task(id="t", verifier={"name": "number"}, reference=pair[1])
    answers = [verifier.answer(text, task) for text in pair]
    assert verifier(pair[0], task, RECORD).success == (answers[0] is not None and answers[0] == answers[1])


def test_which_verifiers_read_answers():
    found = {name for name in VERIFIERS if isinstance(open_verifier(name), ReadsAnswer)}
    assert found == {"number", "exact", "choice", "math", "reasoning-gym"}


def test_what_cannot_be_compared_is_named():
    with pytest.raises(DataError, match=r"<stdin>:3: verifier.name: answers for the verifier 'countdown' cannot be"):
        answer("1+2", name="countdown")
    with pytest.raises(DataError, match=r"<stdin>:3: verifier.name: unknown verifier 'oracle'"):
        answer("1+2", name="oracle")
    with pytest.raises(DataError, match=r"<stdin>:3: verifier.where"):
        answer("1", name="number", where="middle")
