"""strop rollout --rescore --reward: stored rollouts graded again, without a model and without a verifier."""

import json
from pathlib import Path

import pytest

DATA = Path(__file__).resolve().parents[1] / "data" / "terminal-trials"
MACHINERY = ("CancelledError", "DaytonaError", "VerifierTimeoutError")
WORDS = {"p": "passed", "f": "failed"}


def trials():
    """The 3,560 public trials as rollouts; an agent's time-out is an attempt, lost machinery is an error."""
    for line in (DATA / "reports.jsonl").read_text().splitlines():
        row = json.loads(line)
        for number in range(row["trials"]):
            fields = {"kind": "rollout", "id": f"{line}/{number}", "task": line}
            if row["exception"] in MACHINERY or row["reward"] is None:
                yield {**fields, "error": row["exception"] or "no reward"}
                continue
            fields |= {"success": row["reward"] == 1, "reward": row["reward"]}
            if row["statuses"] is not None:
                fields["assertions"] = [
                    {"name": f"t{i}", "status": WORDS[status]} for i, status in enumerate(row["statuses"])
                ]
            yield fields


def test_the_public_trials_graded_by_assertions(run_strop):
    given = list(trials())
    done = run_strop(["rollout", "--rescore", "--reward", "assertions", "--reward-scale", "6"], given)
    graded = [r for r in done.records if "grading" in r]
    errors = [r for r in done.records if "error" in r]
    assert (len(done.records), len(graded) + len(errors)) == (3560, 3560)
    assert all("reward" not in r for r in errors)
    reports = [r for r in graded if r["grading"]["source"] == "report"]
    causes = [r["grading"]["cause"] for r in graded if r["grading"]["source"] == "outcome"]
    assert causes.count("empty") == 1
    assert len(reports) + len(causes) == len(graded)
    for before, after in zip(given, done.records, strict=True):
        if "grading" not in after:
            continue
        passed = sum(one["status"] == "passed" for one in before.get("assertions", []))
        wanted = passed / 6 if before.get("assertions") else float(before["success"])
        assert after["reward"] == pytest.approx(wanted)
    # A part of the assertions is worth something where the outcome says 0.
    assert sum(r["reward"] > 0 and not r["success"] for r in reports) > 500
    assert f"reward assertions of {len(graded)} rollouts" in done.stderr
    assert "1 empty" in done.stderr


def test_the_outcome_takes_no_assertions(run_strop):
    given = [r for r in trials() if "error" not in r][::50]
    done = run_strop(["rollout", "--rescore", "--reward", "pass"], given)
    assert [r["reward"] for r in done.records] == [float(r["success"]) for r in given]


def test_earlier_credit_is_taken_off_and_other_fields_stay(run_strop):
    record = {
        "kind": "rollout", "id": "a", "task": "t", "success": True, "reward": 1.0, "advantage": 0.5, "credit": {},
        "stop": "max_turns", "chunks": [{"token_ids": [1, 2, 3], "sampled": [[1, 3]]}], "x": 1e3,
        "steps": [{"reward": 1.0, "anchor": "s"}],
    }  # fmt: skip
    args = ["rollout", "--rescore", "--reward", "pass", "--truncated-reward", "0.5"]
    (got,) = run_strop(args, [record]).records
    assert got["reward"] == 0.5
    assert got["steps"] == [{"reward": 0.5, "anchor": "s"}]
    assert not {"advantage", "credit"} & got.keys()
    assert (got["chunks"], got["x"]) == (record["chunks"], 1e3)
    args = ["rollout", "--rescore", "--reward", "pass", "--length-penalty", "0.2", "--free-tokens", "1"]
    (got,) = run_strop(args, [record]).records
    assert got["reward"] == pytest.approx(1 - 0.2 * 0.6931471805599453)


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["--length-penalty", "0.1"], "go with --reward pass"),
        (["--reward", "pass", "--length-penalty", "0.1"], "go together"),
        (["--reward", "assertions", "--truncated-reward", "0.5"], "go with the reward `pass`"),
        (["--reward", "assertions", "--reward-scale", "0"], "must be above 0"),
    ],
)
def test_usage_errors(run_strop, args, says):
    done = run_strop(["rollout", "--rescore", *args], check=False)
    assert done.status == 2
    assert says in done.stderr


@pytest.mark.parametrize(
    ("fields", "field"), [({}, "success"), ({"success": True, "assertions": [{"name": "a"}]}, "assertions[0]")]
)
def test_bad_records_name_their_place(run_strop, fields, field):
    record = {"kind": "rollout", "id": "a", "task": "t", **fields}
    done = run_strop(["rollout", "--rescore", "--reward", "assertions"], [record], check=False)
    assert done.status == 65
    assert f"<stdin>:1: {field}" in done.stderr
