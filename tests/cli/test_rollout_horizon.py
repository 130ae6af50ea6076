"""A horizon that rollouts move: one state for several runs, a cap in each record, warnings where caps differ."""

import json
import subprocess

import pytest

ENV = {"OMP_NUM_THREADS": "1"}
CHECK = 'test "$(cat steps.txt 2>/dev/null | wc -l)" -ge "$NEEDED"'


def task(name, needed):
    verifier = {"name": "tests", "files": {"need": str(needed)}, "folder": "hidden", "reward": "logs/reward.txt",
                "report": "logs/none", "command": f"NEEDED={needed}; {CHECK}", "timeout_s": 60}  # fmt: skip
    return {"kind": "task", "id": name, "prompt": "Take steps.", "env": "shell", "verifier": verifier}


def script(folder, number):
    """A policy that takes as many steps as it is asked to, one a turn."""
    step = "```bash\necho step >> steps.txt\n```"
    lines = [{"task": f"t{i}", "messages": [step] * i + ["Done."]} for i in range(number)]
    file = folder / "policy.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file


@pytest.fixture
def attempt(run_strop, tiny_model, tmp_path):
    file = script(tmp_path, 12)

    def run(tasks, *args, check=True):
        command = ["rollout", "--model", tiny_model, "--engine", f"script:{file}", "--sandbox", "process"]
        done = run_strop([*command, *args], tasks, check=check, env=ENV)
        by_kind = {kind: [r for r in done.records if r["kind"] == kind] for kind in ("rollout", "horizon")}
        return by_kind["rollout"], by_kind["horizon"], done

    return run


def options(tmp_path, changes="start=8,min_successes=2,headroom=2,low=2", *more):
    return ["--horizon", "elastic", "--horizon-state", tmp_path / "state", "--horizon-set", changes, *more]


def test_each_run_is_a_step_and_the_next_goes_on_from_it(attempt, tmp_path):
    tasks = [task(f"t{i}", i) for i in (1, 2, 3, 9)]
    rollouts, (first,), done = attempt(tasks, *options(tmp_path))
    assert [r["horizon"] for r in rollouts] == [8] * 4
    # Nine steps and a word do not fit into eight turns.
    assert [(r["success"], r["turns"], r["stop"]) for r in rollouts] == [
        (True, 2, "agent"), (True, 3, "agent"), (True, 4, "agent"), (False, 8, "max_turns"),
    ]  # fmt: skip
    assert (first["before"], first["successes"], first["rollouts"]) == (8, 3, 4)
    # The 90th percentile of 2, 3, 4 turns is 3.8; a tenth of the way from 8 to 5.8.
    assert first["after"] == pytest.approx(0.9 * 8 + 0.1 * (3.8 + 2), abs=1e-12)
    assert "horizon: 8 turns before, 7.78 after" in done.stderr
    _, (second,), _ = attempt(tasks, *options(tmp_path), "--seed", "2")
    assert (second["step"], second["before"]) == (2, first["after"])
    # The same seed once more is the same rollouts, which count once.
    _, none, _ = attempt(tasks, *options(tmp_path), "--seed", "2")
    assert none == []


def test_steps_within_a_run(attempt, tmp_path):
    known = [task("t1", 1), task("t2", 2)]
    _, steps, _ = attempt(known, *options(tmp_path), "-n", "3", "--horizon-every", "2", "--concurrency", "1")
    assert [step["step"] for step in steps] == [1, 2, 3]
    assert [step["before"] for step in steps[1:]] == [step["after"] for step in steps[:-1]]


def test_usage_and_state_errors(attempt, tmp_path):
    wrong = [
        (["--horizon", "elastic"], "--horizon-state"),
        (["--horizon-every", "3"], "go with --horizon"),
        ([*options(tmp_path), "--max-turns", "3"], "two ways"),
        (options(tmp_path, "pace=3"), "--horizon-set pace=3"),
        (["--horizon", "tti", "--horizon-state", tmp_path / "x"], "number of steps"),
    ]
    for args, words in wrong:
        _, _, done = attempt([task("t1", 1)], *args, check=False)
        assert (done.status, words in done.stderr) == (2, True), done.stderr
    (tmp_path / "state").write_text('{"cap": ')
    _, _, done = attempt([task("t1", 1)], *options(tmp_path), check=False)
    assert done.status == 65
    assert "no state of a horizon" in done.stderr
    assert (tmp_path / "state").read_text() == '{"cap": '


def test_the_first_of_a_group(attempt, tmp_path):
    slow = "```bash\nsleep 20\n```"
    lines = [{"task": "t1", "sample": i, "messages": [slow if i == 2 else "Done.", *["```bash\ntrue\n```"] * 50]}
             for i in range(3)]  # fmt: skip
    (tmp_path / "policy.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    own = task("t1", 0)
    own["sandbox"] = {"max_time_s": 2}
    rollouts, _, done = attempt([own], "-n", "3", "--first", "2")
    assert [r.get("stop") for r in rollouts] == ["agent", "agent", "cancelled"]
    assert "reward" not in rollouts[2]
    assert (rollouts[2]["turns"], rollouts[2]["group_size"]) == (1, 3)
    assert "1 cancelled after 1.0 turns" in done.stderr
    assert "2/2 passed" in done.stderr


def rollout(i, cap, success, group="g"):
    chunk = {"token_ids": [1, 5, 6], "sampled": [[1, 3]], "logprobs": [-1.0, -1.0]}
    return {"kind": "rollout", "id": f"{group}/{i}", "task": group, "group": group, "group_size": 2, "sample": i,
            "success": success, "reward": float(success), "horizon": cap, "chunks": [chunk], "turns": 1,
            "advantage": 1.0 if success else -1.0}  # fmt: skip


def test_calibrate_and_train_say_where_caps_differ(run_strop, tiny_model, tmp_path):
    same = [rollout(0, 10, True), rollout(1, 10, False)]
    mixed = [rollout(0, 10, True), rollout(1, 30, False)]
    assert "caps" not in run_strop(["calibrate"], same).stderr
    assert "caps from 10 to 30 turns (1 tasks hold several)" in run_strop(["calibrate"], mixed).stderr
    between = [*same, rollout(0, 30, True, "h"), rollout(1, 30, True, "h")]
    assert "caps from 10 to 30 turns (0 tasks hold several)" in run_strop(["calibrate"], between).stderr
    train = ["train", "--model", tiny_model, "--out", tmp_path / "run", "--dry-run"]
    assert "1 groups hold rollouts under different caps" in run_strop(train, mixed, env=ENV).stderr
    assert "caps" not in run_strop(train, same, env=ENV).stderr


def test_two_runs_share_a_state(tiny_model, tmp_path):
    import os
    import sys

    file = script(tmp_path, 4)
    runs = []
    for seed in (1, 2):
        tasks = tmp_path / f"tasks{seed}.jsonl"
        tasks.write_text("".join(json.dumps(task(f"t{i}", i)) + "\n" for i in (1, 2, 3)))
        args = ["--seed", str(seed), "-n", "2", *options(tmp_path), "--horizon-every", "4"]
        command = [sys.executable, "-m", "strop", "rollout", "--model", str(tiny_model), "--engine", f"script:{file}",
                   "--sandbox", "process", *map(str, args), str(tasks)]  # fmt: skip
        runs.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | ENV))
    moved = []
    for run in runs:
        out, error = run.communicate(timeout=120)
        assert run.returncode == 0, error
        moved += [r for line in out.split(b"\n") if line and (r := json.loads(line))["kind"] == "horizon"]
    assert sorted(step["step"] for step in moved) == [1, 2, 3]
    state = json.loads((tmp_path / "state").read_text())
    assert (state["num_steps"], len(state["lengths"]), state["batch"]["rollouts"]) == (3, 12, 0)
