"""Routing from the engine to the file: the rows of a chunk, the gap rule, what ends a run, and what a kill leaves."""

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.engines.protocol import Completion, ModelInfo, Request
from strop.core.errors import OutputFailed, Unavailable, UsageError, Where
from strop.core.models.routing import RoutingShape
from strop.core.records import Record, RoutingRef, Sampling, Span
from strop.core.rollout.routing import RoutingLog, TurnRouting, chunk_routing
from strop.core.rollout.routing_file import RoutingFault, RoutingReader, RoutingWriter
from strop.core.rollout.stitch import Stitcher

SHAPE = RoutingShape((0, 2), 300, 2)


def rows(number, tag=0):
    """`number` rows that say who made them: row j of turn `tag` is [[tag, j], [j, tag]] (+ 100 to keep them apart)."""
    return np.array([[[tag, 100 + j], [100 + j, tag]] for j in range(number)], np.uint8).reshape(number, 2, 2)


def turn(fed, sampled, tag=0):
    return TurnRouting(list(fed), list(sampled), rows(len(fed) + len(sampled) - 1, tag))


def makers(routing):
    """Who made each row, and from which of its own rows."""
    return [(int(row[0, 0]), int(row[0, 1]) - 100) for row in routing]


def test_of_one_turn_the_rows_are_the_turns_own():
    one = turn([5, 6, 7], [8, 9])
    assert chunk_routing([5, 6, 7, 8, 9], [Span(3, 5)], [one]).tolist() == one.rows_TLK.tolist()


def test_sampled_tokens_keep_the_row_they_were_drawn_under_and_context_takes_the_last_turns():
    """Fed 1 2 3, drew 4 5; then fed 1 2 3 4 5 6 7, drew 8 9. Rows 2 and 3 predicted 4 and 5, rows 6 and 7 8 and 9."""
    turns = [turn([1, 2, 3], [4, 5], 1), turn([1, 2, 3, 4, 5, 6, 7], [8, 9], 2)]
    found = chunk_routing(list(range(1, 10)), [Span(3, 5), Span(7, 9)], turns)
    assert makers(found) == [(2, 0), (2, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6), (2, 7)]
    assert found.dtype == np.uint8


def test_the_gap_rule_copies_the_row_before_for_context_alone():
    """What a tool said last was fed to nobody: 9 9 9 behind the last sampled token."""
    one = turn([1, 2], [3, 4], 1)
    found = chunk_routing([1, 2, 3, 4, 9, 9, 9], [Span(2, 4)], [one])
    assert makers(found) == [(1, 0), (1, 1), (1, 2), (1, 2), (1, 2), (1, 2)]


def test_the_gap_rule_never_fills_in_for_a_sampled_token():
    """Though another turn was fed it later as context, and though there is a row before it to copy."""
    lost = TurnRouting([1, 2, 3], [4, 5], None)
    with pytest.raises(Unavailable, match="no routing for the sampled token 3"):
        chunk_routing(list(range(1, 10)), [Span(3, 5), Span(7, 9)], [lost, turn([1, 2, 3, 4, 5, 6, 7], [8, 9], 2)])
    short = TurnRouting([1, 2, 3], [4, 5], rows(3, 1))
    with pytest.raises(Unavailable, match="no routing for the sampled token 4"):
        chunk_routing([1, 2, 3, 4, 5], [Span(3, 5)], [short])


def test_without_any_row_there_is_nothing_to_copy():
    with pytest.raises(Unavailable, match="no routing"):
        chunk_routing([1, 2, 3], [Span(1, 3)], [TurnRouting([1], [2, 3], None)])
    late = TurnRouting([1, 2, 3], [4], rows(1, 1), first_row=2)
    with pytest.raises(Unavailable, match="the first token"):
        chunk_routing([1, 2, 3, 4], [Span(3, 4)], [late])


def test_ids_that_left_the_stream_take_their_rows_with_them():
    """The end token 5 was drawn and dropped (case 2): the next prompt has 6 in its place."""
    turns = [turn([1, 2, 3], [4, 5], 1), turn([1, 2, 3, 4, 6], [7], 2)]
    found = chunk_routing([1, 2, 3, 4, 6, 7], [Span(3, 4), Span(5, 6)], turns)
    assert makers(found) == [(2, 0), (2, 1), (1, 2), (2, 3), (2, 4)]


def test_after_a_split_each_chunk_has_the_rows_of_its_own_turns():
    turns = [turn([1, 2, 3], [4, 5], 1), turn([1, 2, 8], [9, 5], 2)]
    assert makers(chunk_routing([1, 2, 3, 4, 5], [Span(3, 5)], turns))[2:] == [(1, 2), (1, 3)]
    assert makers(chunk_routing([1, 2, 8, 9, 5], [Span(3, 5)], turns)) == [(2, 0), (2, 1), (2, 2), (2, 3)]


class FakeEngine:
    """Answers with what is queued; its rows say how many requests came before."""

    name, context_length, concurrency = "fake", 100, 4
    info = ModelInfo("m", "r")

    def __init__(self, answers, spoil=lambda completion: None):
        self.answers = list(answers)
        self.spoil = spoil
        self.asked = []
        self.count = 0

    def submit(self, request):
        self.asked.append(request)

    def collect(self, patience_s=None):
        done = []
        for request in self.asked:
            ids = self.answers[self.count]
            self.count += 1
            routing = rows(len(request.prompt_ids) + len(ids) - 1, self.count)
            done.append(Completion(request.key, ids, [-1.0] * len(ids), "eos", routing=routing))
            self.spoil(done[-1])
        self.asked = []
        return done

    @property
    def pending(self):
        return len(self.asked)

    def logprobs_mode(self, sampling):
        return "scaled"


def play(log, key, observations):
    """An episode of several turns through the stitcher; each observation renders the history after an answer."""
    stitcher = Stitcher(lambda id_: bytes([id_]))
    rendered = [1, 2, 3]
    for observation in observations:
        log.submit(Request(key, stitcher.next_prompt(rendered), Sampling(), 0))
        (completion,) = log.collect()
        stitcher.take(completion.token_ids, completion.logprobs)
        rendered = observation(rendered, completion.token_ids)
    return Record.make("rollout", {"id": key, "task": "t", "chunks": stitcher.chunks()})


def read_all(record, shape=SHAPE):
    reader = RoutingReader()
    found = []
    for i, chunk in enumerate(record.get("chunks")):
        ref = RoutingRef(**chunk["routing"])
        found.append(reader.read(record, i, ref, len(chunk["token_ids"]), shape))
    return found


def test_an_episode_of_several_turns_comes_back_from_the_file(tmp_path):
    """Strict boundaries, then a history that was pruned (a split): two chunks, each with its turns' rows."""
    engine = FakeEngine([[40, 41], [42], [43, 44]])
    with RoutingWriter(tmp_path / "r.bin") as writer:
        log = RoutingLog(engine, writer)
        record = play(log, "g/0", [
            lambda rendered, sampled: [*rendered, *sampled, 50, 51],
            lambda rendered, sampled: [1, 99, 98, 97],
            lambda rendered, sampled: [],
        ])  # fmt: skip
        log.attach(record)
    first, second = read_all(record)
    assert makers(first) == [(2, 0), (2, 1), (1, 2), (1, 3), (2, 4), (2, 5), (2, 6)]
    assert makers(second) == [(3, 0), (3, 1), (3, 2), (3, 3), (3, 4)]
    chunks = record.get("chunks")
    assert chunks[0]["routing"] == {"path": str(tmp_path / "r.bin"), "offset": 0, "shape": [7, 2, 2], "dtype": "uint8"}
    assert chunks[1]["routing"]["offset"] == first.nbytes
    assert (tmp_path / "r.bin").stat().st_size == first.nbytes + second.nbytes


def test_of_earlier_turns_only_the_sampled_rows_are_held(tmp_path):
    """Else an episode of n turns would hold its context n times."""
    engine = FakeEngine([[40 + i] for i in range(5)])
    with RoutingWriter(tmp_path / "r.bin") as writer:
        log = RoutingLog(engine, writer)
        record = play(log, "g/0", [lambda rendered, sampled: [*rendered, *sampled, 50, 51]] * 5)
        assert [len(one.rows_TLK) for one in log._turns["g/0"]] == [1, 1, 1, 1, 15]
        log.attach(record)
        assert not log._turns
    (found,) = read_all(record)
    assert makers(found)[2::3] == [(1, 2), (2, 5), (3, 8), (4, 11), (5, 14)]


def lose(completion):
    completion.routing = None


def cut(completion):
    completion.routing = completion.routing[:-1]


def test_a_chunk_that_ended_keeps_its_context_when_the_next_one_begins_like_it(tmp_path):
    """The new prompt has all of the old one but not the answer: a split, though the old context was let go of."""
    engine = FakeEngine([[40, 41, 42], [43]])
    with RoutingWriter(tmp_path / "r.bin") as writer:
        log = RoutingLog(engine, writer)
        record = play(log, "g/0", [
            lambda rendered, sampled: [*rendered, 40, 77, 78],
            lambda rendered, sampled: [],
        ])  # fmt: skip
        assert [len(one.rows_TLK) for one in log._turns["g/0"]] == [3, 6]
        record.set(chunks=[
            {"token_ids": [1, 2, 3, 40, 41, 42], "sampled": [[3, 6]]},
            {"token_ids": [1, 2, 3, 40, 77, 78, 43], "sampled": [[6, 7]]},
        ])  # fmt: skip
        log.attach(record)
    first, second = read_all(record)
    assert makers(first) == [(2, 0), (2, 1), (1, 2), (1, 3), (1, 4)]
    assert makers(second) == [(2, 0), (2, 1), (2, 2), (2, 3), (2, 4), (2, 5)]


@pytest.mark.parametrize("spoil", [lose, cut])
def test_a_rollout_without_its_routing_ends_the_run(tmp_path, spoil):
    with RoutingWriter(tmp_path / "r.bin") as writer:
        log = RoutingLog(FakeEngine([[40, 41]], spoil), writer)
        with pytest.raises(Unavailable, match="g/0: the engine returned"):
            log.attach(play(log, "g/0", [lambda rendered, sampled: []]))
    assert (tmp_path / "r.bin").read_bytes() == b""


def test_a_rollout_that_the_machine_failed_or_that_said_nothing_needs_none(tmp_path):
    def fail(completion):
        completion.error, completion.routing, completion.token_ids = "lost", None, []

    with RoutingWriter(tmp_path / "r.bin") as writer:
        log = RoutingLog(FakeEngine([[]], fail), writer)
        log.submit(Request("g/0", [1, 2], Sampling(), 0))
        log.collect()
        failed = Record.make("rollout", {"id": "g/0", "task": "t", "error": "lost"})
        log.attach(failed)
        assert failed.get("chunks") is None
        silent = RoutingLog(FakeEngine([[]], lose), writer)
        record = play(silent, "g/1", [lambda rendered, sampled: []])
        silent.attach(record)
        assert "routing" not in record.get("chunks")[0]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 5))
def test_arrays_of_any_length_come_back_whatever_a_killed_run_left_between(tmp_path_factory, lengths, torn):
    path = tmp_path_factory.mktemp("routing") / "r.bin"
    written = []
    for number, length in enumerate(lengths):
        made = rows(length, number).astype(np.uint16 if number % 2 else np.uint8)
        with RoutingWriter(path) as writer:
            written.append((made, writer.append(made)))
        with path.open("ab") as file:
            file.write(b"x" * torn)
    record = Record.parse('{"kind": "rollout"}', Where("in.jsonl", 7))
    reader = RoutingReader()
    for made, ref in written:
        assert reader.read(record, 0, ref, len(made) + 1, SHAPE).tolist() == made.tolist()


def test_a_reader_sees_what_was_appended_after_it_first_looked(tmp_path):
    """`rollout --routing F | train` reads while the file grows."""
    record = Record.parse('{"kind": "rollout"}', Where("in.jsonl", 1))
    reader = RoutingReader()
    with RoutingWriter(tmp_path / "r.bin") as writer:
        for tag in range(3):
            ref = writer.append(rows(4, tag))
            assert makers(reader.read(record, 0, ref, 5, SHAPE))[0] == (tag, 0)


def test_one_writer_at_a_time_and_only_files(tmp_path):
    with RoutingWriter(tmp_path / "r.bin"), pytest.raises(OutputFailed, match="another run"):
        RoutingWriter(tmp_path / "r.bin")
    with pytest.raises(UsageError, match="a file is needed"):
        RoutingWriter(tmp_path)
    with pytest.raises(OutputFailed, match="No such file"):
        RoutingWriter(tmp_path / "none" / "r.bin")


def test_a_full_disk_is_said(tmp_path):
    link = tmp_path / "r.bin"
    with RoutingWriter(link) as writer:
        writer._file.close()
        writer._file = Path("/dev/full").open("ab", buffering=0)  # noqa: SIM115
        with pytest.raises(OutputFailed, match="No space left"):
            writer.append(rows(4))


def test_a_run_that_is_killed_leaves_records_that_point_at_whole_arrays(tmp_path):
    """SIGKILL at any moment: every record that was written out finds its array in the file."""
    script = textwrap.dedent(f"""
        import json, sys
        from pathlib import Path
        import numpy as np
        from strop.core.rollout.routing_file import RoutingWriter
        writer = RoutingWriter(Path({str(tmp_path / "r.bin")!r}))
        number = 0
        while True:
            rows = np.full((50_000, 2, 2), number % 200, np.uint8)
            rows[..., 1] += 1
            ref = writer.append(rows)
            print(json.dumps([number % 200, ref.path, ref.offset, ref.shape, ref.dtype]), flush=True)
            number += 1
    """)
    child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, env=os.environ)
    lines = [child.stdout.readline() for _ in range(20)]
    os.kill(child.pid, signal.SIGKILL)
    lines += child.stdout.read().split(b"\n")
    child.wait()
    record = Record.parse('{"kind": "rollout"}', Where("in.jsonl", 1))
    whole = [json.loads(line) for line in lines if line.strip().endswith(b"]")]
    assert len(whole) >= 20
    for tag, *ref in whole:
        found = RoutingReader().read(record, 0, RoutingRef(*ref), 50_001, SHAPE)
        assert (found[..., 0] == tag).all()


def test_a_file_that_was_cut_is_found_out(tmp_path):
    with RoutingWriter(tmp_path / "r.bin") as writer:
        ref = writer.append(rows(4))
    os.truncate(tmp_path / "r.bin", 15)
    record = Record.parse('{"kind": "rollout"}', Where("in.jsonl", 3))
    with pytest.raises(RoutingFault, match=r"in.jsonl:3: chunks\[1\].routing.offset: .* 15 bytes, and 16 from 0 on"):
        RoutingReader().read(record, 1, ref, 5, SHAPE)
