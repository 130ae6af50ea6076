"""Groups into optimiser batches: by id, complete, in whatever order they come."""

import json

import pytest

from strop.core.errors import DataError, Where
from strop.core.records import Record
from strop.core.train.batches import BatchReader
from strop.core.train.examples import Reading


def rollout(group, sample, size=2, advantage=1.0, **more):
    values = {
        "kind": "rollout", "id": f"{group}/{sample}", "task": group, "group": group, "group_size": size,
        "sample": sample, "advantage": advantage,
        "chunks": [{"token_ids": [1, 2, 3], "sampled": [[1, 3]], "logprobs": [-1, -1]}], **more,
    }  # fmt: skip
    return {name: value for name, value in values.items() if value is not None}


def read(records, loss="ppo", **options):
    def fail(error, record):
        raise error

    options = {"groups_per_batch": 0, "on_bad": fail, "on_other": lambda _: None, **options}
    reader = BatchReader(Reading(loss, needs_old=loss == "ppo"), **options)
    lines = (Record.parse(json.dumps(one), Where("-", i + 1)) for i, one in enumerate(records))
    return reader, [(batch.groups, [one.id for one in batch.examples]) for batch in reader.run(lines)]


def test_interleaved_groups_form_batches_as_they_complete():
    records = [rollout("a", 0), rollout("b", 0), rollout("c", 0), rollout("b", 1), rollout("a", 1), rollout("c", 1)]
    _, batches = read(records, groups_per_batch=2)
    assert batches == [(["b", "a"], ["b/0", "b/1", "a/0", "a/1"]), (["c"], ["c/0", "c/1"])]


def test_a_batch_leaves_before_later_input_is_read():
    def endless():
        for number in range(10**9):
            yield rollout(f"g{number}", 0, size=1)

    ignore = {"on_bad": lambda *_: None, "on_other": lambda _: None}
    reader = BatchReader(Reading("ppo", needs_old=True), groups_per_batch=3, **ignore)
    lines = (Record.parse(json.dumps(one), Where("-", 1)) for one in endless())
    batches = reader.run(lines)
    assert [next(batches).groups for _ in range(3)] == [[f"g{3 * i + j}" for j in range(3)] for i in range(3)]


def test_zero_groups_per_batch_is_the_whole_input():
    _, batches = read([rollout(f"g{i}", j) for i in range(5) for j in range(2)])
    assert [len(groups) for groups, _ in batches] == [5]


def test_failed_rollouts_complete_their_group_and_are_left_out():
    failed = rollout("a", 1, error="sandbox lost", advantage=None)
    reader, batches = read([rollout("a", 0), failed, rollout("b", 0), rollout("b", 1)], groups_per_batch=1)
    assert batches == [(["a"], ["a/0"]), (["b"], ["b/0", "b/1"])]
    assert reader.counts.errors == 1


def test_rollouts_without_advantage_are_left_out_and_counted():
    reader, batches = read([rollout("a", 0), rollout("a", 1, advantage=None)])
    assert batches == [(["a"], ["a/0"])]
    assert reader.counts.no_advantage == 1


def test_no_advantage_anywhere_is_an_error():
    with pytest.raises(DataError, match="strop advantage"):
        read([rollout("a", 0, advantage=None), rollout("a", 1, advantage=None)])


def test_groups_of_left_out_members_do_not_fill_a_batch():
    failed = [rollout("x", i, error="lost", advantage=None) for i in range(2)]
    _, batches = read([*failed, rollout("a", 0), rollout("a", 1), rollout("b", 0), rollout("b", 1)], groups_per_batch=2)
    assert [groups for groups, _ in batches] == [["x", "a", "b"]]


def test_incomplete_groups_are_used_at_the_end():
    reader, batches = read([rollout("a", 0, size=3), rollout("a", 1, size=3)], groups_per_batch=1)
    assert batches == [(["a"], ["a/0", "a/1"])]
    assert reader.counts.incomplete_groups == 1


def test_no_group_size_waits_for_the_end_and_no_group_is_the_task():
    records = [rollout("a", 0, size=None), rollout("b", 0, size=None), rollout("a", 1, size=None)]
    for record in records[::2]:
        del record["group"]
    reader, batches = read(records)
    assert batches == [(["a@1", "b"], ["a/0", "a/1", "b/0"])]
    assert reader.counts.incomplete_groups == 0


def test_duplicate_id_in_a_group_is_bad():
    with pytest.raises(DataError, match="came before"):
        read([rollout("a", 0), rollout("a", 0)])


def test_a_bad_member_counts_for_its_group_when_set_aside():
    bad = rollout("a", 1)
    bad["chunks"][0]["logprobs"] = [-1]
    errors = []
    _, batches = read(
        [rollout("a", 0), bad, rollout("b", 0), rollout("b", 1)],
        groups_per_batch=1,
        on_bad=lambda error, record: errors.append(error),
    )
    assert len(errors) == 1
    assert batches == [(["a"], ["a/0"]), (["b"], ["b/0", "b/1"])]


def test_consumed_groups_are_skipped_whole():
    records = [rollout(name, i) for name in "abc" for i in range(2)]
    reader, batches = read(records, groups_per_batch=1, consumed=["a", "c"])
    assert [groups for groups, _ in batches] == [["b"]]
    assert reader.counts.skipped_groups == 2


def test_zero_advantages_are_kept_or_skipped():
    silent = [rollout("a", 0, advantage=0.0), rollout("a", 1, advantage=0.0)]
    records = [*silent, rollout("b", 0), rollout("b", 1, advantage=0.0)]
    reader, batches = read(records)
    assert len(batches[0][1]) == 4
    assert reader.counts.groups_without_signal == 1
    reader, batches = read(records, skip_zero=True)
    assert batches[0][1] == ["b/0"]
    assert reader.counts.groups_without_signal == 1


def test_sft_records_are_groups_of_their_own_and_other_kinds_go_elsewhere():
    sft = [{"kind": "sft", "id": f"s{i}", "token_ids": [1, 2], "trained": [[1, 2]]} for i in range(3)]
    others = [{"kind": "task", "id": "t"}, rollout("a", 0, success=True), rollout("a", 1)]
    passed = []
    _, batches = read([*sft, *others], "sft", groups_per_batch=2, on_other=passed.append)
    assert batches == [(["s0", "s1"], ["s0", "s1"]), (["s2", "a"], ["s2", "a/0"])]
    assert [record.kind for record in passed] == ["task"]
    with pytest.raises(DataError, match="came before"):
        read([sft[0], sft[0]], "sft")


def test_sft_records_are_of_no_use_to_a_policy_gradient():
    passed = []
    _, batches = read([{"kind": "sft", "id": "s", "token_ids": [1, 2], "trained": [[1, 2]]}], on_other=passed.append)
    assert batches == []
    assert [record.kind for record in passed] == ["sft"]
