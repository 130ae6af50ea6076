"""Rollouts in batches: their order, what is left alone, what is set aside."""

import pytest

from strop.core.distill.attempts import AttemptError, Stream, TaskBook, apply_to_all, spans_of, tail_of
from strop.core.errors import DataError
from strop.core.records import Chunk, Record, Span

TASK = {"id": "t", "prompt": "1+1=", "verifier": {"name": "number"}, "reference": 2}


def rollout(name, sampled=((2, 4),), **more):
    chunk = {"token_ids": [5, 6, 7, 8], "sampled": sampled, "logprobs": [-1.0] * sum(b - a for a, b in sampled)}
    return Record.make("rollout", {"id": name, "task": "t", "chunks": [chunk], **more})


class Marker:
    """Gives every token the number of its batch; refuses the ids it is told to."""

    def __init__(self, refused=()):
        self.batches = []
        self.refused = refused

    def check(self, attempt):
        attempt.need_task()

    def apply(self, attempts):
        for one in attempts:
            if one.rollout.id in self.refused:
                raise AttemptError(one, "no score")
        self.batches.append([one.rollout.id for one in attempts])
        for one in attempts:
            one.set_signals([{"gate": [float(len(self.batches))] * one.num_sampled}], {"method": "marker"})


def run(records, size=2, refused=(), done=()):
    method, bad = Marker(refused), []
    stream = Stream(
        method, TaskBook(), size=size, vocabulary=10, done=lambda name: name in done,
        on_bad=lambda error, record: bad.append(str(error)),
    )  # fmt: skip
    return list(stream.run(records)), method, bad, stream.counts


def test_batches_by_number_and_the_order_of_the_input():
    records = [Record.make("task", TASK), rollout("a"), Record.make("note", {"id": "n"}), rollout("b"), rollout("c")]
    out, method, bad, counts = run(records)
    assert [record.get("id") for record in out] == ["t", "a", "n", "b", "c"]
    assert method.batches == [["a", "b"], ["c"]]
    assert [record.get("chunks")[0]["gate"] for record in out if record.kind == "rollout"] == [[1, 1], [1, 1], [2, 2]]
    assert not bad
    assert counts.tokens == 6


def test_records_before_the_first_rollout_do_not_wait():
    def source():
        yield Record.make("task", TASK)
        reached.append(True)
        yield rollout("a")

    reached = []
    stream = Stream(Marker(), TaskBook(), size=8, vocabulary=None, done=lambda _: False, on_bad=None)
    found = stream.run(source())
    assert next(found).kind == "task"
    assert not reached


def test_failed_and_empty_rollouts_pass_untouched_and_known_ones_are_dropped():
    records = [
        Record.make("task", TASK), rollout("a", error="engine lost"), rollout("b", sampled=()), rollout("c"),
        rollout("d"),
    ]  # fmt: skip
    out, method, _, counts = run(records, done=("d",))
    assert [record.get("id") for record in out] == ["t", "a", "b", "c"]
    assert method.batches == [["c"]]
    assert "distill" not in out[1].fields
    assert (counts.failed, counts.empty, counts.resumed) == (1, 1, 1)


def test_what_cannot_be_scored_is_set_aside_and_the_rest_of_its_batch_is_not():
    records = [Record.make("task", TASK), *(rollout(name) for name in "abcd")]
    out, method, bad, _ = run(records, size=4, refused=("b", "c"))
    assert [record.get("id") for record in out] == ["t", "a", "d"]
    assert method.batches == [["a", "d"]]
    assert len(bad) == 2
    assert "no score" in bad[0]


def test_everything_refused_leaves_nothing_to_apply():
    records = [Record.make("task", TASK), rollout("a")]
    out, method, bad, _ = run(records, refused=("a",))
    assert [record.kind for record in out] == ["task"]
    assert len(bad) == 1
    assert apply_to_all(method, [], None) == []


def test_an_error_of_the_input_comes_after_what_was_read_before_it():
    def source():
        yield Record.make("task", TASK)
        yield rollout("a")
        raise DataError("torn")

    stream = Stream(Marker(), TaskBook(), size=8, vocabulary=None, done=lambda _: False, on_bad=None)
    seen = []
    with pytest.raises(DataError, match="torn"):
        for record in stream.run(source()):
            seen.append(record.get("id"))
    assert seen == ["t", "a"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (rollout("a"), "no task 't' came before"),
        (rollout("a", sampled=((0, 2),)), "cannot have been sampled"),
        (rollout("a", sampled=((2, 9),)), "outside the 4 tokens"),
        (rollout("a", statement_version=2), "statement version 2"),
    ],
)
def test_bad_rollouts(record, message):
    records = [record] if "no task" in message else [Record.make("task", TASK), record]
    out, _, bad, _ = run(records)
    assert message in bad[0]
    assert all(one.kind == "task" for one in out)


def test_rollouts_of_another_model_are_counted():
    made = [rollout(name, policy={"revision": said}) for name, said in (("a", "x"), ("b", "y"), ("c", None))]
    records = [Record.make("task", TASK), *made]
    stream = Stream(Marker(), TaskBook(), size=2, vocabulary=None, done=lambda _: False, on_bad=None, revision="x")
    assert len(list(stream.run(records))) == 4
    assert stream.counts.others == 1


def test_ids_outside_the_vocabulary_are_bad():
    record = rollout("a")
    record.set(chunks=[{"token_ids": [5, 6, 7, 10], "sampled": [[2, 4]], "logprobs": [-1, -1]}])
    _, _, bad, _ = run([Record.make("task", TASK), record])
    assert "vocabulary of 10" in bad[0]


def test_signals_stand_beside_the_log_probabilities_and_old_credit_goes():
    record = rollout("a", advantage=0.5, credit={"rule": "grpo"})
    run([Record.make("task", TASK), record])
    assert record.get("advantage") == 0.5
    book = TaskBook()
    book.place(Record.make("task", TASK))
    attempt = book.place(record)
    attempt.set_signals([{"advantages": [0.123456789, -0.0]}], {"method": "x"})
    assert record.get("chunks")[0]["advantages"] == [0.1234568, 0.0]
    assert record.get("chunks")[0]["token_ids"] == [5, 6, 7, 8]
    assert "advantage" not in record.fields
    assert "credit" not in record.fields


def test_spans_and_tails():
    chunk = Chunk([1, 2, 3, 4, 5], [Span(1, 1), Span(2, 3), Span(4, 5)])
    assert spans_of(chunk) == [(2, 3), (4, 5)]
    assert spans_of(chunk, 10) == [(12, 13), (14, 15)]
    assert tail_of(chunk) == (2, [3, 4, 5])
