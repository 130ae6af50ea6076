"""Records: what a tool does not touch comes back byte for byte; what it reads is checked and named."""

import json

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.errors import DataError, Where
from strop.core.records import Chunk, Metric, Record, Rollout, Span, Task, check_chunks

HERE = Where("in.jsonl", 7)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=8).filter(lambda name: name != "kind"), json_values, max_size=6))
def test_untouched_line_comes_back_byte_for_byte(fields):
    line = json.dumps({"kind": "whatever", **fields, "kind_of": 1}, ensure_ascii=False)
    record = Record.parse(line + "\r\n", HERE)
    assert record.encode() == line.encode()


@given(st.dictionaries(st.text(min_size=1, max_size=8).filter(lambda k: k not in ("kind", "advantage")), json_values))
def test_setting_a_field_keeps_the_others_and_their_order(fields):
    record = Record.parse(json.dumps({"kind": "rollout", **fields}), HERE)
    record.set(advantage=0.5)
    assert json.loads(record.encode()) == {"kind": "rollout", **fields, "advantage": 0.5}
    assert list(json.loads(record.encode())) == ["kind", *fields, "advantage"]


def test_number_spelling_and_big_integers_survive_a_set():
    record = Record.parse('{"kind":"x","a":1.50,"b":12345678901234567890123,"c":1e-7}', HERE)
    record.set(d=1)
    assert record.encode() == b'{"kind":"x","a":1.50,"b":12345678901234567890123,"c":1e-7,"d":1}'


def test_replacing_keeps_the_place():
    record = Record.parse('{"kind":"x","a":1,"b":2}', HERE)
    record.set(a=[3])
    assert record.encode() == b'{"kind":"x","a":[3],"b":2}'


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"kind":"rollout","id":"x"', "ends in the middle"),
        ("[1,2]", "not a JSON object"),
        ("3", "not a JSON object"),
        ('{"id":1}', "kind: missing"),
        ('{"kind":7}', "kind: "),
        ('{"kind":"x","a":NaN}', "NaN is not JSON"),
        ('{"kind":"x","a":-Infinity}', "Infinity is not JSON"),
        (r'{"kind":"x","a":"\ud800"}', "lone surrogate"),
        ('{"kind":"x"} trailing', "trailing"),
    ],
)
def test_bad_lines_name_their_place(line, says):
    with pytest.raises(DataError) as caught:
        Record.parse(line, HERE)
    assert str(caught.value).startswith("in.jsonl:7: ")
    assert says in str(caught.value)


def test_view_names_the_field():
    record = Record.parse('{"kind":"rollout","id":"a","task":"t","sample":"one"}', HERE)
    with pytest.raises(DataError, match=r"in.jsonl:7: sample: Expected `int \| null`, got `str`"):
        record.view(Rollout)
    with pytest.raises(DataError, match="missing required field `task`"):
        Record.parse('{"kind":"rollout","id":"a"}', HERE).view(Rollout)


def test_a_number_no_float_can_hold_is_bad_where_it_is_read_and_untouched_elsewhere():
    read = Record.parse('{"kind":"rollout","id":"a","task":"t","reward":1e999}', HERE)
    with pytest.raises(DataError, match="reward"):
        read.view(Rollout)
    unread = Record.parse('{"kind":"rollout","id":"a","task":"t","mine":1e999}', HERE)
    unread.view(Rollout)
    unread.set(advantage=0.0)
    assert b'"mine":1e999' in unread.encode()


def test_make_leaves_out_defaults_and_puts_kind_first():
    record = Record.make("metric", Metric(name="loss", value=None))
    assert record.encode() == b'{"kind":"metric","name":"loss","value":null}'
    assert json.loads(Record.make("task", Task(id="t", prompt="p")).encode()) == {
        "kind": "task",
        "id": "t",
        "prompt": "p",
    }


def test_spans_are_pairs():
    assert msgspec.json.encode(Chunk([1, 2, 3], [Span(1, 3)], [-0.5, -0.25])) == (
        b'{"token_ids":[1,2,3],"sampled":[[1,3]],"logprobs":[-0.5,-0.25]}'
    )


@pytest.mark.parametrize(
    ("chunk", "field"),
    [
        (Chunk([1, 2, 3], [Span(1, 4)]), r"chunks\[0\].sampled\[0\]"),
        (Chunk([1, 2, 3], [Span(-1, 2)]), r"chunks\[0\].sampled\[0\]"),
        (Chunk([1, 2, 3], [Span(2, 1)]), r"chunks\[0\].sampled\[0\]"),
        (Chunk([1, 2, 3], [Span(1, 3), Span(0, 1)]), r"chunks\[0\].sampled\[1\]"),
        (Chunk([1, 2, 3], [Span(1, 3)], [-1.0]), r"chunks\[0\].logprobs"),
        (Chunk([1, 2, 3], [Span(1, 3)], [-1.0, -1.0], [0.5]), r"chunks\[0\].advantages"),
        (Chunk([1, 2, 99], [Span(1, 3)], [-1.0, -1.0]), r"chunks\[0\].token_ids"),
    ],
)
def test_chunks_are_checked(chunk, field):
    record = Record.parse('{"kind":"rollout","id":"a","task":"t"}', HERE)
    with pytest.raises(DataError, match=field):
        check_chunks(record, [chunk], vocabulary=50)
    check_chunks(record, [Chunk([1, 2, 3], [Span(1, 2), Span(2, 3)], [-1.0, -1.0])], vocabulary=50)
