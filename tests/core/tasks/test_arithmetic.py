"""The family arithmetic: prompts byte for byte, statelessness, distinct tasks, the split."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from strop.core.errors import UsageError
from strop.core.tasks.arithmetic import compute, write_sum
from strop.core.tasks.families import FamilyOptions, open_family


def family(**options):
    return open_family("arithmetic", FamilyOptions(**options))


def make(n, seed=1, **options):
    opened = family(**options)
    return [opened.make(i, seed) for i in range(n)]


def expression(task):
    return task.prompt.split("\n")[-1].removesuffix("=")


def test_the_default_prompt_is_the_one_of_the_issue():
    task = make(1)[0]
    a, b = re.fullmatch(r"3\+4=7\n12\+5=17\n([0-9]+)\+([0-9]+)=", task.prompt).groups()
    assert task.reference == int(a) + int(b)
    assert task.id == "arithmetic-1-0"
    assert task.verifier == {"name": "number"}
    assert task.sampling == {"stop": ["\n"], "max_tokens": 4}


def test_golden_tasks():
    assert [(t.prompt, t.reference) for t in make(2, seed=1)] == [
        ("3+4=7\n12+5=17\n44+38=", 82),
        ("3+4=7\n12+5=17\n49+22=", 71),
    ]
    hard = make(1, seed=5, terms=(3, 3), range=(-9, 9), operators=("+", "-", "*"))[0]
    assert (hard.prompt, hard.reference) == ("3+4-2=5\n12-5*7=-23\n6*2+8=20\n-5-(-5)*4=", 15)
    assert hard.id == "arithmetic.168fd0-5-0"
    chat = make(1, seed=1, format="chat")[0]
    assert chat.prompt == [{"role": "user", "content": "Compute 44+38. Reply with the number alone."}]


@pytest.mark.parametrize(
    ("options", "examples"),
    [
        ({"operators": ("-",)}, "3-4=-1\n12-5=7\n"),
        ({"operators": ("*",)}, "3*4=12\n12*5=60\n"),
        ({"terms": (3, 3)}, "3+4+2=9\n12+5+7=24\n"),
        ({"operators": ("+", "-", "*")}, "3+4=7\n12-5=7\n6*2=12\n"),
        ({"operators": ("+", "*"), "terms": (3, 3)}, "3+4*2=11\n12*5+7=67\n"),
    ],
)
def test_worked_lines(options, examples):
    for task in make(5, **options):
        assert task.prompt.startswith(examples)
        assert "\n" not in task.prompt[len(examples) :]


@given(st.lists(st.tuples(st.integers(-50, 50), st.sampled_from("+-*")), min_size=2, max_size=8))
def test_values_are_those_of_python(parts):
    numbers, operators = tuple(n for n, _ in parts), tuple(o for _, o in parts[1:])
    text = write_sum(numbers, operators)
    assert compute(numbers, operators) == eval(text)
    assert not re.search(r"[-+*]-", text)


@settings(deadline=None, max_examples=25)
@given(
    st.integers(0, 2**53), st.integers(0, 5000), st.sampled_from([(2, 2), (2, 4)]), st.sampled_from([(1, 9), (1, 500)])
)
def test_task_i_depends_on_seed_family_and_i_alone(seed, index, terms, numbers):
    opened = family(terms=terms, range=numbers)
    before = opened.make(index, seed)
    opened.make(index + 7, seed)
    opened.make(index, seed + 1)
    assert opened.make(index, seed) == before == family(terms=terms, range=numbers).make(index, seed)


def test_no_question_twice_before_all_were_asked():
    opened = family(range=(1, 12))
    assert opened.num_distinct == 144
    first = [expression(opened.make(i, 3)) for i in range(144)]
    assert len(set(first)) == 144
    second = [expression(opened.make(i, 3)) for i in range(144, 288)]
    assert set(second) == set(first)
    assert second != first
    assert [expression(opened.make(i, 4)) for i in range(144)] != first


def test_each_number_of_terms_is_equally_frequent():
    counts = Counter(len(re.findall(r"[0-9]+", expression(task))) for task in make(300, terms=(2, 4), range=(1, 30)))
    assert counts == {2: 100, 3: 100, 4: 100}
    assert len({expression(task) for task in make(300, terms=(2, 4), range=(1, 30))}) > 295


@pytest.mark.parametrize("numbers", [(1, 49), (1, 9999)])
def test_the_parts_of_the_split_never_meet(numbers):
    train = {expression(t) for s in (1, 2) for t in make(900, seed=s, split="train", range=numbers)}
    held = {expression(t) for s in (1, 2, 3) for t in make(100, seed=s, split="heldout", range=numbers)}
    assert not train & held
    # Another range, another prompt, another seed: the same part.
    other = make(300, seed=9, split="train", range=(1, 30), format="chat")
    other = {task.prompt[0]["content"].split()[1][:-1] for task in other}
    assert not other & held
    assert make(1, split="heldout")[0].id == "arithmetic-heldout-1-0"


def test_the_parts_make_up_the_whole():
    parts = {split: family(split=split, heldout_share=0.25) for split in ("train", "heldout")}
    assert sum(opened.num_distinct for opened in parts.values()) == 49 * 49
    assert abs(parts["heldout"].num_distinct - 600) < 110


def test_ids_differ_where_tasks_differ():
    several: list[dict] = [
        {},
        {"range": (1, 9)},
        {"format": "chat"},
        {"split": "train"},
        {"split": "heldout"},
        {"terms": (2, 3)},
    ]
    ids = [make(1, **options)[0].id for options in several]
    assert len(set(ids)) == len(ids)
    assert ids[1] == make(1, range=(1, 9))[0].id


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({}, "98"),
        ({"range": (1, 9)}, "18"),
        ({"operators": ("-",)}, "-48"),
        ({"operators": ("*",)}, "2401"),
        ({"range": (-9, 9)}, "-18"),
    ],
)
def test_there_is_room_for_the_longest_answer(options, most):
    sampling = make(1, **options)[0].sampling
    assert sampling["max_tokens"] >= len(most) + 1
    # The same for all tasks: it must not tell of the answer.
    assert all(task.sampling == sampling for task in make(50, **options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"terms": (1, 2)}, "--terms 1:2: the least is 2"),
        ({"terms": (2, 9)}, "--terms 2:9: the most is 8"),
        ({"range": (5, 1)}, "--range 5:1: the first bound is above the second"),
        ({"range": (1, 10**16)}, "--range 1:10000000000000000: the bounds lie beyond 1000000000000000"),
        ({"operators": ("+", "/")}, "--operators +,/: expected some of +,-,*"),
        ({"format": "text"}, "--format 'text': expected one of few-shot, chat"),
        ({"target": (1, 2)}, "--target does not apply to the family arithmetic"),
        ({"settings": (("a", 1),)}, "--set does not apply to the family arithmetic"),
        ({"verifier_options": (("wher", "last"),)}, "--verifier-option: verifier: Object contains unknown field"),
        ({"split": "test"}, "--split 'test': expected one of all, train, heldout"),
        ({"heldout_share": 0.5}, "--heldout-share goes with"),
        ({"heldout_share": 1.5, "split": "train"}, "--heldout-share 1.5: expected a number between 0 and 1"),
        ({"range": (1, 1), "split": "heldout"}, "--split heldout: no question is in this part"),
        ({"range": (1, 10**9), "split": "heldout", "heldout_share": 1e-9}, "no question in"),
    ],
)
def test_options_that_do_not_fit(options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        make(1, **options)


def test_large_values_are_texts():
    for task in make(20, terms=(8, 8), range=(1000, 9999), operators=("*",)):
        assert isinstance(task.reference, str)
        assert int(task.reference) == eval(expression(task))
        assert task.sampling["max_tokens"] > len(task.reference)


def test_verifier_options_reach_the_task():
    assert make(1, verifier_options=(("where", "last"),))[0].verifier == {"name": "number", "where": "last"}
