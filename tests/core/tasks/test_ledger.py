"""The ledger: order, stubs, versions, repeats, contiguous input."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import DataError, Where
from strop.core.records import Record
from strop.core.tasks import ledger as ledger_module
from strop.core.tasks.calibration import band_rule
from strop.core.tasks.ledger import Ledger
from strop.core.tasks.verdicts import Verdicts


def records(*items: dict) -> list[Record]:
    return [Record.parse(json.dumps(item), Where("in.jsonl", line)) for line, item in enumerate(items, 1)]


def task(name: str, **fields) -> dict:
    return {"kind": "task", "id": name, "prompt": f"{name}?", **fields}


def attempt(name: str, sample: int, success: bool | None, **fields) -> dict:
    outcome = {"error": "lost"} if success is None else {"success": success}
    return {"kind": "rollout", "id": f"{name}/{sample}", "task": name, "sample": sample, **outcome, **fields}


def decide(*items: dict, **options) -> list[dict]:
    """What comes out, as dicts."""
    book = Ledger(**options)
    verdicts = Verdicts(band_rule(0.2, 0.8))
    out = []
    for record in records(*items):
        if book.is_next(record):
            out.extend(book.release(verdicts))
        book.add(record)
    out.extend(book.release(verdicts))
    return [json.loads(item.record.encode()) for item in out]


def names(out: list[dict]) -> list[str]:
    return [item.get("id", item["kind"]) for item in out]


def test_order_is_kept_and_a_task_leaves_where_it_was_first_heard_of():
    first = [{"kind": "note", "x": 1}, attempt("b", 0, True), task("a"), attempt("a", 0, True)]
    out = decide(*first, task("b"), attempt("c", 0, False))
    assert names(out) == ["note", "b", "b/0", "a", "a/0", "c", "c/0"]
    assert out[1]["prompt"] == "b?"
    assert list(out[5]) == ["kind", "id", "calibration"]


def test_what_passes_through_is_the_same_bytes():
    line = '{"kind":"rollout", "id":"a/0","task":"a","success":true,"chunks":[{"token_ids":[1 ,2]}],"big":1e999}'
    book = Ledger()
    book.add(Record.parse(line, Where("-", 1)))
    out = list(book.release(Verdicts(band_rule(0.2, 0.8))))
    assert out[1].record.encode() == line.encode()


def test_lines_that_wait_on_disk_come_back_the_same(monkeypatch):
    monkeypatch.setattr(ledger_module, "HELD_IN_MEMORY_BYTES", 100)
    items = [attempt("a", i, i % 2 == 0, text="\u2028é" * 20) for i in range(50)]
    out = decide(*items)
    assert out[1:] == items
    assert (out[0]["calibration"]["successes"], out[0]["calibration"]["attempts"]) == (25, 50)


def test_groups_of_one_task_are_counted_together():
    out = decide(attempt("a", 0, True, group="g1"), attempt("b", 0, True), attempt("a", 1, False, group="g2"))
    assert (out[0]["calibration"]["successes"], out[0]["calibration"]["attempts"]) == (1, 2)


def test_a_restated_task_counts_its_own_attempts_only():
    out = decide(
        task("a", statement_version=1),
        attempt("a", 0, False, statement_version=1),
        attempt("a", 1, None, statement_version=1),
        task("a", statement_version=2, prompt="clearer?"),
        attempt("a", 2, True, statement_version=2),
        attempt("a", 3, False, statement_version=2),
    )
    assert names(out) == ["a", "a/0", "a/1", "a", "a/2", "a/3"]
    old, new = out[0]["calibration"], out[3]["calibration"]
    assert (old["verdict"], old["attempts"], old["stale"], old["superseded_by"]) == ("invalid", 0, 2, 2)
    assert (new["verdict"], new["successes"], new["attempts"], new["errors"], new["stale"]) == ("accept", 1, 2, 0, 2)


def test_without_its_record_a_task_is_what_its_newest_attempts_were_made_at():
    out = decide(attempt("a", 0, True), attempt("a", 1, False, statement_version=3))
    assert out[0]["statement_version"] == 3
    assert (out[0]["calibration"]["attempts"], out[0]["calibration"]["stale"]) == (1, 1)


def test_attempts_at_a_newer_statement_than_the_tasks_are_stale_too():
    out = decide(task("a"), attempt("a", 0, True, statement_version=2))
    assert (out[0]["calibration"]["verdict"], out[0]["calibration"]["stale"]) == ("invalid", 1)


def test_a_repeated_task_leaves_once_and_another_statement_is_bad_data():
    assert names(decide(task("a"), attempt("a", 0, True), task("a"))) == ["a", "a/0"]
    with pytest.raises(DataError, match=r"in\.jsonl:2: id: task 'a' came before \(in\.jsonl:1\) with another"):
        decide(task("a"), task("a", prompt="b?"))


def test_a_second_rollout_of_one_id_is_bad_data():
    with pytest.raises(DataError, match=r"in\.jsonl:2: id: 'a/0' came before among the attempts at task 'a'"):
        decide(attempt("a", 0, True), attempt("a", 0, True))
    # One id at two tasks is two attempts.
    both = decide(attempt("a", 0, True), {**attempt("b", 0, True), "id": "a/0"})
    assert [item["calibration"]["attempts"] for item in both if item["kind"] == "task"] == [1, 1]


def test_the_policy_is_named_where_it_is_one():
    one, two = {"model": "m", "version": 1}, {"model": "m", "version": 2}
    again = {"version": 1, "model": "m"}
    out = decide(attempt("a", 0, True, policy=one), attempt("a", 1, True, policy=again), attempt("b", 0, True))
    assert out[0]["calibration"]["policy"] == one
    assert "policy" not in out[3]["calibration"]
    mixed = decide(attempt("a", 0, True, policy=one), attempt("a", 1, True, policy=two))
    assert "policy" not in mixed[0]["calibration"]


def test_contiguous_tasks_leave_when_the_next_begins():
    book = Ledger(contiguous=True)
    verdicts = Verdicts(band_rule(0.2, 0.8))
    left = []
    first = [task("a"), attempt("a", 0, True), {"kind": "x"}]
    for record in records(*first, task("b"), attempt("b", 0, True), attempt("c", 0, True)):
        if book.is_next(record):
            left.append([item.record.kind for item in book.release(verdicts)])
        book.add(record)
    assert left == [["task", "rollout", "x"], ["task", "rollout"]]
    assert len(list(book.release(verdicts))) == 2
    (late,) = records(attempt("a", 1, True))
    with pytest.raises(DataError, match="--contiguous promised otherwise"):
        book.add(late)


streams = st.lists(
    st.one_of(
        st.tuples(st.just("task"), st.sampled_from("abc")),
        st.tuples(st.just("try"), st.sampled_from("abc"), st.sampled_from([True, False, None])),
        st.tuples(st.just("other")),
    ),
    max_size=30,
)


@given(streams)
def test_no_line_is_lost_none_is_twice_and_counts_are_right(items):
    given_items = []
    for number, item in enumerate(items):
        if item[0] == "task":
            given_items.append(task(item[1]))
        elif item[0] == "try":
            given_items.append(attempt(item[1], number, item[2]))
        else:
            given_items.append({"kind": "other", "number": number})
    out = decide(*given_items)
    assert [item for item in out if item["kind"] != "task"] == [item for item in given_items if item["kind"] != "task"]
    tasks = [item for item in out if item["kind"] == "task"]
    first_heard = list(dict.fromkeys(item[1] for item in items if item[0] != "other"))
    assert [item["id"] for item in tasks] == first_heard
    for item in tasks:
        made = [entry[2] for entry in items if entry[0] == "try" and entry[1] == item["id"]]
        fields = item["calibration"]
        assert (fields["successes"], fields["errors"]) == (made.count(True), made.count(None))
        assert fields["attempts"] == len(made) - made.count(None)
