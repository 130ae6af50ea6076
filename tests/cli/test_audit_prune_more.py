"""strop audit-prune as a process: baselines, cohorts, ranks, other probes, saturated leaks, and what goes wrong."""

import csv
import json
import random
from pathlib import Path

import pytest

pytest.importorskip("sklearn", reason="scikit-learn is missing (extra audit)")

ROOT = Path(__file__).resolve().parents[2]
CSV = ROOT / "tests" / "data" / "truthfulqa" / "TruthfulQA.csv"
HALUEVAL = ROOT.parent / "shared" / "data" / "halueval_qa_1000" / "qa_data_1000.jsonl"
FAST = ["--permutations", "0", "--evaluations", "20", "--folds", "random:20"]
AUDIT = ["audit-prune", "--audit-only", "--folds", "stable", "--permutations", "0"]


@pytest.fixture(scope="module")
def pairs():
    """150 pairs of TruthfulQA, whose audit AUC is about 0.7."""
    with CSV.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))[:150]
    names = {"question": "Question", "correct": "Best Answer", "incorrect": "Best Incorrect Answer"}
    return [{name: row[column] for name, column in names.items()} for row in rows]


def plain(count=40):
    """Pairs whose right answers deny more often and are otherwise like the wrong ones."""
    words = ["river", "stone", "cloud", "lamp", "chair", "paper", "glass", "green", "bread"]
    draw = random.Random(0)

    def answer(denial):
        return " ".join(["not"] * (draw.random() < denial) + draw.choices(words, k=draw.randrange(3, 7)))

    return [{"question": f"q{i}", "correct": answer(0.6), "incorrect": answer(0.2)} for i in range(count)]


def metrics(done, name):
    return [record for record in done.records if record.get("kind") == "metric" and record["name"] == name]


def kept(done):
    return [record for record in done.records if record.get("kind") != "metric"]


def file_of(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def test_baselines_have_as_many_pairs_as_are_kept(run_strop, pairs):
    done = run_strop(["audit-prune", *FAST, "--threshold", "0.56", "--baselines", "prefix,aflite,random"], pairs)
    rivals = metrics(done, "baseline_fresh_auc_mean")
    assert [rival["of"] for rival in rivals] == ["prefix", "aflite", "random"]
    assert {rival["n"] for rival in rivals} == {len(kept(done))} == {metrics(done, "pairs_kept")[0]["value"]}
    by_chance = rivals[2]["value"]
    assert by_chance > metrics(done, "fresh_auc_mean")[0]["value"] + 0.05
    assert f"random at {len(kept(done))} pairs: AUC {by_chance:.4f} over fresh foldings" in done.stderr


def test_heads_on_a_flipped_and_on_a_natural_cohort(run_strop, pairs, tmp_path):
    """The surest flip is to swap the sides: what the head of all pairs wins of the one it loses of the other."""
    flipped = [pair | {"correct": pair["incorrect"], "incorrect": pair["correct"]} for pair in pairs]
    args = ["--flipped", file_of(tmp_path / "f.jsonl", flipped), "--natural", file_of(tmp_path / "n.jsonl", pairs)]
    done = run_strop(["audit-prune", *FAST, "--threshold", "0.56", *args], pairs)
    names = ("head_full", "head_pruned", "mcnemar_p")
    found = {(name, one["of"]): one["value"] for name in names for one in metrics(done, name)}
    assert {of for _, of in found} == {
        f"{cohort}, head on {head}" for cohort in ("flipped", "natural") for head in ("features", "tfidf")
    }
    assert found["head_full", "flipped, head on features"] < 0.4 < 0.6 < found["head_full", "natural, head on features"]
    assert all(0 < value <= 1 for (name, _), value in found.items() if name == "mcnemar_p")
    assert {one["n"] for one in metrics(done, "head_full")} == {150}


def test_aflite_and_a_head_on_embeddings(run_strop, tiny_encoder, tmp_path):
    cohort = file_of(tmp_path / "f.jsonl", plain(10))
    args = ["--threshold", "0.56", "--baselines", "aflite", "--flipped", cohort, "--embeddings", tiny_encoder]
    done = run_strop(["audit-prune", *FAST, *args], plain())
    rivals = metrics(done, "baseline_fresh_auc_mean")
    assert [(rival["of"], rival["n"]) for rival in rivals] == [
        (name, len(kept(done))) for name in ("aflite", "aflite on embeddings")
    ]
    heads = [one["of"] for one in metrics(done, "head_pruned")]
    assert heads == [f"flipped, head on {head}" for head in ("features", "tfidf", "embeddings")]


def test_ranks_of_models_on_the_kept_pairs(run_strop, pairs, tmp_path):
    draw = random.Random(1)
    panel = [
        {"model": f"m{skill}", "correct": [int(draw.random() < skill / 10) for _ in pairs]} for skill in range(2, 9)
    ]
    done = run_strop(["audit-prune", *FAST, "--compare", file_of(tmp_path / "c.jsonl", panel)], pairs)
    for name in ("rank_spearman", "rank_kendall"):
        (rank,) = metrics(done, name)
        assert rank["n"] == 7
        assert -1 <= rank["low"] <= rank["value"] <= rank["high"] <= 1
        assert rank["value"] > 0.7


def test_check_says_no_above_the_threshold(run_strop, pairs):
    done = run_strop([*AUDIT, "--check", "--threshold", "0.53"], pairs, check=False)
    assert done.status == 1
    assert "is above --threshold 0.53" in done.stderr
    assert run_strop([*AUDIT, "--check", "--threshold", "0.9"], pairs).status == 0


def test_check_after_pruning_is_of_fresh_foldings(run_strop, pairs):
    """One folding is fitted by deletion and add-back: the set that keeps it leaks on others, and --check says so."""
    args = ["audit-prune", "--folds", "stable", "--permutations", "0", "--threshold", "0.53", "--check"]
    done = run_strop(args, pairs, check=False)
    fresh = metrics(done, "fresh_auc_mean")[0]["value"]
    assert metrics(done, "kept_auc")[0]["value"] <= 0.53 + 1e-3
    assert done.status == (1 if fresh > 0.53 else 0)
    assert len(kept(done)) > 20


@pytest.mark.parametrize("against", ["trees", "both"])
def test_pruning_against_trees(run_strop, against):
    done = run_strop(["audit-prune", *FAST, "--against", against, "--threshold", "0.6"], plain())
    before, after = metrics(done, "trees_auc")
    assert before["value"] > 0.6
    assert after["value"] < before["value"]
    assert 5 <= after["n"] == len(kept(done)) < 40
    (fresh,) = metrics(done, "fresh_trees_auc_mean")
    assert (fresh["value"], fresh["of"]) == (after["value"], "kept")
    assert "boosted trees over six surface counts are near chance" in done.stderr


def test_words_and_characters_are_measured_and_said(run_strop, pairs):
    done = run_strop([*AUDIT, "--probe", "tfidf,ngrams", "--threshold", "0.9"], pairs)
    for kind in ("tfidf", "ngrams"):
        assert metrics(done, f"{kind}_auc")[0]["value"] > 0.6
    assert "measured beyond that, not bounded by it: boosted trees on the same six features: AUC" in done.stderr
    assert "a probe on the answers' words (1- and 2-grams): AUC" in done.stderr
    assert "not looked at" not in done.stderr


def test_the_report_of_an_audit_has_groups_ablations_and_words(run_strop, pairs, tmp_path):
    run_strop([*AUDIT, "--report", tmp_path / "r"], [*pairs[:30], pairs[0] | {"correct": "other"}])
    audit = json.loads((tmp_path / "r" / "audit.json").read_text())
    assert (audit["before"]["pairs"], audit["before"]["groups"], audit["after"]) == (31, 30, None)
    assert {"neg_cnt", "negation", "hedging"} <= set(audit["before"]["without"])
    assert any("cannot certify" in sentence for sentence in audit["words"])
    assert sorted(path.name for path in (tmp_path / "r").iterdir()) == ["audit.json", "audit.png"]


def test_typographic_apostrophes_hide_contractions(run_strop):
    records = [{"question": f"q{i}", "correct": "It doesn\u2019t", "incorrect": "It does"} for i in range(9)]
    done = run_strop(AUDIT, records)
    assert "9 answers have typographic apostrophes" in done.stderr


def test_identical_answers_are_at_chance_and_all_stay(run_strop):
    records = [{"question": f"q{i}", "correct": "x " * (i % 3), "incorrect": "x " * (i % 3)} for i in range(12)]
    done = run_strop(["audit-prune", *FAST], records)
    assert kept(done) == records
    assert metrics(done, "audit_auc")[0]["value"] == 0.5


def test_a_saturated_leak_destroys_the_set_and_is_called_so(run_strop):
    draw = random.Random(0)
    records = []
    for index in range(120):
        short = " ".join(draw.choices(["yes", "river", "no"], k=draw.randrange(1, 4)))
        long = " ".join(draw.choices(["cloud", "not", "stone"], k=draw.randrange(6, 11)))
        sides = ("correct", "incorrect") if index % 20 else ("incorrect", "correct")
        records.append({"question": f"q{index}"} | dict(zip(sides, (short, long), strict=True)))
    done = run_strop(["audit-prune", *FAST], records)
    assert 5 <= len(kept(done)) < 0.25 * 120
    assert "the leak is saturated (AUC 0.9" in done.stderr
    assert "pruning destroys this set" in done.stderr


@pytest.mark.skipif(not HALUEVAL.exists(), reason="no halueval_qa_1000 beside the checkout")
def test_halueval_is_destroyed(run_strop):
    lines = HALUEVAL.read_text(encoding="utf-8").splitlines()[:200]
    fields = ["--correct-field", "right_answer", "--incorrect-field", "hallucinated_answer"]
    done = run_strop(["audit-prune", *FAST, *fields], "\n".join(lines).encode())
    assert metrics(done, "audit_auc")[0]["value"] > 0.95
    assert len(kept(done)) < 30
    assert "pruning destroys this set" in done.stderr


def test_a_few_questions_left_are_no_set_and_nothing_is_written(run_strop):
    """All pairs of four questions of six leak."""
    leak, none = {"correct": "no not so", "incorrect": "yes ok w"}, {"correct": "a b", "incorrect": "a b"}
    records = [{"question": f"q{i % 6}"} | (leak if i % 6 < 4 else none) for i in range(60)]
    done = run_strop(["audit-prune", *FAST], records, check=False)
    assert (done.status, kept(done)) == (1, [])
    assert "cannot be met" in done.stderr


@pytest.mark.parametrize(
    ("module", "package", "extra", "args"),
    [
        ("sklearn", "scikit-learn", "audit", []),
        ("scipy", "scipy", "audit", ["--audit-only"]),
        ("matplotlib", "matplotlib", "plot", ["--report", "r"]),
        ("transformers", "transformers", "model", ["--baselines", "aflite", "--embeddings", "encoder"]),
    ],
)
def test_a_missing_package_names_its_extra(run_strop, tmp_path, module, package, extra, args):
    # None in the table of modules: the import system takes the package for missing.
    (tmp_path / "sitecustomize.py").write_text(f"import sys\nsys.modules[{module!r}] = None\n")
    (tmp_path / "encoder").mkdir()
    (tmp_path / "encoder" / "config.json").write_text("{}")
    path = f"{tmp_path}:{ROOT / '.pkg'}"
    done = run_strop(["audit-prune", *args], plain(), check=False, env={"PYTHONPATH": path}, cwd=tmp_path)
    assert (done.status, done.stdout) == (69, b"")
    assert done.stderr == (
        f"strop audit-prune: the package {package} is missing; install it with: pip install 'strop[{extra}]'\n"
    )


@pytest.mark.parametrize(
    ("data", "args", "status", "says"),
    [
        (b"question,right,wrong\nq,a,b\n", [], 65, "<stdin>:2: correct: missing; expected an answer"),
        (b"question,text,wrong\nq,a,b\n", ["--audit-only"], 65, "<stdin>:2: label: missing"),
        (b"question,correct,incorrect\nq,a,\n", [], 65, "<stdin>:2: incorrect: an empty cell"),
        (b'{"correct":"a","incorrect":null}\n', [], 65, "<stdin>:1: incorrect: null"),
        (b'{"question":"q","correct":"a","incorrect":"b"}\n' * 6, [], 65, "<stdin>:6: question: 1 different questions"),
        (b'{"text":"a","label":0}\n' * 9, ["--audit-only"], 65, "every text is labelled wrong"),
        (b'{"text":"a","label":"maybe"}\n', ["--audit-only"], 65, "<stdin>:1: label: 'maybe'"),
        (b'{"text":"a","label":1}\n{"text":"a","label":0}\n', [], 2, "not pruned"),
        (b"", ["--natural", "x"], 2, "--natural goes with --flipped"),
        (b"", ["--audit-only", "--baselines", "random"], 2, "--audit-only prunes nothing"),
        (b"", ["--embeddings", "x"], 2, "--embeddings goes with --baselines aflite or --flipped"),
        (b"", ["--against", "trees", "--score", "hybrid"], 2, "--score is of the linear probe"),
        (b"", ["--baselines", "best"], 2, "--baselines best: expected some of prefix, aflite, random"),
        (b"", ["--probe", "features,bert"], 2, "--probe bert"),
    ],
)
def test_bad_input_and_options(run_strop, data, args, status, says):
    done = run_strop(["audit-prune", *args], data, check=False)
    assert (done.status, done.stdout) == (status, b"")
    assert says in done.stderr


@pytest.mark.parametrize(
    ("option", "text", "status", "says"),
    [
        ("--compare", None, 66, "f.jsonl: "),
        ("--compare", b'{"model":"a","correct":[1,0]}\n', 65, "f.jsonl:1: correct: 2 values for 40 pairs"),
        ("--flipped", None, 66, "f.jsonl: "),
        ("--flipped", b'{"question":"q","correct":"a"}\n', 65, "f.jsonl:1: incorrect: missing"),
        ("--flipped", b"", 65, "f.jsonl: no pairs"),
        ("--baselines=aflite --embeddings", b"", 65, "f.jsonl: a model is a folder"),
    ],
)
def test_a_bad_side_file_is_known_before_anything_is_written(run_strop, tmp_path, option, text, status, says):
    path = tmp_path / "f.jsonl"
    if text is not None:
        path.write_bytes(text)
    done = run_strop(["audit-prune", *FAST, *option.split(), path], plain(), check=False)
    assert (done.status, done.stdout) == (status, b"")
    assert says in done.stderr


def test_bad_input_leaves_the_old_output(run_strop, tmp_path):
    out = tmp_path / "kept.jsonl"
    out.write_text("old\n")
    done = run_strop(["audit-prune", *FAST, "-o", out], [*plain(), {"correct": "a"}], check=False)
    assert done.status == 65
    assert "<stdin>:41: incorrect: missing" in done.stderr
    assert out.read_text() == "old\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.jsonl"]


def test_nothing_is_lost_where_lines_are_set_aside(run_strop, tmp_path):
    """Malformed UTF-8, a torn line, a missing answer go to the file of rejects, all others go out."""
    good = [json.dumps(pair).encode() + b"\n" for pair in plain()]
    foreign = b'{"kind":"task","id":"t"}\n'
    bad = [b'{"correct":"\xff","incorrect":"b"}\n', b'{"correct":"a",\n', b'{"question":"q","correct":"a"}\n']
    data = b"".join([good[0], bad[0], foreign, *good[1:20], bad[1], *good[20:], bad[2]])
    rejects = tmp_path / "rejects.jsonl"
    args = ["audit-prune", *FAST, "--threshold", "0.99", "--keep-going", "--rejects", rejects]
    done = run_strop(args, data, check=False)
    assert done.status == 1
    lines = done.stdout.splitlines(keepends=True)
    assert lines[: len(good) + 1] == [foreign, *good]
    assert [json.loads(line)["line"] for line in rejects.read_text().splitlines()] == [2, 23, 44]


def test_a_pruned_csv_keeps_its_rows_byte_for_byte(run_strop, tmp_path):
    header, rows = b"question,correct,incorrect,note\r\n", []
    for index, pair in enumerate(plain()):
        rows.append(f'"{pair["question"]}",{pair["correct"]},"{pair["incorrect"]}","a, {index}"\r\n'.encode())
    done = run_strop(["audit-prune", *FAST, "--report", tmp_path / "r", "--threshold", "0.56"], header + b"".join(rows))
    left = (tmp_path / "r" / "kept.csv").read_bytes().splitlines(keepends=True)
    ids = json.loads((tmp_path / "r" / "manifest.json").read_text())["pair_ids"]
    assert left == [header, *(rows[index] for index in ids)]
    assert [record["note"] for record in kept(done)] == [f"a, {index}" for index in ids]
