"""strop rollout on tasks of the env shell: episodes in a real sandbox, by a scripted policy, into records."""

import json

import pytest

ENV = {"OMP_NUM_THREADS": "1"}
CHECK = """
import json, os, pathlib
logs = pathlib.Path(os.environ["REPORTS"])
logs.mkdir(exist_ok=True)
text = pathlib.Path("answer.txt").read_text() if pathlib.Path("answer.txt").exists() else ""
tests = [("there", bool(text)), ("right", text == "42\\n")]
found = [{"name": name, "status": "passed" if ok else "failed"} for name, ok in tests]
(logs / "ctrf.json").write_text(json.dumps({"results": {"tests": found}}))
(logs / "reward.txt").write_text(str(int(all(ok for _, ok in tests))))
"""


def fenced(command):
    return f"I run this.\n```bash\n{command}\n```"


def task(name="t", **more):
    """Write 42 into answer.txt; paths are relative, so that any kind of sandbox will do."""
    verifier = {
        "name": "tests", "files": {"check.py": CHECK}, "folder": "hidden", "report": "logs/ctrf.json",
        "reward": "logs/reward.txt", "command": "REPORTS=logs python3 hidden/check.py", "timeout_s": 60,
    }  # fmt: skip
    prompt = "Write 42 into answer.txt."
    return {"kind": "task", "id": name, "prompt": prompt, "env": "shell", "verifier": verifier, **more}


@pytest.fixture
def attempt(run_strop, tiny_model, tmp_path):
    """Runs `strop rollout` on tasks with a script: task -> messages."""

    def run(tasks, scripts, *args, check=True):
        file = tmp_path / "policy.jsonl"
        file.write_text("".join(json.dumps({"task": name, "messages": said}) + "\n" for name, said in scripts.items()))
        command = ["rollout", "--model", tiny_model, "--engine", f"script:{file}", "--sandbox", "process", *args]
        done = run_strop(command, tasks, check=check, env=ENV)
        return {r["task"]: r for r in done.records if r["kind"] == "rollout"}, done

    return run


@pytest.fixture(scope="module")
def decode(smol):
    from strop.core.models.load import load_tokenizer, resolve_model

    return load_tokenizer(resolve_model(str(smol))).decode


def test_an_episode_from_prompt_to_verdict(attempt, decode):
    said = [fenced("ls"), fenced("echo 42 > answer.txt; echo done"), "It is there."]
    found, done = attempt([task()], {"t": said})
    record = found["t"]
    assert (record["reward"], record["success"], record["stop"], record["turns"]) == (1.0, True, "agent", 3)
    assert record["assertions"] == [{"name": "there", "status": "passed"}, {"name": "right", "status": "passed"}]
    assert record["horizon"] == 75
    assert record["stitching"] == {"strict": 2, "normalized": 0, "retokenized": 0, "split": 0, "dropped": 0}
    (chunk,) = record["chunks"]
    assert [step["span"] for step in record["steps"]] == chunk["sampled"]
    for step, words in zip(record["steps"], said, strict=True):
        assert decode(chunk["token_ids"][slice(*step["span"])]) == words == step["action"]
        assert step["valid"]
    assert len(chunk["logprobs"]) == sum(end - start for start, end in chunk["sampled"])
    assert "exit code: 0\nstdout:\ndone" in record["steps"][2]["observation"]
    assert len({step["anchor"] for step in record["steps"]}) == 3
    assert record["steps"][-1]["reward"] == 1.0
    # What the policy saw holds what the tool said, and nothing of it is trained on.
    assert "done" in decode(chunk["token_ids"][chunk["sampled"][1][1] : chunk["sampled"][2][0]])
    assert "1/1 passed" in done.stderr
    assert "for trusted tasks only" in done.stderr


def test_how_episodes_end(attempt):
    loop = [fenced("true")] * 9
    scripts = {
        "turns": loop,
        "part": [fenced("echo 41 > answer.txt"), "Done."],
        "bad call": ["```bash\n```", "I give up."],
        "cut off": [fenced("echo 42 > answer.txt; " + "x" * 4000)],
        "mute": [],
    }
    found, _ = attempt([task(name) for name in scripts], scripts, "--max-turns", "4", "--max-tokens", "200")
    assert {name: (r["stop"], r["turns"], r["reward"]) for name, r in found.items()} == {
        "turns": ("max_turns", 4, 0.0), "part": ("agent", 2, 0.0), "bad call": ("agent", 2, 0.0),
        "cut off": ("max_tokens_per_turn", 1, 0.0), "mute": ("agent", 1, 0.0),
    }  # fmt: skip
    assert [one["status"] for one in found["part"]["assertions"]] == ["passed", "failed"]
    assert [step["valid"] for step in found["bad call"]["steps"]] == [False, True]
    assert "it is empty" in found["bad call"]["steps"][1]["observation"]


def test_context_and_time_end_an_episode(attempt):
    scripts = {"long": [fenced("seq 2000"), "Done."], "slow": [fenced("sleep 30"), "Done."]}
    slow = task("slow", sandbox={"max_time_s": 1.0})
    found, _ = attempt([task("long"), slow], scripts, "--max-context", "400")
    assert (found["long"]["stop"], found["long"]["turns"]) == ("max_context", 1)
    assert (found["slow"]["stop"], found["slow"]["turns"]) == ("max_time", 1)


def test_tests_that_were_tampered_with_prove_nothing(attempt):
    scripts = {
        "planted tests": [fenced("mkdir -p hidden; echo 'print(1)' > hidden/check.py"), "Done."],
        "planted report": [fenced("mkdir -p logs; echo 1 > logs/reward.txt"), "Done."],
        "honest": [fenced("ls -a . hidden logs; echo 42 > answer.txt"), "Done."],
    }
    found, _ = attempt([task(name) for name in scripts], scripts)
    assert {name: r["reward"] for name, r in found.items()} == {"planted tests": 0, "planted report": 0, "honest": 1}
    for name in ("planted tests", "planted report"):
        assert found[name]["verdict"]["planted"]
    # Nothing of the tests is there while the agent is.
    assert "check.py" not in found["honest"]["steps"][1]["observation"]


def test_failures_of_the_machinery_are_errors_and_no_rewards(attempt):
    slow = task("hangs")
    slow["verifier"] |= {"command": "sleep 60", "timeout_s": 0.5}
    broken = task("setup", sandbox={"setup": "echo no such luck >&2; exit 7"})
    scripts = {"*": [fenced("true"), "Done."], "fine": [fenced("echo 42 > answer.txt"), "Done."]}
    found, done = attempt([slow, broken, task("fine")], scripts)
    assert "did not end within 0.5 s" in found["hangs"]["error"]
    assert "setup ended with 7: no such luck" in found["setup"]["error"]
    assert "reward" not in found["hangs"] | found["setup"]
    assert found["fine"]["reward"] == 1
    assert "2 failed by the machinery" in done.stderr


def test_files_and_environment_of_a_task(attempt):
    wish = {"files": {"in/a.txt": "4", "run.sh": "#!/bin/sh\ncat in/a.txt\n", "b": {"base64": "Mg=="}},
            "setup": "cat b > in/b.txt", "env": {"TAIL": "in/b.txt"}}  # fmt: skip
    command = '(./run.sh; cat "$TAIL"; echo) > answer.txt'
    found, _ = attempt([task(sandbox=wish)], {"t": [fenced(command), "Done."]})
    assert found["t"]["reward"] == 1


def test_rewards_by_assertions(attempt):
    scripts = {"t": [fenced("echo 41 > answer.txt"), "Done."]}
    found, done = attempt([task()], scripts, "--reward", "assertions", "--reward-scale", "4")
    assert found["t"]["reward"] == 0.25
    assert found["t"]["grading"] == {"rule": "assertions", "source": "report", "passed": 1, "total": 2, "scale": 4.0}
    assert not found["t"]["success"]
    assert "for a part" in done.stderr


def test_the_same_bytes_again_and_on_resume(attempt, tmp_path):
    scripts = {"a": [fenced("echo 42 > answer.txt"), "Done."], "b": [fenced("cat nothing"), "Done."]}
    tasks = [task("a"), task("b")]
    _, first = attempt(tasks, scripts, "-n", "2")
    _, second = attempt(tasks, scripts, "-n", "2", "--concurrency", "1")
    assert first.stdout == second.stdout
    kept = tmp_path / "kept.jsonl"
    kept.write_bytes(b"".join(first.stdout.splitlines(keepends=True)[:3]) + b'{"torn')
    attempt(tasks, scripts, "-n", "2", "--resume", kept)
    assert kept.read_bytes() == first.stdout


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"verifier": {"name": "tests"}}, "verifier"),
        ({"sandbox": {"imgae": "x"}}, "sandbox: Object contains unknown field `imgae`"),
        ({"sandbox": {"files": {"a": {"text": "b"}}}}, "sandbox.files.a"),
        ({"prompt": None}, "prompt"),
    ],
)
def test_tasks_that_make_no_sense_are_named(attempt, fields, says):
    _, done = attempt([task() | fields], {}, check=False)
    assert done.status == 65
    assert f"<stdin>:1: {says}" in done.stderr


@pytest.mark.parametrize(
    ("text", "status", "says"),
    [("{", 65, "policy.jsonl:1"), ('{"messages": 1}', 65, "policy.jsonl:1"), (None, 66, "policy")],
)
def test_a_script_that_is_none(run_strop, tiny_model, tmp_path, text, status, says):
    file = tmp_path / "policy.jsonl"
    if text is not None:
        file.write_text(text)
    done = run_strop(["rollout", "--model", tiny_model, "--engine", f"script:{file}"], [task()], check=False, env=ENV)
    assert done.status == status
    assert says in done.stderr


def test_calibrate_attempts_the_tasks_of_a_shell(run_strop, tiny_model, tmp_path):
    lines = [
        {"task": "half", "sample": 0, "messages": [fenced("echo 42 > answer.txt"), "Done."]},
        {"task": "half", "sample": 1, "messages": [fenced("echo 41 > answer.txt"), "Done."]},
        {"task": "never", "messages": ["I cannot."]},
    ]
    file = tmp_path / "policy.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["calibrate", "--model", tiny_model, "--engine", f"script:{file}", "--sandbox", "process", "-n", "2",
               "--max-turns", "3"]  # fmt: skip
    done = run_strop(command, [task("half"), task("never")], env=ENV)
    verdicts = {r["id"]: r["calibration"]["verdict"] for r in done.records if r["kind"] == "task"}
    assert verdicts == {"half": "accept", "never": "too_hard"}
    assert {r["horizon"] for r in done.records if r["kind"] == "rollout"} == {3}
