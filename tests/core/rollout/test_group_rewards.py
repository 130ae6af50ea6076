"""Label-free rewards: TTRL's vote and Intuitor's certainty, by their formulas, over groups however they arrive."""

import json
import math
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.engines.open import EngineOptions
from strop.core.errors import DataError, UsageError, Where
from strop.core.models.score import TokenSequence
from strop.core.records import Record
from strop.core.rollout.group_rewards import GroupGrader, Majority, Member, SelfCertainty, majority_rewards
from strop.core.rollout.rescore import KnownTasks
from strop.core.tasks.verifiers import open_verifiers

TASK = {"kind": "task", "id": "t", "prompt": "3+4=", "verifier": {"name": "number"}}


def attempt(sample, response="7", group="g", size=4, task="t", **more):
    fields = {"kind": "rollout", "id": f"{group}/{sample}", "task": task, "group": group, "group_size": size}
    return {**fields, "sample": sample, "response": response, **more}


def records_of(given):
    return [Record.parse(json.dumps(one), Where("-", i)) for i, one in enumerate(given, 1)]


def grade(given, rule=None, on_bad=None):
    """The records that come out, and the summary."""
    bad = []
    with open_verifiers() as verifiers:
        known = KnownTasks()
        grader = GroupGrader(
            rule or Majority(verifiers, known), known, on_bad=on_bad or (lambda error, record: bad.append(str(error)))
        )
        out = [json.loads(one.encode()) for one in grader.run(records_of(given))]
    return out, grader.lines(), bad


def rewards(out):
    return [one.get("reward") for one in out if one["kind"] == "rollout"]


@given(st.lists(st.sampled_from(["1", "2", "3", None])))
def test_the_vote(answers):
    label, values = majority_rewards(answers)
    counts = Counter(answer for answer in answers if answer is not None)
    most = max(counts.values(), default=0)
    assert label == next((answer for answer in answers if answer is not None and counts[answer] == most), None)
    assert values == [1.0 if answer is not None and answer == label else 0.0 for answer in answers]
    assert sum(values) == most


def test_the_majoritys_answer_stands_in_for_the_label():
    """No reference is needed, and a wrong majority wins over a right minority."""
    given = [TASK, attempt(0, "8"), attempt(1, "7"), attempt(2, "8.0\nQ"), attempt(3, "no idea")]
    out, lines, bad = grade(given)
    assert rewards(out) == [1.0, 0.0, 1.0, 0.0]
    assert out[1]["grading"] == {"rule": "majority", "source": "group", "votes": 3, "agreed": 2, "label": "8"}
    assert (lines, bad) == (["reward majority of 4 rollouts in 1 groups: mean 0.5"], [])


def test_of_two_answers_with_as_many_votes_the_first_is_taken():
    out, _, _ = grade([TASK, attempt(0, "8"), attempt(1, "7"), attempt(2, "7"), attempt(3, "8")])
    assert rewards(out) == [1.0, 0.0, 0.0, 1.0]


def test_a_failed_member_does_not_vote_and_stays_as_it_was():
    failed = attempt(1, "8", error="engine lost", advantage=3.0)
    out, lines, _ = grade([TASK, attempt(0, "8"), failed, attempt(2, "7"), attempt(3, "7")])
    assert rewards(out) == [0.0, None, 1.0, 1.0]
    assert out[2] == failed
    assert "1 failed ones left as they were" in lines[0]
    only_failed, _, _ = grade([TASK, attempt(0, size=1, error="lost")])
    assert "reward" not in only_failed[1]


def test_an_empty_vote_is_worth_nothing_to_all():
    out, lines, _ = grade([TASK, *(attempt(i, "no idea") for i in range(4))])
    assert rewards(out) == [0.0] * 4
    assert "label" not in out[1]["grading"]
    assert lines[-1] == "1 groups without any answer"


def test_an_earlier_reward_and_its_credit_do_not_outlive_it():
    old = {"reward": 1.0, "success": True, "advantage": 0.5, "credit": {}, "steps": [{"reward": 1.0, "anchor": "s"}]}
    out, _, _ = grade([TASK, *(attempt(i, "7", **old) for i in range(3)), attempt(3, "8", **old, x=1)])
    last = out[-1]
    assert (last["reward"], last["success"], last["x"]) == (0.0, True, 1)
    assert last["steps"] == [{"reward": 0.0, "anchor": "s"}]
    assert not {"advantage", "credit"} & last.keys()


def test_groups_that_come_interleaved_leave_in_input_order():
    note = {"kind": "note", "x": 1}
    given = [
        TASK, attempt(0, "1", "a", 2), attempt(0, "5", "b", 2), note, attempt(1, "5", "b", 2), attempt(1, "2", "a", 2),
        attempt(0, "9", "c", 3), attempt(1, "9", "c", 3),
    ]  # fmt: skip
    out, lines, _ = grade(given)
    assert [one.get("id") for one in out] == [one.get("id") for one in given]
    assert rewards(out) == [1.0, 1.0, 1.0, 0.0, 1.0, 1.0]
    assert lines[1] == "1 groups were incomplete at the end of the input"


def test_bad_members_are_named_and_the_others_still_vote():
    given = [
        TASK, attempt(0, "7"), attempt(1, None), attempt(2, "7"), attempt(2, "8"), attempt(3, "8"),
        attempt(0, group="h", size=1, task="unknown"), attempt(0, group="i", size=1, statement_version=2),
    ]  # fmt: skip
    out, _, bad = grade(given)
    assert rewards(out) == [1.0, 1.0, 0.0]
    assert [line.partition(" (")[0] for line in bad] == [
        "<stdin>:3: response: missing; an answer is read from the response",
        "<stdin>:5: id: 'g/2' came before in group 'g'",
        "<stdin>:7: task: no task 'unknown' came before this rollout",
        "<stdin>:8: statement_version: an attempt at statement version 2, the task is at 1",
    ]


@pytest.fixture
def certainty(tiny_model):
    return SelfCertainty(EngineOptions(engine="transformers", model=str(tiny_model), device="cpu", dtype="float32"))


def chunk(ids, *spans):
    return {"token_ids": ids, "sampled": [list(span) for span in spans]}


def test_certainty_is_the_mean_divergence_of_the_plain_model(tiny_model, certainty):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    chunks = [[chunk([5, 9, 17, 3, 88, 41], (2, 4), (5, 6))], [chunk([7, 8, 9], (1, 3)), chunk([7, 8, 30, 4], (3, 4))]]
    given = [attempt(i, size=3, chunks=one) for i, one in enumerate(chunks)] + [
        attempt(2, size=3, chunks=[chunk([5, 6], (2, 2))])
    ]
    out, lines, bad = grade(given, certainty)
    for record, some in zip(out, chunks, strict=False):
        values = []
        for one in some:
            with torch.inference_mode():
                log_p = model(torch.tensor([one["token_ids"]])).logits[0].double().log_softmax(-1)
            rows = [p - 1 for start, end in one["sampled"] for p in range(start, end)]
            values += [-math.log(log_p.shape[-1]) - float(log_p[row].mean()) for row in rows]
        assert record["reward"] == pytest.approx(sum(values) / len(values), abs=5e-5)
        assert record["grading"] == {"rule": "self-certainty", "source": "policy", "tokens": 3}
    assert (out[2]["reward"], out[2]["grading"]["tokens"]) == (0.0, 0)
    assert lines[1:] == ["3 rollouts were sampled by another policy than --model and --adapter"]
    assert bad == []


def test_the_policy_is_known_by_its_content(tiny_model, certainty):
    from strop.core.models.load import resolve_model

    policy = {"model": "elsewhere", "revision": resolve_model(str(tiny_model)).revision, "adapter": None}
    _, lines, _ = grade([attempt(0, size=1, chunks=[chunk([5, 9], (1, 2))], policy=policy)], certainty)
    assert len(lines) == 1


@pytest.mark.parametrize(
    ("chunks", "told"),
    [
        ([], "chunks: missing"),
        ([chunk([5, 50_000], (1, 2))], r"chunks\[0\]: token id 50000 at position 1 lies outside the vocabulary"),
        ([chunk([5, 6], (1, 2)), chunk([5] * 600, (599, 600))], r"chunks\[1\]: 600 tokens are more than the 512"),
        ([chunk([5, 6], (0, 2))], r"chunks\[0\]: spans .* the first token has nothing before it"),
        ([chunk([5, 6], (1, 3))], r"chunks\[0\].sampled\[0\]: span .* outside the 2 tokens"),
    ],
)
def test_tokens_that_the_model_cannot_have_sampled(certainty, chunks, told):
    def fail(error, record):
        raise error

    with pytest.raises(DataError, match=f"<stdin>:1: {told}"):
        grade([attempt(0, size=1, chunks=chunks)], certainty, on_bad=fail)


@pytest.mark.parametrize(
    "more", [{"engine": "vllm"}, {"engine": "auto", "endpoints": ("localhost:1",)}, {"engine": "script:said.txt"}]
)
def test_engines_without_whole_distributions(tiny_model, more):
    with pytest.raises(UsageError, match="needs whole distributions: --engine transformers"):
        SelfCertainty(EngineOptions(model=str(tiny_model), device="cpu", **more))


def test_a_certainty_that_is_no_number_is_no_reward(certainty):
    member = Member(False, [], sequences=[TokenSequence([5, 9, 3], [(1, 3)])])
    assert math.isfinite(certainty.rewards([member])[0][0])
    certainty._model.model.norm.weight.data.fill_(float("nan"))
    with pytest.raises(DataError, match="computes nan as the certainty of a response"):
        certainty.rewards([member])
