"""The command synth-tasks as a process: bytes, statelessness, pipes, usage errors, files, what it imports."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = [
    "arithmetic", "countdown", "reasoning-gym:NAME", "file:PATH", "harbor:DIR", "bfcl:CATEGORY", "textworld:GAME",
    "records:PATH",
]  # fmt: skip

STROP = Path(sys.executable).with_name("strop")


def test_golden_record(run_strop):
    result = run_strop(["synth-tasks", "arithmetic", "-n", 1, "--seed", 1])
    assert result.stdout == (
        b'{"kind":"task","id":"arithmetic-1-0","prompt":"3+4=7\\n12+5=17\\n44+38=","verifier":{"name":"number"},'
        b'"reference":82,"sampling":{"stop":["\\n"],"max_tokens":4},"provenance":{"tool":"synth-tasks",'
        b'"version":"0.1.0","options":{"family":"arithmetic","seed":1}}}\n'
    )
    assert result.stderr == ""


def test_same_bytes_twice_and_piecewise(run_strop):
    whole = run_strop(["synth-tasks", "arithmetic", "-n", 20, "--seed", 1])
    again = run_strop(["synth-tasks", "arithmetic", "-n", 20, "--seed", 1])
    head = run_strop(["synth-tasks", "arithmetic", "-n", 7, "--seed", 1])
    tail = run_strop(["synth-tasks", "arithmetic", "-n", 13, "--seed", 1, "--skip", 7])
    assert whole.stdout == again.stdout == head.stdout + tail.stdout
    assert len({record["id"] for record in whole.records}) == 20
    assert len({record["prompt"] for record in whole.records}) == 20


def test_a_closed_pipe_ends_it_without_a_word():
    command = f"{STROP} synth-tasks arithmetic -n 200000 --seed 1 | head -1 | wc -l; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert (done.stdout.strip(), done.stderr) == ("1", "")
    assert done.returncode in (128 + signal.SIGPIPE, -signal.SIGPIPE)


def test_slow_families_are_not_held_back():
    pytest.importorskip("reasoning_gym")
    process = subprocess.Popen(
        [STROP, "synth-tasks", "reasoning-gym:zebra_puzzles", "-n", "100000"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    # Long before the first mebibyte.
    assert json.loads(process.stdout.readline())["kind"] == "task"
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=20)
    assert process.returncode == -signal.SIGTERM
    assert stderr.decode() == "strop synth-tasks: stopped by SIGTERM; finished records are kept\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "which FAMILY? (strop synth-tasks --list names them)"),
        (["arithmetics"], "unknown family 'arithmetics' (did you mean arithmetic?)"),
        (["chess"], f"unknown family 'chess' (known: {', '.join(FAMILIES)})"),
        (["file"], "the family is written file:PATH, not 'file'"),
        (["arithmetic:2"], "the family is written arithmetic, not 'arithmetic:2'"),
        (["arithmetic", "--division", "exact"], "--division does not apply to the family arithmetic"),
        (["countdown", "--field", "prompt=q"], "--field does not apply to the family countdown"),
        (["arithmetic", "--terms", "two"], "--terms 'two': expected LO:HI, two whole numbers"),
        (["arithmetic", "--operators", "+;-"], "--operators +;-: expected some of +,-,*"),
        (["file:x.jsonl", "--field", "question"], "--field 'question': expected NAME=VALUE"),
        (["--list", "arithmetic"], "--list takes no FAMILY"),
    ],
)
def test_usage_errors(run_strop, args, message):
    result = run_strop(["synth-tasks", *args], check=False)
    assert result.status == 2
    assert result.stderr == f"strop synth-tasks: {message}\n"
    assert result.stdout == b""


def test_a_path_without_file_in_front(run_strop, tmp_path):
    (tmp_path / "q.jsonl").write_text("{}\n")
    result = run_strop(["synth-tasks", "q.jsonl"], check=False, cwd=tmp_path)
    assert result.stderr == "strop synth-tasks: unknown family 'q.jsonl' (did you mean file:q.jsonl?)\n"


def test_options_reach_the_family(run_strop):
    result = run_strop(
        ["synth-tasks", "arithmetic", "-n", 3, "--terms", 3, "--range=-5:5", "--operators", "-,*", "--format", "chat",
         "--verifier-option", "where=last", "--split", "heldout", "--heldout-share", 0.2]
    )  # fmt: skip
    assert result.records[0]["verifier"] == {"name": "number", "where": "last"}
    assert result.records[0]["prompt"][0]["content"].startswith("Compute ")
    assert result.records[0]["provenance"]["options"] == {
        "family": "arithmetic", "seed": 0, "terms": [3, 3], "range": [-5, 5], "operators": ["-", "*"], "format": "chat",
        "verifier_options": [["where", "last"]], "split": "heldout", "heldout_share": 0.2,
    }  # fmt: skip
    for record in result.records:
        expression = record["prompt"][0]["content"].removeprefix("Compute ").partition(". ")[0]
        assert record["reference"] == eval(expression)


def test_repetition_is_said_at_the_end(run_strop):
    result = run_strop(["synth-tasks", "arithmetic", "-n", 10, "--range", "1:3"])
    assert result.stderr == (
        "strop synth-tasks: there are only 9 different questions with these options: later tasks repeat them\n"
    )
    assert len({record["prompt"] for record in result.records}) == 9


def test_gsm8k_shaped_file_end_to_end(run_strop, tmp_path):
    path = tmp_path / "gsm.jsonl"
    rows = [{"question": f"What is {i} + {i}?", "answer": f"It is <<{i}+{i}>>.\n#### {2 * i}"} for i in range(20)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    tasks = run_strop(
        ["synth-tasks", f"file:{path}[10:13]", "--field", "prompt=question", "--field", "reference=answer", "--format",
         "chat", "--verifier", "number", "--verifier-option", "where=last"]
    )  # fmt: skip
    assert [record["id"] for record in tasks.records] == ["gsm-10", "gsm-11", "gsm-12"]
    # The folder is this machine's affair.
    assert tasks.records[0]["provenance"]["options"]["family"] == "file:gsm.jsonl[10:13]"
    assert str(tmp_path) not in tasks.stdout.decode()
    rollouts = [
        {
            "kind": "rollout",
            "id": f"{i}",
            "task": f"gsm-{10 + i}",
            "group": "g",
            "sample": i,
            "response": f"So {20 + i}",
        }
        for i in range(3)
    ]
    again = run_strop(
        ["rollout", "--rescore"], tasks.stdout + b"".join(json.dumps(r).encode() + b"\n" for r in rollouts)
    )
    assert [r["reward"] for r in again.records if r["kind"] == "rollout"] == [1.0, 0.0, 0.0]


def test_bad_rows(run_strop, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_bytes(b'{"prompt":"a","reference":"1"}\n{"prompt":"b"\n{"prompt":"c"}\n{"prompt":"d","reference":"4"}\n')
    stopped = run_strop(["synth-tasks", f"file:{path}"], check=False)
    assert stopped.status == 65
    assert f"{path}:2: not JSON" in stopped.stderr
    assert [record["id"] for record in stopped.records] == ["q-0"]
    rejects = tmp_path / "rejects.jsonl"
    went_on = run_strop(["synth-tasks", f"file:{path}", "--keep-going", "--rejects", rejects], check=False)
    assert went_on.status == 1
    assert [record["id"] for record in went_on.records] == ["q-0", "q-3"]
    set_aside = [json.loads(line) for line in rejects.read_text().splitlines()]
    assert [(r["line"], r["field"], r["text"]) for r in set_aside] == [
        (2, None, '{"prompt":"b"'),
        (3, "reference", '{"prompt":"c"}'),
    ]


def test_missing_file_and_too_few_rows(run_strop, tmp_path):
    missing = run_strop(["synth-tasks", "file:none.jsonl"], check=False, cwd=tmp_path)
    assert (missing.status, missing.stderr) == (66, "strop synth-tasks: none.jsonl: No such file or directory\n")
    (tmp_path / "q.jsonl").write_text('{"prompt":"a","reference":"1"}\n')
    few = run_strop(["synth-tasks", "file:q.jsonl", "-n", 5], cwd=tmp_path)
    assert few.stderr == "strop synth-tasks: 1 tasks instead of 5: the file has no more rows\n"
    (tmp_path / "empty.jsonl").write_text("")
    assert run_strop(["synth-tasks", "file:empty.jsonl"], cwd=tmp_path).stdout == b""


def test_list(run_strop):
    pytest.importorskip("reasoning_gym")
    names = [record["name"] for record in run_strop(["synth-tasks", "--list"]).records]
    assert names[:3] == ["arithmetic", "countdown", "file:PATH"]
    assert {"reasoning-gym:chain_sum", "bfcl:multi_turn_base", "textworld:tw-simple"} <= set(names)
    assert len(names) > 100


def test_without_reasoning_gym_the_extra_is_named(run_strop, tmp_path):
    # None in the table of modules: the import system takes the package for missing.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nsys.modules['reasoning_gym'] = None\n"
    )
    env = {"PYTHONPATH": str(tmp_path)}
    for args in (["reasoning-gym:chain_sum"], ["--list"]):
        result = run_strop(["synth-tasks", *args], check=False, env=env)
        assert result.status == 69
        assert result.stderr == (
            "strop synth-tasks: the package reasoning-gym is missing; install it with: pip install 'strop[envs]'\n"
        )
    names = [record["name"] for record in result.records]
    assert {name.partition(":")[0] for name in names} == {one.partition(":")[0] for one in FAMILIES} - {"reasoning-gym"}


@pytest.mark.parametrize("args", [["arithmetic"], ["countdown"], ["file:q.jsonl"]])
def test_plain_families_import_nothing_heavy(tmp_path, args):
    (tmp_path / "q.jsonl").write_text('{"prompt":"a","reference":"1"}\n')
    done = subprocess.run(
        [sys.executable, "-X", "importtime", STROP, "synth-tasks", *args, "-n", "1"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "strop.core.tasks.families" in loaded
    assert not loaded & {"numpy", "torch", "transformers", "sympy", "reasoning_gym", "math_verify", "rich", "httpx"}


def test_the_command_verifier_judges_a_task_of_a_file(run_strop, tmp_path):
    path = tmp_path / "q.jsonl"
    path.write_text('{"prompt":"even?"}\n')
    grader = tmp_path / "grade.py"
    grader.write_text(
        "import json, sys\n"
        "response = json.load(sys.stdin)['response']\n"
        "if response == 'crash': sys.exit('broken grader')\n"
        "print(json.dumps({'reward': float(int(response) % 2 == 0)}))\n"
    )
    command = f'command=["{sys.executable}","{grader}"]'
    tasks = run_strop(["synth-tasks", f"file:{path}", "--verifier", "command", "--verifier-option", command])
    rollouts = [
        {"kind": "rollout", "id": f"r{i}", "task": "q-0", "group": "g", "sample": i, "response": response}
        for i, response in enumerate(["2", "3", "crash", "x"])
    ]
    again = run_strop(
        ["rollout", "--rescore"], tasks.stdout + b"".join(json.dumps(r).encode() + b"\n" for r in rollouts)
    )
    scored = [record for record in again.records if record["kind"] == "rollout"]
    assert [record.get("reward", "none") for record in scored] == [1.0, 0.0, "none", "none"]
    assert "broken grader" in scored[2]["error"]
    assert "exit status 1" in scored[3]["error"]


def test_tasks_as_folders_and_back(run_strop, tmp_path):
    folder = Path(__file__).resolve().parents[2] / "examples" / "terminal" / "tasks"
    made = run_strop(["synth-tasks", f"harbor:{folder}", "--folders", tmp_path / "out"])
    assert run_strop(["synth-tasks", f"harbor:{tmp_path / 'out'}"]).stdout.replace(b'"out"', b'"tasks"').replace(
        b"harbor:out", b"harbor:tasks"
    ) == made.stdout
    # Stored tasks with fields of their own come out as they went in, and those that are no folder are named.
    other = {"kind": "task", "id": "sum", "prompt": "1+1=", "verifier": {"name": "number"}, "mine": [1, 2]}
    stored = [made.records[0] | {"mine": 1}, other]
    args = ["synth-tasks", "records:-", "--folders", tmp_path / "two"]
    done = run_strop([*args, "--keep-going", "--rejects", tmp_path / "r"], stored, check=False)
    assert done.status == 1
    assert done.records == stored[:1]
    assert "env: 'answer'; Harbor's tasks are of the env shell" in done.stderr
    assert [path.name for path in (tmp_path / "two").iterdir()] == [stored[0]["id"]]
    plain = run_strop(["synth-tasks", "records:-"], stored)
    assert plain.records == stored
