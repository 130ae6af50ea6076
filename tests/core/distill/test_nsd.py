"""Gates, token classes, reflections and conditions of NSD: sheet nsd, 1.2, 1.3, 1.5 and 1.7."""

import math

import pytest

from strop.core.distill.conditions import (
    Condition,
    ConditionRule,
    Prompts,
    attack,
    distractor,
    is_attack,
    problem_of,
    shown,
    with_problem,
)
from strop.core.distill.nsd import GateTally, gates
from strop.core.distill.token_classes import REFLECTIONS, count_reflections, token_class
from strop.core.distill.writing import read_conditions
from strop.core.errors import DataError
from strop.core.records import Record


def logs(*probabilities):
    return [math.log(p) for p in probabilities]


def test_gates_of_the_sheets_vectors():
    found = gates(logs(0.2, 0.95, 0.98), logs(0.5, 0.94, 0.99))
    assert found == pytest.approx([0.3, 0.0, 0.01], abs=1e-12)


def test_gate_in_log_space_and_without_a_gate():
    assert gates(logs(0.2, 0.9), logs(0.5, 0.8), "log") == pytest.approx([math.log(2.5), 0])
    assert gates(logs(0.2, 0.9), logs(0.5, 0.8), "none") == [1.0, 1.0]


def test_rounding_above_zero_does_not_open_a_gate_beyond_one():
    assert gates([-1e9], [1e-4]) == [1.0]


def test_tally_counts_shares_and_the_ratio_of_style_to_task():
    tally = GateTally()
    tally.add([0.5, 0.0, 0.25], ["style", "style", "task"], condition="abcd", is_neutral=False, text="Wait, no.")
    tally.add([0.0], ["task"], condition="", is_neutral=True, text="")
    found = tally.metrics()
    assert found["gate_mean"] == pytest.approx(0.75 / 4)
    assert found["gate_open_share"] == 0.5
    assert found["condition_ok_share"] == 0.5
    assert found["condition_characters"] == 2
    assert found["reflections"] == 0.5
    assert found["style_task_ratio"] == pytest.approx(0.25 / 0.125)


def test_tally_of_nothing_has_no_means():
    found = GateTally().metrics()
    for name in ("gate_mean", "gate_open_share", "condition_ok_share", "style_task_ratio"):
        assert found[name] is None


@pytest.mark.parametrize(
    ("piece", "expected"),
    [
        ("", "style"), ("  ", "style"), ("\n\n", "style"), ("7", "task"), (" x2", "task"), ("=", "task"),
        (" +", "task"), ("\\frac", "task"), ("\\\\", "task"), ("$", "task"), ("^", "task"), (" Log", "task"),
        ("boxed", "task"), (".", "style"), (" —", "style"), ("Therefore", "style"), (" the", "style"),
        (" apples", "neutral"), ("-", "task"), ("well-known", "neutral"), ("\ufffd", "neutral"),
    ],
)  # fmt: skip
def test_token_classes(piece, expected):
    assert token_class(piece) == expected


def test_each_phrase_of_reflection_counts_once():
    for phrase in REFLECTIONS:
        assert count_reflections(f"So {phrase.upper()}, then.") == 1, phrase


def test_reflections_are_whole_words_longest_first_without_overlap():
    assert count_reflections("let me reconsider") == 1
    assert count_reflections("awaiting, waiter, actuality") == 0
    assert count_reflections("That\u2019s wrong. Wait wait!") == 3


def test_an_attack_begins_with_the_literal_words():
    assert is_attack("  \nYou are a student who never checks.")
    assert not is_attack("you are a student who never checks.")
    assert not is_attack("Prompt: You are a student who never checks.")
    assert not attack("", "solution", "student").ok


def test_a_lone_surrogate_in_a_condition_is_replaced():
    assert attack("You are a student who \ud800", "solution", "student").text == "You are a student who ?"


def test_problem_is_the_last_user_message():
    chat = [
        {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]  # fmt: skip
    assert problem_of(chat) == "c"
    changed = with_problem(chat, "e")
    assert [one["content"] for one in changed] == ["a", "b", "e", "d"]
    assert chat[2]["content"] == "c"
    assert with_problem("text", "other") == "other"


@pytest.mark.parametrize(
    "prompt", [[{"role": "system", "content": "a"}], [{"role": "user", "content": [{"type": "text"}]}]]
)
def test_a_prompt_without_a_plain_user_message_is_bad(prompt):
    with pytest.raises(DataError, match="prompt"):
        problem_of(prompt)


def test_templates_put_conditions_and_solutions_into_the_problem():
    prompts = Prompts()
    condition = Condition(text="You are a student who {guesses}.", form="solution", writer="given")
    negative = prompts.negative([{"role": "user", "content": "What is {x}?"}], condition)
    assert negative[0]["content"].startswith("What is {x}?")
    assert "You are a student who {guesses}." in negative[0]["content"]
    wiki = prompts.negative("2 + 2?", Condition(text="Rivers of Peru.", form="wiki", writer="file"))
    assert "Rivers of Peru." in wiki
    assert "instruction" not in wiki
    assert "the answer is 4" in prompts.privileged("2 + 2?", "the answer is 4")
    assert "A SOLUTION" in prompts.writer("solution", "P", "A SOLUTION")
    assert "A SOLUTION" not in prompts.writer("question", "P", "A SOLUTION")


def test_the_writer_is_asked_for_the_words_that_are_checked():
    for form in ("solution", "question"):
        assert "You are a student who" in Prompts().writer(form, "P", "S")


def test_a_task_keeps_its_article_and_a_rollout_does_not_repeat_it():
    articles = [f"article {i} " + "x" * 600 for i in range(50)]
    rule = ConditionRule(form="wiki", seed=42)
    assert distractor(articles, rule, "t1") == distractor(articles, rule, "t1")
    chosen = {distractor(articles, rule, f"t{i}").text for i in range(100)}
    assert len(chosen) > 30
    assert shown(distractor(articles, rule, "t1")) == {"form": "wiki", "writer": "file", "characters": 611}


def test_a_second_condition_of_one_task_is_bad():
    fields = {"task": "a", "text": "You are a student who hurries.", "form": "offline", "writer": "initial"}
    records = [Record.make("condition", {**fields, "statement_version": version}) for version in (1, 2)]
    assert [one.statement_version for one in read_conditions(records)] == [1, 2]
    with pytest.raises(DataError, match="has a condition already"):
        read_conditions([records[0], records[0]])
