"""The ordered group buffer: by id, complete when all members were seen, out in the order of the input."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import DataError, Where
from strop.core.groups import REMEMBERED_GROUPS, GroupBuffer
from strop.core.records import Record


def record(name, line=1):
    made = Record.make("rollout", {"id": name})
    made.where = Where("in.jsonl", line)
    return made


def ids(buffer):
    return [r.get("id") for r in buffer.ready()]


def test_a_group_comes_back_when_its_last_member_is_seen():
    buffer = GroupBuffer()
    assert buffer.add(record("a0"), 1, "a", size=2, id="a0", sample=0) is None
    group = buffer.add(record("a1"), 2, "a", size=2, id="a1", sample=1)
    assert group.items == [1, 2]
    assert ids(buffer) == []
    buffer.finish(group)
    assert ids(buffer) == ["a0", "a1"]


def test_order_of_input_behind_an_open_group():
    buffer = GroupBuffer()
    buffer.add(record("a0"), None, "a", size=2, id="a0")
    buffer.pass_on(record("task"))
    b = buffer.add(record("b0"), None, "b", size=1, id="b0")
    buffer.finish(b)
    assert ids(buffer) == []
    assert buffer.num_waiting == 3
    a = buffer.add(record("a1"), None, "a", size=2, id="a1")
    buffer.finish(a)
    assert ids(buffer) == ["a0", "task", "b0", "a1"]
    assert buffer.num_waiting == 0


def test_unordered_lets_the_complete_group_go_first():
    buffer = GroupBuffer(ordered=False)
    buffer.add(record("a0"), None, "a", size=2, id="a0")
    buffer.pass_on(record("task"))
    assert ids(buffer) == ["task"]
    buffer.finish(buffer.add(record("b0"), None, "b", size=1, id="b0"))
    assert ids(buffer) == ["b0"]
    assert buffer.num_waiting == 1


def test_members_without_a_size_wait_for_the_end():
    buffer = GroupBuffer()
    for i in range(3):
        assert buffer.add(record(f"a{i}"), i, "a", size=None, id=f"a{i}") is None
    (group,) = buffer.rest()
    assert group.items == [0, 1, 2]
    assert group.size is None
    assert buffer.rest() == []


def test_a_size_told_by_a_later_member_counts():
    buffer = GroupBuffer()
    buffer.add(record("a0"), None, "a", size=None, id="a0")
    assert buffer.add(record("a1"), None, "a", size=2, id="a1") is not None


@pytest.mark.parametrize(
    ("second", "field", "text"),
    [
        ({"id": "a0", "sample": 1, "size": 3}, "id", "in.jsonl:7"),
        ({"id": "a1", "sample": 0, "size": 3}, "sample", "in.jsonl:7"),
        ({"id": "a1", "sample": 1, "size": 4}, "group_size", "say 3"),
    ],
)
def test_bad_members_name_the_field_and_the_other_place(second, field, text):
    buffer = GroupBuffer()
    buffer.add(record("a0", 7), None, "a", size=3, id="a0", sample=0)
    with pytest.raises(DataError) as caught:
        buffer.add(record("x", 9), None, "a", size=second["size"], id=second["id"], sample=second["sample"])
    assert caught.value.field == field
    assert text in str(caught.value)
    assert str(caught.value).startswith("in.jsonl:9")
    # The good members are still there.
    assert buffer.num_waiting == 1


@pytest.mark.parametrize(("about", "field"), [(("other", 1), "task"), (("t", 2), "statement_version")])
def test_a_group_is_one_task_in_one_version(about, field):
    buffer = GroupBuffer()
    buffer.add(record("a0"), None, "a", size=3, id="a0", about=("t", 1))
    with pytest.raises(DataError, match="earlier members of group 'a' attempted") as caught:
        buffer.add(record("a1"), None, "a", size=3, id="a1", about=about)
    assert caught.value.field == field


def test_a_size_smaller_than_what_came_is_bad():
    buffer = GroupBuffer()
    for i in range(3):
        buffer.add(record(f"a{i}"), None, "a", size=None, id=f"a{i}")
    with pytest.raises(DataError, match="already has 3 members"):
        buffer.add(record("a3"), None, "a", size=2, id="a3")


def test_a_straggler_of_a_complete_group_is_bad():
    buffer = GroupBuffer()
    buffer.finish(buffer.add(record("a0"), None, "a", size=1, id="a0"))
    with pytest.raises(DataError, match="complete before"):
        buffer.add(record("a1"), None, "a", size=1, id="a1")


def test_a_lost_member_completes_its_group():
    buffer = GroupBuffer()
    buffer.add(record("a0"), "kept", "a", size=2, id="a0")
    group = buffer.lost("a", 2)
    assert group.items == ["kept"]
    assert buffer.lost("a", 2) is None


def test_memory_of_left_groups_is_bounded():
    buffer = GroupBuffer(ordered=False)
    for i in range(REMEMBERED_GROUPS + 10):
        buffer.finish(buffer.add(record("x"), None, f"g{i}", size=1, id="x"))
        list(buffer.ready())
    assert len(buffer._left) == REMEMBERED_GROUPS
    assert not buffer._open
    assert buffer.num_waiting == 0


@given(st.lists(st.tuples(st.sampled_from("abcd"), st.booleans()), max_size=60), st.booleans())
def test_every_record_leaves_once_and_in_order(stream, ordered):
    """Whatever is interleaved: nothing lost, nothing twice; ordered output is the input; dropped records stay away."""
    buffer, out, expected = GroupBuffer(ordered=ordered), [], []
    seen = dict.fromkeys("abcd", 0)
    for i, (key, is_foreign) in enumerate(stream):
        name = f"{key}{i}"
        if is_foreign:
            buffer.pass_on(record(name))
            expected.append(name)
        else:
            seen[key] += 1
            # Groups of three, cut into generations so that a key may come again.
            group_key = f"{key}/{(seen[key] - 1) // 3}"
            group = buffer.add(record(name), key, group_key, size=3, id=name)
            if key != "d":
                expected.append(name)
            if group is not None:
                for held in group.members:
                    held.leaves = held.item != "d"
                buffer.finish(group)
        out += ids(buffer)
    for group in buffer.rest():
        for held in group.members:
            held.leaves = held.item != "d"
        buffer.finish(group)
    out += ids(buffer)
    assert sorted(out) == sorted(expected)
    if ordered:
        assert out == expected
