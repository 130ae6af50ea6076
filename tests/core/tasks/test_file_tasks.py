"""The family file: JSONL and CSV, fields, slices, ids, and rows that make no task."""

from __future__ import annotations

import json

import pytest

from strop.core.errors import InputMissing, UsageError
from strop.core.tasks.families import BadRow, FamilyOptions, open_family


def tasks(path, n=None, start=0, **options):
    family = open_family(f"file:{path}", FamilyOptions(**options))
    made = [task for task, _ in zip(family.tasks(0, start), range(10**9 if n is None else n), strict=False)]
    family.close()
    return made


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("".join(json.dumps({"question": f"{i}+1?", "answer": i + 1}) + "\n" for i in range(30)))
    return path


FIELDS = (("prompt", "question"), ("reference", "answer"))


def test_jsonl(jsonl):
    made = tasks(jsonl, fields=FIELDS, verifier="number", verifier_options=(("where", "last"),))
    assert len(made) == 30
    task = made[4]
    assert (task.id, task.prompt, task.reference) == ("sums-4", "4+1?", 5)
    assert task.verifier == {"name": "number", "where": "last"}
    assert task.sampling is None


@pytest.mark.parametrize(
    ("slice_", "numbers"), [("[10:13]", [10, 11, 12]), ("[:2]", [0, 1]), ("[28:]", [28, 29]), ("[5:5]", [])]
)
def test_slices_keep_ids(jsonl, slice_, numbers):
    made = tasks(f"{jsonl}{slice_}", fields=FIELDS)
    assert [task.id for task in made] == [f"sums-{i}" for i in numbers]
    assert [task.reference for task in made] == [i + 1 for i in numbers]


def test_a_file_whose_name_looks_like_a_slice(tmp_path):
    path = tmp_path / "q[0:1]"
    path.write_text('{"prompt": "a", "reference": "b"}\n{"prompt": "c", "reference": "d"}\n')
    assert len(tasks(path)) == 2


def test_make_goes_forward_and_back(jsonl):
    family = open_family(f"file:{jsonl}[2:20]", FamilyOptions(fields=FIELDS))
    assert [family.make(i, 5).id for i in (3, 10, 0, 17)] == ["sums-5", "sums-12", "sums-2", "sums-19"]
    with pytest.raises(IndexError):
        family.make(18, 5)
    assert family.make(0, 6) == family.make(0, 7)
    assert [task.id for task in tasks(f"{jsonl}[2:20]", start=16, fields=FIELDS)] == ["sums-18", "sums-19"]


def test_the_rest_of_a_slice_is_not_read(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a", "reference": "b"}\nnot json\n')
    assert len(tasks(f"{path}[0:1]")) == 1


def test_csv(tmp_path):
    path = tmp_path / "quiz.csv"
    path.write_bytes(
        '\ufeffquestion,answer,note\r\n"Which, of\r\nthese?",B,x\r\n\r\n"say ""hi""",A,\u2028y\r\n'.encode()
    )
    made = tasks(path, fields=FIELDS, verifier="choice")
    assert [(t.id, t.prompt, t.reference) for t in made] == [
        ("quiz-0", "Which, of\r\nthese?", "B"),
        ("quiz-1", 'say "hi"', "A"),
    ]
    tabs = tmp_path / "quiz.tsv"
    tabs.write_text("prompt\treference\na,b\tc\n")
    assert tasks(tabs)[0].prompt == "a,b"


def test_csv_with_a_very_long_cell(tmp_path):
    path = tmp_path / "long.csv"
    path.write_text(f"prompt,reference\n{'x' * 500_000},1\n")
    assert len(tasks(path)[0].prompt) == 500_000


def test_nested_fields_ids_messages_and_templates(tmp_path):
    path = tmp_path / "q.jsonl"
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    rows = [
        {"data": {"q": "why {this}?"}, "reference": "r", "uid": 7},
        {"data": {"q": messages}, "reference": "r", "uid": "eight"},
        {"data.q": "a name with a dot", "reference": "r", "uid": "nine"},
    ]
    path.write_text("\ufeff" + "\n\n".join(map(json.dumps, rows)), encoding="utf-8")
    fields = (("prompt", "data.q"), ("id", "uid"))
    made = tasks(path, fields=fields, template="Q: {prompt}\nA:", format="chat")
    assert [task.id for task in made] == ["7", "eight", "nine"]
    assert made[0].prompt == [{"role": "user", "content": "Q: why {this}?\nA:"}]
    assert made[1].prompt == messages
    assert made[2].prompt[0]["content"] == "Q: a name with a dot\nA:"


def test_unicode_line_separators_and_crlf_stay_inside_their_rows(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes('{"prompt": "a\u2028b\x85c", "reference": "1"}\r\n{"prompt": "d", "reference": "2"}'.encode())
    assert [task.prompt for task in tasks(path)] == ["a\u2028b\x85c", "d"]


@pytest.mark.parametrize(
    ("line", "field", "message"),
    [
        ('{"prompt": "a"', None, "not JSON"),
        ("[1]", None, "not a JSON object"),
        ('{"prompt": NaN}', None, "not JSON"),
        ('{"question": "a", "reference": "b"}', "prompt", "missing; --field prompt=NAME names another"),
        ('{"prompt": "", "reference": "b"}', "prompt", "expected a text or chat messages"),
        ('{"prompt": 5, "reference": "b"}', "prompt", "expected a text or chat messages"),
        ('{"prompt": "a", "reference": [1, {}]}', "reference", "expected a text, or a list of texts"),
        ('{"prompt": "a"}', "reference", "expected a text"),
    ],
)
def test_a_bad_row_is_named_and_the_rest_goes_on(tmp_path, line, field, message):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a", "reference": "1"}\n' + line + '\n{"prompt": "c", "reference": "3"}\n')
    first, bad, last = tasks(path)
    assert isinstance(bad, BadRow)
    assert (bad.where.file, bad.where.line, bad.field) == (str(path), 2, field)
    assert message in str(bad)
    assert bad.text.rstrip("\n") == line
    assert (first.id, last.id) == ("q-0", "q-2")


def test_bad_bytes_and_ragged_csv(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"prompt": "\xff", "reference": "1"}\n{"prompt": "c", "reference": "3"}\n')
    bad, good = tasks(path)
    assert "UTF-8" in str(bad)
    assert good.id == "q-1"
    ragged = tmp_path / "q.csv"
    ragged.write_text('prompt,reference\na,1\nb\nc,3\n"open,4\n')
    first, short, third, torn = tasks(ragged)
    assert "1 cells under 2 columns" in str(short)
    assert short.where.line == 3
    assert (first.id, third.id) == ("q-0", "q-2")
    assert "the rest of the file is not read" in str(torn)


def test_a_duplicate_id_is_bad(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a", "reference": "1", "id": "x"}\n' * 2)
    made = tasks(path, fields=(("id", "id"),))
    assert made[0].id == "x"
    assert "'x' came before in this file" in str(made[1])


def test_the_split_parts_rows_by_their_question(jsonl, tmp_path):
    parts = {split: tasks(jsonl, fields=FIELDS, split=split, heldout_share=0.4) for split in ("train", "heldout")}
    assert len(parts["train"]) + len(parts["heldout"]) == 30
    assert 4 <= len(parts["heldout"]) <= 20
    # The same questions in another order and file are in the same part.
    other = tmp_path / "again.jsonl"
    other.write_text("".join(reversed(jsonl.read_text().splitlines(keepends=True))))
    again = tasks(other, fields=FIELDS, split="heldout", heldout_share=0.4)
    assert {task.prompt for task in again} == {task.prompt for task in parts["heldout"]}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"fields": (("question", "q"),)}, "--field question=...: expected one of prompt, reference, id"),
        ({"template": "Q:"}, "--template holds {prompt}"),
        ({"verifier": "judge"}, "--verifier 'judge': expected one of number, exact"),
        ({"verifier_options": (("wher", 1),)}, "--verifier exact: verifier: Object contains unknown field"),
        ({"format": "few-shot"}, "--format 'few-shot': expected one of text, chat"),
        ({"terms": (2, 2)}, "--terms does not apply to the family file"),
    ],
)
def test_options_that_do_not_fit(jsonl, options, message):
    with pytest.raises(UsageError) as error:
        tasks(jsonl, **{"fields": FIELDS, **options})
    assert message in str(error.value)


def test_missing_file_and_slice_the_wrong_way_round(tmp_path, jsonl):
    with pytest.raises(InputMissing, match="No such file"):
        tasks(tmp_path / "none.jsonl")
    with pytest.raises(InputMissing, match="directory"):
        tasks(tmp_path)
    with pytest.raises(UsageError, match="ends before it begins"):
        tasks(f"{jsonl}[5:2]")


def test_command_and_regex_need_no_reference(tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt": "a"}\n')
    assert tasks(path, verifier="regex", verifier_options=(("pattern", "^x"),))[0].reference is None
    assert tasks(path, verifier="command", verifier_options=(("command", "true"),))[0].reference is None
