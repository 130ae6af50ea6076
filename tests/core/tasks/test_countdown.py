"""The family countdown: every task is solvable by its own rules, and its reference proves it."""

from __future__ import annotations

import re

import pytest

from strop.core.errors import UsageError
from strop.core.records import Record, Task
from strop.core.tasks.families import FamilyOptions, open_family
from strop.core.tasks.verifiers import open_verifiers


def make(n, seed=1, **options):
    opened = open_family("countdown", FamilyOptions(**options))
    return [opened.make(i, seed) for i in range(n)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"format": "few-shot"},
        {"use_all": True, "terms": (4, 5)},
        {"division": "rational", "use_all": True},
        {"operators": ("/",), "terms": (2, 2)},
        {"operators": ("+", "-"), "target": (-20, 0)},
        {"split": "heldout"},
    ],
)
def test_the_solution_of_every_task_is_accepted(options):
    with open_verifiers() as verifiers:
        for task in make(40, **options):
            record = Record.make("task", task)
            puzzle = task.reference
            answer = puzzle["solution"]
            response = f"I think <answer>{answer}</answer>" if isinstance(task.prompt, list) else f" {answer}\nNumbers:"
            verdict = verifiers.verify(response, record, record.view(Task))
            assert verdict.success, (task, verdict)
            wrong = f"<answer>{answer}+1</answer>" if isinstance(task.prompt, list) else f"{answer}+1"
            assert not verifiers.verify(wrong, record, record.view(Task)).success
            low, high = options.get("target", (1, 100))
            assert low <= puzzle["target"] <= high
            assert all(1 <= number <= 50 for number in puzzle["numbers"])
            if options.get("use_all"):
                assert sorted(map(int, re.findall("[0-9]+", answer))) == sorted(puzzle["numbers"])


def test_rational_tasks_need_fractions_now_and_then():
    solutions = [task.reference for task in make(300, division="rational", operators=("-", "/"), use_all=True)]
    with open_verifiers() as verifiers:
        refused = 0
        for reference in solutions:
            task = Task(id="t", verifier={"name": "countdown"}, reference=reference)
            refused += not verifiers.verify(reference["solution"], Record.make("task", task), task).success
    assert refused > 0


def test_golden_prompts():
    few_shot = make(1, seed=2, format="few-shot")[0]
    lines = few_shot.prompt.split("\n")
    assert lines[:2] == [
        "Numbers: 2 4 7. Target: 20. Expression: (7-2)*4",
        "Numbers: 3 5 6. Target: 23. Expression: 6*3+5",
    ]
    numbers, target = few_shot.reference["numbers"], few_shot.reference["target"]
    assert lines[2] == f"Numbers: {' '.join(map(str, numbers))}. Target: {target}. Expression:"
    assert few_shot.sampling["stop"] == ["\n"]
    chat = make(1, seed=2, use_all=True, operators=("+", "-"))[0]
    shown = ", ".join(map(str, chat.reference["numbers"]))
    assert chat.prompt == [
        {
            "role": "user",
            "content": f"Use the numbers {shown} to make {chat.reference['target']}. Use each of them exactly once. "
            "You may use + - and parentheses.\nThink step by step, then write the expression, without the result, in "
            "<answer> </answer> tags, for example <answer>9-4+2</answer>.",
        }
    ]
    assert (few_shot.reference["numbers"], few_shot.reference["target"], few_shot.reference["solution"]) == GOLDEN


GOLDEN = ([21, 2, 24], 48, "2*24")


def test_stateless_and_distinct():
    assert make(30)[17] == open_family("countdown", FamilyOptions()).make(17, 1)
    assert len({(tuple(t.reference["numbers"]), t.reference["target"]) for t in make(200)}) == 200
    assert len({t.id for t in make(200)}) == 200


def test_the_parts_of_the_split_never_meet():
    def puzzles(split, seed):
        references = [task.reference for task in make(300, seed, split=split, terms=(2, 2))]
        return {(tuple(sorted(reference["numbers"])), reference["target"]) for reference in references}

    assert not puzzles("train", 1) & puzzles("heldout", 2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": (10**9, 10**9)}, "can hardly be reached"),
        ({"range": (-1, 4)}, "--range -1:4: the least is 0"),
        ({"division": "floor"}, "--division 'floor': expected one of exact, rational"),
        ({"terms": (2, 9)}, "the most is 8"),
        ({"fields": (("prompt", "q"),)}, "--field does not apply to the family countdown"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make(1, **options)
