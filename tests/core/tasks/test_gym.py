"""reasoning-gym: every data set makes tasks that its own scorer accepts, by the reference as it is in a record."""

from __future__ import annotations

import contextlib
import json
import re

import pytest

pytest.importorskip("reasoning_gym")

from strop.core.errors import UsageError, Where
from strop.core.records import Record, Task
from strop.core.tasks.families import FamilyOptions, open_family
from strop.core.tasks.gym import gym_names, gym_version
from strop.core.tasks.verifiers import open_verifiers
from strop.core.tasks.verifiers.child import Child, ChildError

WORKER = "strop.core.tasks.gym_worker:worker"

# Data sets of version 0.1.25 without an answer of their own, and where an entry holds one nevertheless.
WITHOUT_ANSWER = {
    "boxnet": None,
    "graph_color": lambda metadata: json.dumps(dict(metadata["possible_answer"]["$items"])),
    "propositional_logic": None,
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
    "rush_hour": None,
}
# These take seconds an item.
SLOW = {"futoshiki", "knight_swap", "sokoban", "zebra_puzzles", "intermediate_integration"}


@pytest.fixture(scope="module")
def worker():
    child = Child(WORKER, cpu_limit_s=120.0)
    yield child
    child.close()


@pytest.fixture(scope="module")
def other_worker():
    child = Child(WORKER, cpu_limit_s=120.0)
    yield child
    child.close()


def make(child, name, item, seed=5):
    request = {"do": "make", "dataset": name, "config": {}, "seed": seed, "item": item}
    # Through JSON text, as a record travels.
    return json.loads(json.dumps(child.call(request)["entry"]))


def score(child, name, entry, answer):
    return child.call({"do": "score", "dataset": name, "config": {}, "entry": entry, "answer": answer})


def test_every_data_set_scores_its_own_answer_1(worker, other_worker):
    names = worker.call({"do": "names"})
    assert names == gym_names()
    assert len(names) > 100
    faults = []
    for name in names:
        if name == "composite":
            continue
        items = [0] if name in SLOW else [0, 1, 7]
        entries = [make(worker, name, item) for item in items]
        # Made alone, in another process: the same, whatever was made before.
        if make(other_worker, name, items[-1]) != entries[-1]:
            faults.append((name, "not stateless"))
        if len({entry["question"] for entry in entries}) < len(entries) and name not in ("coin_flip", "n_queens"):
            faults.append((name, "the same question"))
        for entry in entries:
            answer = entry["answer"]
            if (answer is None) != (name in WITHOUT_ANSWER):
                faults.append((name, f"own answer {answer!r}"))
            own = WITHOUT_ANSWER.get(name, lambda _, answer=answer: answer)
            if own is not None and score(worker, name, entry, own(entry["metadata"])) != 1:
                faults.append((name, "its own answer does not score 1"))
            if not 0 <= score(worker, name, entry, None) < 1:
                faults.append((name, "no answer scores 1"))
    assert faults == []


def tasks(name, numbers=range(3), seed=1, **options):
    family = open_family(f"reasoning-gym:{name}", FamilyOptions(**options))
    made = [family.make(i, seed) for i in numbers]
    family.close()
    return made


def judge(verifiers, task, response):
    record = Record.parse(Record.make("task", task).encode().decode(), Where("tasks.jsonl", 1))
    return verifiers.verify(response, record, record.view(Task))


def test_tasks_and_verdicts():
    task = tasks("chain_sum", settings=(("min_terms", 2), ("max_terms", 2)))[0]
    entry = task.reference["entry"]
    assert re.fullmatch(r"reasoning-gym:chain_sum\.[0-9a-f]{6}-1-0", task.id)
    assert task.prompt == [
        {
            "role": "user",
            "content": f"{entry['question']}\n\nGive your final answer between <answer> and </answer> tags.",
        }
    ]
    assert task.verifier == {"name": "reasoning-gym", "version": gym_version(), "extract": "tag"}
    assert task.reference["config"] == {"min_terms": 2, "max_terms": 2}
    with open_verifiers() as verifiers:
        right = judge(verifiers, task, f"Hm.\n<answer>{entry['answer']}</answer>")
        assert (right.reward, right.success, right.details) == (1.0, True, {"found": entry["answer"]})
        # The scorer gives a part of the reward for an answer with something around it.
        part = judge(verifiers, task, f"<answer>It is {entry['answer']}</answer>")
        assert 0 < part.reward < 1
        assert not part.success
        assert judge(verifiers, task, entry["answer"]).reward == 0
        text = tasks("chain_sum", format="text")[0]
        assert isinstance(text.prompt, str)
        assert judge(verifiers, text, text.reference["entry"]["answer"] + "\n").success


def test_a_scorer_that_takes_nonsense_is_told_of():
    for name, told in (("game_of_life_halting", True), ("gcd", False)):
        family = open_family(f"reasoning-gym:{name}", FamilyOptions())
        for i in range(2):
            family.make(i, 1)
        family.close()
        assert len(family.notices) == told
        assert all("gives 'I would rather not say.' full marks" in notice for notice in family.notices)


def test_stateless_and_split():
    made = tasks("gcd", [0, 1, 40], seed=3)
    assert tasks("gcd", [40, 1, 0], seed=3) == made[::-1]
    assert tasks("gcd", [0], seed=4)[0].reference != made[0].reference
    parts = {}
    for split in ("train", "heldout"):
        family = open_family("reasoning-gym:coin_flip", FamilyOptions(split=split))
        made = [family.make(i, seed) for seed in (1, 2) for i in range(30)]
        parts[split] = {task.reference["entry"]["question"] for task in made}
        family.close()
    assert not parts["train"] & parts["heldout"]
    assert parts["heldout"]


def test_the_hash_seed_plays_no_part(monkeypatch):
    """These data sets (and knight_swap) walk through sets of texts: a child's hash seed is fixed."""
    names = ("isomorphic_strings", "ransom_note", "word_ladder", "polynomial_multiplication")
    made = []
    for seed in ("1", "2"):
        monkeypatch.setenv("PYTHONHASHSEED", seed)
        child = Child(WORKER, cpu_limit_s=120.0)
        made.append([make(child, name, item) for name in names for item in (0, 1)])
        child.close()
    assert made[0] == made[1]


def test_an_answer_the_scorer_chokes_on_is_a_failed_attempt():
    task = tasks("prime_factorization")[0]
    with open_verifiers() as verifiers:
        verdict = judge(verifiers, task, "<answer>two x three</answer>")
        assert (verdict.reward, verdict.success, verdict.error) == (0.0, False, None)
        assert "ValueError" in verdict.details["raised"]
        assert judge(verifiers, task, f"<answer>{task.reference['entry']['answer']}</answer>").success


@pytest.mark.parametrize(
    "name", ["n_queens", "string_insertion", "spiral_matrix", "binary_matrix", "simple_integration", "countdown"]
)
def test_code_in_an_answer_is_not_run(worker, tmp_path, name):
    """Some scorers call eval() on the answer, themselves or through sympy."""
    target = tmp_path / "touched"
    for code in (f"open({str(target)!r}, 'w')", f"__import__('os').system('touch {target}')"):
        with contextlib.suppress(ChildError):
            assert score(worker, name, make(worker, name, 0), code) < 1
    assert not target.exists()
    # What they accept is still accepted: a list instead of the text.
    if name == "spiral_matrix":
        entry = make(worker, name, 0)
        assert score(worker, name, entry, str([int(x) for x in entry["answer"].split()])) == pytest.approx(0.1)


def test_composite():
    parts = [{"name": "gcd", "weight": 2}, {"name": "chain_sum", "config": {"min_terms": 2, "max_terms": 2}}]
    made = tasks("composite", range(12), settings=(("datasets", parts),))
    assert {task.reference["entry"]["metadata"]["source_dataset"] for task in made} == {"gcd", "chain_sum"}
    with open_verifiers() as verifiers:
        assert all(judge(verifiers, t, f"<answer>{t.reference['entry']['answer']}</answer>").success for t in made)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("chainsum", {}, "reasoning-gym has no data set 'chainsum' (did you mean chain_sum"),
        ("qqqq", {}, "has no data set 'qqqq' (synth-tasks --list names them)"),
        ("chain_sum", {"settings": (("terms", 1),)}, "(known: min_terms, max_terms, min_digits, max_digits"),
        ("chain_sum", {"settings": (("min_terms", 99),)}, "max_terms must be >= min_terms"),
        ("chain_sum", {"settings": (("seed", 1),)}, "--set seed=...: --seed and -n decide this"),
        ("chain_sum", {"terms": (2, 2)}, "--terms does not apply to the family reasoning-gym"),
        ("composite", {}, "composite does not take these --set"),
        ("chain_sum", {"format": "few-shot"}, "--format 'few-shot': expected one of chat, text"),
    ],
)
def test_options_that_do_not_fit(name, options, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        tasks(name, **options)


def test_an_entry_of_a_data_set_that_is_gone_is_an_error():
    task = tasks("gcd")[0]
    task.reference["dataset"] = "gone"
    with open_verifiers() as verifiers:
        verdict = judge(verifiers, task, "<answer>1</answer>")
    assert verdict.error == "verifier reasoning-gym: this version has no data set 'gone'"
