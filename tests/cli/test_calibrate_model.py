"""strop calibrate with a model of random weights: its attempts are those of rollout, and a killed run is continued."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STROP = Path(sys.executable).with_name("strop")
SEED = ["--seed", "5"]
# Patterns that random text meets rarely, sometimes, nearly always.
PATTERNS = ("zq", "[aeiou]{2}", "[aeiou]{2}", ".")


def tasks(count, **fields):
    return [
        {
            "kind": "task", "id": f"t{i}", "prompt": f"{i}+{i + 1}=",
            "verifier": {"name": "regex", "pattern": PATTERNS[i % 4]}, "sampling": {"max_tokens": 3}, **fields,
        }
        for i in range(count)
    ]  # fmt: skip


def without_provenance(records: list[dict]) -> list[dict]:
    return [{name: value for name, value in record.items() if name != "provenance"} for record in records]


def not_metrics(lines: bytes) -> list[bytes]:
    return [line for line in lines.splitlines(keepends=True) if b'"kind":"metric"' not in line[:20]]


def test_its_attempts_are_those_that_rollout_makes(run_strop, tiny_model):
    made = run_strop(["rollout", "--model", tiny_model, "-n", 3, *SEED], tasks(5))
    judged = run_strop(["calibrate"], made.stdout)
    stray = {"kind": "rollout", "id": "x", "task": "t0", "success": True}
    own = run_strop(["calibrate", "--model", tiny_model, "-n", 3, *SEED], [stray, *tasks(5)])
    assert own.records[0] == stray
    assert without_provenance(own.records[1:]) == without_provenance(judged.records)
    assert {record["provenance"]["tool"] for record in own.records[1:] if record["kind"] == "rollout"} == {"calibrate"}
    assert "1 rollouts came in and were passed on uncounted" in own.stderr


@pytest.fixture(scope="module")
def adaptive(run_strop, tiny_model):
    """An uninterrupted adaptive run over eight tasks."""
    args = ["calibrate", "--model", tiny_model, "--adaptive", "-n", 8, "--window", 3, *SEED]
    return args, run_strop(args, tasks(8))


def test_adaptive_attempts_are_those_of_a_replay(run_strop, tiny_model, adaptive):
    rollouts = run_strop(["rollout", "--model", tiny_model, "-n", 16, *SEED], tasks(8))
    replay = run_strop(["calibrate", "--adaptive", "-n", 8, "--only", "task"], rollouts.stdout).records
    _, live = adaptive
    found = [record for record in live.records if record["kind"] == "task"]
    for mine, theirs in zip(found, replay, strict=True):
        expected = {name: value for name, value in theirs["calibration"].items() if name != "unused"}
        assert (mine["id"], mine["calibration"]) == (theirs["id"], expected)
    made = [record for record in live.records if record["kind"] == "rollout"]
    samples = {record["id"]: record["chunks"] for record in rollouts.records if record["kind"] == "rollout"}
    assert all(record["chunks"] == samples[record["id"]] for record in made)
    # Each group says how many it is, and stands behind its task.
    sizes = {record["id"]: record["calibration"]["attempts"] for record in found}
    assert [(record["task"], record["sample"]) for record in made] == [(t, s) for t in sizes for s in range(sizes[t])]
    assert all(record["group_size"] == sizes[record["task"]] for record in made)
    assert len(set(sizes.values())) > 1
    (saved,) = [record for record in live.records if record["kind"] == "metric"]
    assert saved["value"] == pytest.approx(1 - sum(sizes.values()) / 64)


def test_a_run_cut_anywhere_is_continued_without_loss_or_repeat(run_strop, tmp_path, adaptive):
    args, whole = adaptive
    records = not_metrics(whole.stdout)
    part = tmp_path / "part.jsonl"
    # Two tasks are whole, the third one's last attempts were not written and one line is torn.
    third = [index for index, line in enumerate(records) if b'"kind":"task"' in line[:20]][2]
    part.write_bytes(b"".join(records[: third + 3]) + records[third + 3][:50])
    result = run_strop([*args, "--resume", part], tasks(8))
    assert "cut a torn last line" in result.stderr
    assert sorted(not_metrics(part.read_bytes())) == sorted(records)


def test_an_interrupted_run_keeps_its_attempts_and_is_continued(tiny_model, run_strop, tmp_path):
    source, part = tmp_path / "tasks.jsonl", tmp_path / "part.jsonl"
    source.write_text("".join(json.dumps(task) + "\n" for task in tasks(24)))
    args = ["calibrate", "--model", str(tiny_model), "--adaptive", "-n", "8", "--window", "4", *SEED, str(source)]
    process = subprocess.Popen([STROP, *args, "--resume", part], stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 200
        while not (part.exists() and part.read_bytes().count(b"\n") > 3) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGINT, said.decode()
    before = [json.loads(line) for line in part.read_bytes().splitlines()]
    run_strop([*args, "--resume", part])
    after = [json.loads(line) for line in part.read_bytes().splitlines()]
    assert after[: len(before)] == before
    ids = [record["id"] for record in after if record["kind"] == "rollout"]
    assert len(ids) == len(set(ids))
    counts = {record["id"]: record["calibration"] for record in after if record["kind"] == "task"}
    assert len(counts) == 24
    for name, fields in counts.items():
        own = [record for record in after if record["kind"] == "rollout" and record["task"] == name]
        assert sorted(record["sample"] for record in own) == list(range(fields["attempts"]))
        assert sum(record["success"] for record in own) == fields["successes"]


def test_a_task_that_cannot_be_attempted_is_bad_data(run_strop, tiny_model):
    good, bad = tasks(2)
    bad["verifier"] = {"name": "oracle"}
    stopped = run_strop(["calibrate", "--model", tiny_model, "-n", 2], [bad, good], check=False)
    assert stopped.status == 65
    assert "<stdin>:1: verifier.name: " in stopped.stderr
    went_on = run_strop(["calibrate", "--model", tiny_model, "-n", 2, "--keep-going"], [bad, good], check=False)
    assert went_on.status == 1
    assert [record["id"] for record in went_on.records if record["kind"] == "task"] == [good["id"]]


def test_dry_run_counts_attempts_and_tokens(run_strop, tiny_model):
    (plan,) = run_strop(["calibrate", "--model", tiny_model, "--adaptive", "--dry-run"], tasks(3)).records
    assert (plan["tasks"], plan["attempts"], plan["attempts_at_most"], plan["round_size"]) == (3, 14, 48, 4)
    assert plan["sampled_tokens_at_most"] == 3 * 16 * 3
    assert plan["prompt_tokens"] >= 9


def test_a_missing_model_is_said_before_anything_is_written(run_strop, tmp_path):
    result = run_strop(["calibrate", "--model", tmp_path / "none", "-n", 2], tasks(1), check=False)
    assert result.status in (66, 69)
    assert result.stdout == b""
