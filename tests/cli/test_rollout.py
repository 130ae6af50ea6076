"""`strop rollout` as a process, on a model of a million random weights: bytes, resuming, rescoring, bad input."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

STROP = Path(sys.executable).with_name("strop")

TEXT = "3+4=7\n12+5=17\n{}+{}="


def tasks(count, **fields):
    return [
        {"kind": "task", "id": f"t{i}", "prompt": TEXT.format(i, i + 1), "verifier": {"name": "number"},
         "reference": 2 * i + 1, "sampling": {"stop": ["\n"], "max_tokens": 4}, **fields}
        for i in range(count)
    ]  # fmt: skip


@pytest.fixture(scope="module")
def sampled(run_strop, tiny_model):
    note = {"kind": "note", "text": "\u2028"}
    return run_strop(["rollout", "--model", tiny_model, "-n", 3, "--seed", 5], [*tasks(2), note, *tasks(4)[2:]])


def test_tasks_and_their_groups_travel_in_order(sampled):
    kinds = [r["kind"] for r in sampled.records]
    group = ["task"] + ["rollout"] * 3
    assert kinds == [*group, *group, "note", *group, *group]
    rollouts = [r for r in sampled.records if r["kind"] == "rollout"]
    assert [(r["task"], r["sample"]) for r in rollouts] == [(f"t{i}", s) for i in range(4) for s in range(3)]
    assert len({r["id"] for r in rollouts}) == 12
    assert len({r["group"] for r in rollouts}) == 4
    assert {r["group_size"] for r in rollouts} == {3}


def test_a_rollout_holds_exact_tokens_and_what_they_were_worth(sampled, tiny_model):
    from strop.core.models.load import load_tokenizer, resolve_model

    tokenizer = load_tokenizer(resolve_model(str(tiny_model)))
    for r in (r for r in sampled.records if r["kind"] == "rollout"):
        (chunk,) = r["chunks"]
        ((start, end),) = chunk["sampled"]
        assert end == len(chunk["token_ids"]) <= start + 4
        assert chunk["token_ids"][:start] == tokenizer.encode_prompt(
            TEXT.format(int(r["task"][1:]), int(r["task"][1:]) + 1)
        )
        assert len(chunk["logprobs"]) == end - start
        assert all(value <= 0 for value in chunk["logprobs"])
        assert r["response"] == tokenizer.decode(chunk["token_ids"][start:end])
        assert r["steps"][0]["nll"] == pytest.approx(-sum(chunk["logprobs"]) / (end - start), abs=1e-6)
        assert r["reward"] == float(r["success"])
        assert r["stop"] in ("eos", "stop", "length")
        assert r["provenance"]["tool"] == "rollout"
        assert "reference" not in r


def test_the_same_bytes_whatever_the_concurrency_and_the_number_of_samples(run_strop, tiny_model, sampled):
    again = run_strop(
        ["rollout", "--model", tiny_model, "-n", 5, "--seed", 5, "--concurrency", 1, "--only", "rollout"], tasks(4)
    )
    same = {(r["task"], r["sample"]): r for r in again.records}
    for r in (r for r in sampled.records if r["kind"] == "rollout"):
        other = same[r["task"], r["sample"]]
        assert (r["chunks"], r["reward"], r["id"]) == (other["chunks"], other["reward"], other["id"])
    other_seed = run_strop(["rollout", "--model", tiny_model, "-n", 3, "--seed", 6, "--only", "rollout"], tasks(4))
    assert not {r["id"] for r in other_seed.records} & {r.get("id") for r in sampled.records}


def test_a_killed_run_resumes_to_the_same_bytes(tiny_model, run_strop, tmp_path):
    source, whole, part = tmp_path / "tasks.jsonl", tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    source.write_text("".join(json.dumps(t) + "\n" for t in tasks(30)))
    command = ["rollout", "--model", str(tiny_model), "-n", "4", "--seed", "1", str(source)]
    run_strop([*command, "-o", whole])
    process = subprocess.Popen([STROP, *command, "--resume", part], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (not part.exists() or part.read_bytes().count(b"\n") < 25):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    left = part.read_bytes()
    assert whole.read_bytes().startswith(left[: left.rfind(b"\n") + 1])
    assert 25 <= left.count(b"\n") < 150
    # A torn last line, as a full disk or a power cut leaves it.
    part.write_bytes(left[: left.rfind(b"\n") + 1] + b'{"kind":"rollout","id":"t')
    result = run_strop([*command, "--resume", part])
    assert "torn last line" in result.stderr
    assert part.read_bytes() == whole.read_bytes()


def test_sigint_keeps_finished_rollouts(tiny_model, tmp_path):
    source = tmp_path / "tasks.jsonl"
    source.write_text("".join(json.dumps(t) + "\n" for t in tasks(400)))
    out = (tmp_path / "out").open("wb")
    process = subprocess.Popen(
        [STROP, "rollout", "--model", tiny_model, "-n", "4", source], stdout=out, stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and (tmp_path / "out").read_bytes().count(b"\n") < 10:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    stderr = process.communicate(timeout=20)[1]
    assert process.returncode == -signal.SIGINT
    lines = (tmp_path / "out").read_bytes().split(b"\n")
    assert lines[-1] == b""
    assert len([json.loads(line) for line in lines[:-1]]) >= 10
    assert b"Traceback" not in stderr


def test_rescore_reaches_the_verdict_of_the_task_as_it_is_now(run_strop, sampled):
    records = sampled.records
    again = run_strop(["rollout", "--rescore"], records)
    assert again.records == records
    for record in records:
        if record["kind"] == "task":
            record["verifier"] = {"name": "regex", "pattern": "(?s).*"}
    changed = run_strop(["rollout", "--rescore", "--only", "rollout"], records)
    assert all(r["reward"] == 1 and r["success"] and r["steps"][0]["reward"] == 1 for r in changed.records)


def test_rescore_needs_the_task(run_strop, sampled, tmp_path):
    rollouts = [r for r in sampled.records if r["kind"] == "rollout"]
    result = run_strop(["rollout", "--rescore"], rollouts, check=False)
    assert result.status == 65
    assert "<stdin>:1: task: no task 't0' came before" in result.stderr
    (tmp_path / "tasks").write_text("".join(json.dumps(t) + "\n" for t in tasks(4)))
    assert run_strop(["rollout", "--rescore", "--tasks", tmp_path / "tasks"], rollouts).records == rollouts
    restated = [{**t, "statement_version": 2} for t in tasks(4)]
    result = run_strop(["rollout", "--rescore"], [*restated, *rollouts], check=False)
    assert result.status == 65
    assert "statement_version" in result.stderr


def test_a_verifier_that_fails_is_an_error_and_never_a_reward(run_strop, tiny_model, tmp_path):
    program = tmp_path / "broken.sh"
    program.write_text("#!/bin/sh\nexit 3\n")
    program.chmod(0o755)
    broken = tasks(1, verifier={"name": "command", "command": [str(program)]})
    result = run_strop(["rollout", "--model", tiny_model, "-n", 2], broken, check=False)
    assert result.status == 69
    rollouts = [r for r in result.records if r["kind"] == "rollout"]
    assert len(rollouts) == 2
    assert all("error" in r and "reward" not in r and r["chunks"] for r in rollouts)


def test_metrics_go_to_their_file(run_strop, tiny_model, tmp_path):
    path = tmp_path / "metrics.jsonl"
    run_strop(["rollout", "--model", tiny_model, "-n", 2, "--metrics", path, "--tag", "iteration=3"], tasks(2))
    metrics = {m["name"]: m for m in map(json.loads, path.read_text().splitlines())}
    assert metrics["rollouts"]["value"] == 4
    assert metrics["sampled_tokens"]["value"] > 0
    assert all(m["iteration"] == 3 for m in metrics.values())


def test_dry_run_counts_and_loads_no_weights(run_strop, smol):
    (plan,) = run_strop(["rollout", "--model", smol, "-n", 8, "--dry-run"], tasks(3)).records
    assert (plan["kind"], plan["tasks"], plan["rollouts"]) == ("plan", 3, 24)
    assert plan["sampled_tokens_at_most"] == 96
    assert plan["prompt_tokens"] > 30


def test_nothing_is_loaded_for_a_stream_without_tasks(run_strop):
    note = b'{"kind":"note"}\n'
    result = run_strop(["rollout", "--model", "nobody/has-this", "--offline"], note)
    assert result.stdout == note


@pytest.mark.parametrize(
    ("records", "status", "says"),
    [
        ([{"kind": "task", "prompt": "x"}], 65, "<stdin>:1: Object missing required field `id`"),
        (tasks(1, verifier={"name": "oracle"}), 65, "<stdin>:1: verifier.name: unknown verifier 'oracle'"),
        (tasks(1, verifier=None), 65, "<stdin>:1: verifier: missing"),
        (tasks(1, env="moon"), 65, "<stdin>:1: env: unknown env 'moon'"),
        (tasks(1, prompt=7), 65, "<stdin>:1: prompt: Expected"),
        (tasks(1, sampling={"max_tokens": "many"}), 65, "<stdin>:1: sampling"),
        ([*tasks(1), *tasks(1)], 65, "<stdin>:2: id: task 't0' came before"),
    ],
)
def test_bad_tasks_are_named(run_strop, tiny_model, records, status, says):
    result = run_strop(["rollout", "--model", tiny_model], records, check=False)
    assert result.status == status
    assert says in result.stderr
    assert "Traceback" not in result.stderr


def test_keep_going_sets_bad_tasks_aside(run_strop, tiny_model, tmp_path):
    rejects = tmp_path / "rejects"
    mixed = [tasks(1, env="moon")[0], tasks(2)[1]]
    result = run_strop(["rollout", "--model", tiny_model, "--keep-going", "--rejects", rejects], mixed, check=False)
    assert result.status == 1
    assert [r.get("task", r.get("id")) for r in result.records] == ["t1", "t1"]
    assert json.loads(rejects.read_text())["field"] == "env"


def test_missing_parts_are_said(run_strop, tiny_model, tmp_path):
    for args, status, says in (
        ([], 2, "--model"),
        (["--model", tmp_path / "nowhere"], 69, "no such"),
        (["--model", tiny_model, "--engine", "abacus"], 2, "abacus"),
        (["--model", tiny_model, "--adapter", tmp_path], 69, "adapter"),
        (["--model", tiny_model, "--tasks", "x"], 2, "--rescore"),
    ):
        result = run_strop(["rollout", *args], tasks(1), check=False)
        assert (result.status, says in result.stderr) == (status, True), result.stderr
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).symlink_to(tiny_model / name)
    result = run_strop(["rollout", "--model", bare], tasks(1), check=False)
    assert result.status == 69
    assert "without a tokenizer" in result.stderr
