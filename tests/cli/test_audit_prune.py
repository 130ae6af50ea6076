"""strop audit-prune as a process: pairs as they came, bad input, what it says it cannot know."""

import csv
import json
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

CSV = Path(__file__).resolve().parents[1] / "data" / "truthfulqa" / "TruthfulQA.csv"
FAST = ["--permutations", "20", "--evaluations", "20", "--folds", "random:20"]


def pairs(count=150):
    with CSV.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:count]
    names = {"question": "Question", "correct": "Best Answer", "incorrect": "Best Incorrect Answer"}
    return [{name: row[column] for name, column in names.items()} for row in rows]


def value(done, name):
    return next(r["value"] for r in done.records if r.get("kind") == "metric" and r["name"] == name)


def test_kept_pairs_leave_as_they_came_and_the_seed_decides(run_strop, tmp_path):
    lines = [json.dumps(pair) for pair in pairs()]
    given = "".join(line + "\n" for line in lines).encode()
    done = run_strop(["audit-prune", *FAST, "--report", tmp_path / "r"], given)
    kept = [line for line in done.stdout.decode().splitlines() if '"metric"' not in line]
    assert set(kept) <= set(lines)
    assert len(kept) == value(done, "pairs_kept") > 0
    manifest = json.loads((tmp_path / "r" / "manifest.json").read_text())
    assert [lines[index] for index in manifest["pair_ids"]] == kept
    assert (tmp_path / "r" / "audit.png").stat().st_size > 1000
    assert "cannot certify" in done.stderr
    assert run_strop(["audit-prune", *FAST], given).stdout == done.stdout


def test_shuffled_questions_change_nothing(run_strop):
    records = pairs()
    moved = [pair | {"question": other["question"]} for pair, other in zip(records, records[::-1], strict=True)]
    args = ["audit-prune", "--audit-only", "--folds", "stable", "--permutations", "0"]
    assert value(run_strop(args, records), "audit_auc") == value(run_strop(args, moved), "audit_auc")


def test_an_infeasible_threshold_says_so(run_strop):
    same = [{"question": f"q{i}", "correct": f"x{i}", "incorrect": f"y{i}"} for i in range(20)]
    done = run_strop(["audit-prune", "--threshold", "0.3", *FAST], same, check=False)
    assert done.status == 1
    assert "cannot be met" in done.stderr


def test_foreign_text_and_empty_answers_are_said(run_strop):
    records = [
        {"question": f"q{i}", "correct": "да нет " * (i + 1), "incorrect": "нет" if i else ""} for i in range(9)
    ]
    done = run_strop(["audit-prune", "--audit-only", "--folds", "stable", "--permutations", "0"], records)
    assert "lexicon" in done.stderr
    assert "1 answers are empty" in done.stderr


@pytest.mark.parametrize(
    ("text", "args", "status", "says"),
    [
        (b"a,b\n1,2\n", [], 65, "<stdin>:2: correct: missing"),
        (b'{"question":"q","correct":"c"}\n', [], 65, "<stdin>:1: incorrect: missing"),
        (b'{"question":"q","correct":"c","incorrect":"i"}\n' * 4, [], 65, "4 pairs; expected at least 5"),
        (b'{"text":"a","label":1}\n' * 9, ["--audit-only"], 65, "expected both labels"),
        (b'{"group":"g","text":"a","label":1}\n' * 3, [], 65, "<stdin>:3: group: group 'g' has 3 right"),
        (b'{"text":"a\xff","label":1}\n', ["--audit-only"], 65, "<stdin>:1: not UTF-8"),
        (b"Question,Best Answer,Best Incorrect Answer\nq,\xff,b\n", [], 65, "<stdin>:2: not UTF-8"),
        (b"", ["nowhere.csv"], 66, "nowhere.csv"),
        (b"", ["--folds", "some"], 2, "--folds some"),
        (b"", ["--threshold", "1.5"], 2, "--threshold 1.5"),
    ],
)
def test_bad_input(run_strop, text, args, status, says):
    done = run_strop(["audit-prune", *args], text, check=False)
    assert (done.status, done.stdout) == (status, b"")
    assert says in done.stderr


def test_a_bad_line_can_be_set_aside(run_strop, tmp_path):
    rejects = tmp_path / "rejects.jsonl"
    args = ["audit-prune", "--audit-only", "--permutations", "0", "--keep-going", "--rejects", rejects]
    done = run_strop(args, [*pairs(10), {"correct": "x"}], check=False)
    assert done.status == 1
    assert value(done, "audit_auc") > 0
    assert '"line":11' in rejects.read_text()


def test_the_schema_is_of_pairs_and_not_of_another_tools_examples(run_strop):
    fields = json.loads(run_strop(["audit-prune", "--schema"]).stdout)["$defs"]["PairFields"]["properties"]
    assert {"question", "correct", "incorrect", "text", "label"} <= set(fields)
    other = json.loads(run_strop(["debate-label", "--schema"]).stdout)["$defs"]["Example"]["properties"]
    assert {"id", "query", "agent"} <= set(other)
