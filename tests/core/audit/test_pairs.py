"""What is read as a pair or a row, which pairs share a group, and what is refused."""

import io

import pytest

pytest.importorskip("numpy")

from strop.core.audit.pairs import (
    FieldNames,
    check_pairs,
    check_rows,
    field_names,
    is_grouped,
    read_input,
    refuse_to_prune,
)
from strop.core.errors import DataError, UsageError

HEADER = b"Question,Best Answer,Best Incorrect Answer,Note\n"


def read(data, **names):
    return read_input(["-"], io.BytesIO(data), field_names(**names))


def test_repeated_questions_share_a_group_whatever_their_case_and_spaces():
    questions = ["Is it so?", "is  it SO? ", "Is it?", "", ""]
    text = "".join(f'{{"question":"{one}","correct":"a","incorrect":"b"}}\n' for one in questions)
    assert read(text.encode()).groups() == [0, 0, 1, 2, 3]


def test_no_question_is_no_group():
    found = read(b'{"correct":"a","incorrect":"b"}\n{"question":null,"correct":"a","incorrect":"b"}\n')
    assert found.groups() == [0, 1]


def test_a_csv_row_keeps_its_bytes_over_lines():
    row = b'"q, 1","a\nb",c,"say ""no"""\r\n'
    found = read(b"\xef\xbb\xbf" + HEADER + row + b"\nq2,d,e,\n")
    assert found.header == HEADER
    assert [pair.raw for pair in found.pairs] == [row, b"q2,d,e,\n"]
    assert (found.pairs[0].question, found.pairs[0].correct) == ("q, 1", "a\nb")
    assert found.pairs[1].record.where.line == 5


def test_fields_under_other_names():
    found = read(b'{"q":"x","good":"a","bad":"b","correct":"c"}\n', question="q", correct="good", incorrect="bad")
    assert (found.pairs[0].question, found.pairs[0].correct, found.pairs[0].incorrect) == ("x", "a", "b")
    rows = read(b'{"claim":"a","gold":"SUPPORTS"}\n{"claim":"b","gold":"NO"}\n', text="claim", label="gold",
                positive="SUPPORTS").rows  # fmt: skip
    assert [(row.text, row.label, row.group) for row in rows] == [("a", True, None), ("b", False, None)]


@pytest.mark.parametrize(
    ("spelled", "label"),
    [("1", True), ("0", False), ("true", True), ('"False"', False), ('"right"', True), ('"no"', False)],
)
def test_spellings_of_a_label(spelled, label):
    assert read(f'{{"text":"a","label":{spelled}}}\n'.encode()).rows[0].label is label


def test_an_empty_answer_is_one_in_json_and_a_mistake_in_csv():
    assert read(b'{"correct":"","incorrect":"b"}\n').pairs[0].correct == ""
    with pytest.raises(DataError, match="<stdin>:2: Best Answer: an empty cell"):
        read(HEADER + b"q,,b,\n")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b'{"correct":"a"}\n', "<stdin>:1: incorrect: missing"),
        (b'{"correct":"a","incorrect":null}\n', "<stdin>:1: incorrect: null"),
        (b'{"correct":["a"],"incorrect":"b"}\n', "<stdin>:1: correct: "),
        (b'{"correct":"a","incorrect":"b"}\n{"text":"a","label":1}\n', "<stdin>:2: pairs and flat rows in one input"),
        (b'{"text":"a"}\n', "<stdin>:1: label: missing"),
        (b'{"text":"a","label":"maybe"}\n', "<stdin>:1: label: 'maybe'"),
        (b'{"correct":"a",\n', "<stdin>:1: "),
        (HEADER + b"q,a,b\n", "<stdin>:2: 3 cells; the header names 4 columns"),
        (HEADER + b'q,a,"b,\n', "<stdin>:2: not CSV"),
        (b"a,a\n1,2\n", "<stdin>:1: two columns have one name"),
    ],
)
def test_what_is_refused_names_its_place(text, says):
    with pytest.raises(DataError) as caught:
        read(text)
    assert says in str(caught.value)


def test_a_bad_line_goes_to_the_caller_and_reading_goes_on():
    bad = []
    text = HEADER + b"q,a,b,\nq,\xff,b,\nq,a\nq,c,d,\n"
    found = read_input(["-"], io.BytesIO(text), FieldNames(), on_bad=lambda error, line: bad.append((str(error), line)))
    assert [pair.correct for pair in found.pairs] == ["a", "c"]
    assert [line for _, line in bad] == [b"q,\xff,b,\n", b"q,a\n"]
    assert bad[0][0] == "<stdin>:3: not UTF-8"


def test_records_of_other_kinds_pass():
    passed = []
    text = b'{"kind":"task","id":"t"}\n{"correct":"a","incorrect":"b"}\n'
    found = read_input(["-"], io.BytesIO(text), FieldNames(), on_foreign=passed.append)
    assert (len(found.pairs), found.num_foreign, [record.kind for record in passed]) == (1, 1, ["task"])


def test_too_few_pairs():
    with pytest.raises(DataError, match="<stdin>:4: 4 pairs; expected at least 5"):
        check_pairs(read(b'{"correct":"a","incorrect":"b"}\n' * 4))
    check_pairs(read(b'{"correct":"a","incorrect":"b"}\n' * 5))
    with pytest.raises(DataError, match="<stdin>:9: question: 1 different questions; expected at least 5"):
        check_pairs(read(b'{"question":"q","correct":"a","incorrect":"b"}\n' * 9))


RIGHT, WRONG = b'{"group":"g%d","text":"a","label":1}\n', b'{"group":"g%d","text":"b","label":0}\n'


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"".join(RIGHT % i for i in range(9)), "label: every text is labelled right"),
        (b"".join(WRONG % i for i in range(9)), "label: every text is labelled wrong"),
        (b"".join(RIGHT % i for i in range(9)) + WRONG % 9, "1 texts labelled wrong; expected at least 5"),
        (b"".join((RIGHT + WRONG) % (i % 4, i % 4) for i in range(9)), "group: fewer than 5 groups"),
    ],
)
def test_rows_that_cannot_be_audited(text, says):
    with pytest.raises(DataError) as caught:
        check_rows(read(text))
    assert says in str(caught.value)


def test_flat_rows_are_not_pruned():
    three = read(RIGHT % 1 + WRONG % 1 + WRONG % 1)
    assert is_grouped(three.rows)
    with pytest.raises(DataError, match="<stdin>:3: group: group 'g1' has 1 right and 2 wrong texts"):
        refuse_to_prune(three.rows)
    with pytest.raises(UsageError, match="--audit-only"):
        refuse_to_prune(read(RIGHT % 1 + WRONG % 1).rows)
