"""Streams: framing, places of errors, atomic output, and resuming what a killed run wrote."""

import io
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import DataError, InputMissing, OutputFailed, Where
from strop.core.records import Record
from strop.core.streams import Output, Resumed, WriteGuard, read_records


def read(data: bytes, on_bad=None) -> list[Record]:
    return list(read_records(["-"], io.BytesIO(data), on_bad))


@pytest.mark.parametrize("separator", ["\u2028", "\u2029", "\u0085", "\x0b", "\x0c", "\r", "\x1c"])
def test_only_a_line_feed_ends_a_line(separator):
    text = f"a{separator}b"
    escaped = text if ord(separator) > 0x20 else text.encode("unicode_escape").decode().replace("\\x", "\\u00")
    line = '{"kind":"x","text":"' + escaped + '"}'
    (record,) = read(line.encode() + b"\n")
    assert record.get("text") == text
    assert record.encode() == line.encode()


def test_bom_crlf_blank_lines_and_a_missing_last_line_end():
    records = read(b'\xef\xbb\xbf{"kind":"a"}\r\n\r\n  \n{"kind":"b"}')
    assert [r.kind for r in records] == ["a", "b"]
    assert [r.encode() for r in records] == [b'{"kind":"a"}', b'{"kind":"b"}']
    assert [r.where.line for r in records] == [1, 4]


def test_invalid_utf8_is_named_with_its_line():
    with pytest.raises(DataError, match="<stdin>:2: not UTF-8"):
        read(b'{"kind":"a"}\n{"kind":"\xff"}\n')


def test_bad_lines_can_be_set_aside():
    bad = []
    records = read(b'{"kind":"a"}\nnope\n{"kind":"b"}\n{"kind":\n', lambda error, line: bad.append((str(error), line)))
    assert [r.kind for r in records] == ["a", "b"]
    assert [line for _, line in bad] == [b"nope\n", b'{"kind":\n']
    assert bad[0][0].startswith("<stdin>:2: ")


def test_files_are_concatenated_and_lines_counted_for_each(tmp_path: Path):
    (tmp_path / "one").write_bytes(b'{"kind":"a"}\n')
    (tmp_path / "two").write_bytes(b'{"kind":"b"}')
    records = list(read_records([str(tmp_path / "one"), str(tmp_path / "two")], io.BytesIO()))
    assert [(r.kind, r.where) for r in records] == [
        ("a", Where(str(tmp_path / "one"), 1)),
        ("b", Where(str(tmp_path / "two"), 1)),
    ]
    with pytest.raises(InputMissing, match="No such file"):
        list(read_records([str(tmp_path / "three")], io.BytesIO()))
    with pytest.raises(InputMissing, match="directory"):
        list(read_records([str(tmp_path)], io.BytesIO()))


def test_atomic_output_appears_whole_or_not_at_all(tmp_path: Path):
    path = tmp_path / "out.jsonl"
    path.write_text("old\n")
    with pytest.raises(RuntimeError), Output(path=path) as output:
        output.write(Record.make("x", {"a": 1}))
        raise RuntimeError
    assert path.read_text() == "old\n"
    assert os.listdir(tmp_path) == ["out.jsonl"]
    with Output(path=path) as output:
        output.write(Record.make("x", {"a": 1}))
        assert path.read_text() == "old\n"
    assert path.read_text() == '{"kind":"x","a":1}\n'
    assert os.listdir(tmp_path) == ["out.jsonl"]
    umask = os.umask(0)
    os.umask(umask)
    assert path.stat().st_mode & 0o777 == 0o666 & ~umask


def test_a_signal_during_the_first_write_leaves_a_record_that_is_kept(tmp_path: Path, monkeypatch):
    class Signalled(Exception): ...

    record = Record.make("x", {"a": 1})
    encode = Record.encode

    def encode_as_the_signal_arrives(self: Record) -> bytes:
        monkeypatch.setattr(WriteGuard, "stop", Signalled())  # What a handler does while a write is under way.
        return encode(self)

    monkeypatch.setattr(Record, "encode", encode_as_the_signal_arrives)
    kept = None
    with pytest.raises(Signalled), Output(path=tmp_path / "out.jsonl") as output:
        try:
            output.write(record)
        finally:
            kept = output.keep_partial()
    assert kept == tmp_path / "out.jsonl.part"
    assert kept.read_text() == '{"kind":"x","a":1}\n'
    assert os.listdir(tmp_path) == ["out.jsonl.part"]


def test_a_full_disk_is_said_as_such():
    with pytest.raises(OutputFailed, match="/dev/full: No space left"), Output(path=Path("/dev/full")) as output:
        output.write(Record.make("x", {"a": "b" * 100}))


records = st.lists(
    st.one_of(
        st.builds(lambda i: {"id": f"r{i}"}, st.integers(0, 5)), st.builds(lambda i: {"n": i}, st.integers(0, 2))
    ),
    max_size=8,
)


@given(records, st.data())
def test_a_resumed_file_holds_each_line_once_wherever_it_was_cut(tmp_path_factory, items, data):
    whole = b"".join(Record.make("x", item).encode() + b"\n" for item in items)
    cut = data.draw(st.integers(0, len(whole)))
    path = tmp_path_factory.mktemp("resume") / "out.jsonl"
    path.write_bytes(whole[:cut])
    resumed = Resumed(path)
    with Output(path=path, append=True) as output:
        for item in items:
            record = Record.make("x", item)
            if not resumed.take_line(record):
                output.write(record)
    assert path.read_bytes() == whole
    complete = whole[: whole.rfind(b"\n", 0, cut) + 1]
    assert resumed.num_torn_bytes == cut - len(complete)
