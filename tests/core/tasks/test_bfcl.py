"""The family `bfcl`: the package's cases as tasks."""

from __future__ import annotations

import pytest

pytest.importorskip("bfcl_eval", reason="needs bfcl-eval (pip install --no-deps bfcl-eval mpmath)")

from strop.core.errors import UsageError
from strop.core.tasks.bfcl import CATEGORIES, parse_call
from strop.core.tasks.families import FamilyOptions, open_family
from strop.core.tasks.verifiers import open_verifier


def tasks(category, **options):
    return list(open_family(f"bfcl:{category}", FamilyOptions(**options)).tasks(0))


@pytest.mark.parametrize("category", CATEGORIES)
def test_every_case_is_a_task(category):
    made = tasks(category)
    assert len(made) == len({task.id for task in made}) == 200
    for task in made:
        assert task.env == "functions"
        assert [message["role"] for message in task.prompt] == ["user"]
        assert len(task.reference["calls"]) == len(task.world["turns"]) + 1
        assert ("held_back" in task.world) == (category == "multi_turn_miss_func")
        assert task.world.get("long_context", False) == (category == "multi_turn_long_context")
        open_verifier("env").check(task)


def test_a_split_parts_conversations_and_is_the_same_in_all_categories():
    def numbers(category, split):
        return {task.id.rpartition("_")[2] for task in tasks(category, split=split, heldout_share=0.3)}

    for category in ("multi_turn_base", "multi_turn_miss_func", "multi_turn_long_context"):
        assert not numbers(category, "train") & numbers("multi_turn_base", "heldout")
        assert len(numbers(category, "train") | numbers(category, "heldout")) == 200
    assert 30 < len(numbers("multi_turn_base", "heldout")) < 90


def test_an_unknown_category():
    with pytest.raises(UsageError, match="did you mean multi_turn_base"):
        tasks("multi_turn_bas")


def test_calls_are_read_and_not_evaluated():
    assert parse_call(" f('a', [1, -2.5], x={'y': None}) ") == ("f", ["a", [1, -2.5]], {"x": {"y": None}})
    for text in ("f(", "f", "f(g())", "f(x=1+y)", "f(**{})", "m.f()", "(lambda: 1)()"):
        with pytest.raises(ValueError):
            parse_call(text)
