"""strop rollout with containers that are taken away, or that it has to leave: what is kept, and that none is left."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

STROP = Path(sys.executable).with_name("strop")
ENV = {"OMP_NUM_THREADS": "1"}
SOLVED = ["```bash\necho 42 > answer.txt\n```", "Done."]
# Below it is a sleep of its own, which only the group's end takes along.
LONG = ["```bash\nsleep 971; echo never\n```", "Done."]


def task(name):
    verifier = {"name": "tests", "files": {"check.sh": 'test "$(cat answer.txt)" = 42'}, "folder": "hidden",
                "command": "sh hidden/check.sh", "timeout_s": 30}  # fmt: skip
    return {"kind": "task", "id": name, "prompt": "Write 42.", "env": "shell", "verifier": verifier}


@pytest.fixture
def start(tiny_model, image, tmp_path):
    """Starts `strop rollout` on a script, task -> messages, in a session of its own; what runs at the end is killed."""
    with contextlib.ExitStack() as stack:

        def run(scripts, *args):
            policy, tasks = tmp_path / "policy.jsonl", tmp_path / "tasks.jsonl"
            lines = [{"task": name, "messages": said} for name, said in scripts.items()]
            policy.write_text("".join(json.dumps(line) + "\n" for line in lines))
            tasks.write_text("".join(json.dumps(task(name)) + "\n" for name in scripts))
            command = [STROP, "rollout", "--model", tiny_model, "--engine", f"script:{policy}", "--sandbox", "docker",
                       "--image", image, *args, tasks]  # fmt: skip
            process = stack.enter_context(
                subprocess.Popen(
                    list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | ENV
                )
            )
            stack.callback(process.kill)
            return process

        yield run


def owned(engine, process):
    """The containers of a run, by the pid in their label, stopped ones too."""
    found = engine.api.containers(all=True, filters={"label": "strop.owner"})
    return [one for one in found if one["Labels"]["strop.owner"].startswith(f"{process.pid}|")]


def container_that_runs(engine, process, program):
    """The name of the container in which the run's agent has come to that program."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        for one in owned(engine, process):
            if one["State"] == "running":
                # One that has just done its work may be gone by now.
                with contextlib.suppress(OSError):
                    if f'"{program}"' in json.dumps(engine.api.top(one["Id"])):
                        return one["Id"]
        time.sleep(0.1)
    process.kill()
    pytest.fail(f"{program} does not run: {process.stderr.read()}")


def num_made(engine, process, since):
    """How many containers the run has made."""
    told = engine.api.events(since=since, until=time.time(), filters={"event": "create"}, decode=True)
    owners = [event["Actor"]["Attributes"].get("strop.owner", "") for event in told]
    return sum(owner.startswith(f"{process.pid}|") for owner in owners)


def rollouts(out):
    return {r["task"]: r for r in map(json.loads, out.splitlines()) if r["kind"] == "rollout"}


@pytest.mark.parametrize("how", ["kill", "remove"])
def test_a_lost_container_is_an_error_of_its_own_rollout(start, engine, how):
    """It is not tried again in a used container either (verifiers #1739)."""
    scripts = {
        "lost": ["```bash\necho begun\n```", *LONG],
        "fine": ["```bash\nsleep 3; echo 42 > answer.txt\n```", "Done."],
        "later": SOLVED,
    }
    since = time.time()
    lose = {"kill": engine.api.kill, "remove": lambda name: engine.api.remove_container(name, force=True)}[how]
    process = start(scripts, "--concurrency", "2")
    threading.Timer(0.3, lose, [container_that_runs(engine, process, "sleep 971")]).start()
    out, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    found = rollouts(out)
    assert list(found) == ["lost", "fine", "later"]
    assert found["fine"]["success"]
    assert found["later"]["success"]
    lost = found["lost"]
    assert lost["error"].startswith("sandbox lost: ")
    assert not {"reward", "success", "stop"} & set(lost)
    # The trajectory so far is kept, and nothing was done twice.
    assert [step["action"] for step in lost["steps"]] == scripts["lost"][:2]
    assert "begun" in lost["steps"][1]["observation"]
    assert [step["span"] for step in lost["steps"]] == lost["chunks"][0]["sampled"]
    assert b"1 failed by the machinery (sandbox lost: " in errors
    assert num_made(engine, process, since) == 3
    assert owned(engine, process) == []


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_in_the_middle_of_a_command(start, engine, signum):
    """Clean-up neither hangs nor is cut short (inspect #509): ten seconds, and nothing is left."""
    process = start({"done": SOLVED, "long": LONG, "other": LONG}, "--concurrency", "3")
    container_that_runs(engine, process, "sleep 971")
    limit = time.monotonic() + 60
    out = b""
    while b'"rollout"' not in out and time.monotonic() < limit:
        # The finished record was handed over before the signal.
        out += os.read(process.stdout.fileno(), 1 << 20)
    sent = time.monotonic()
    process.send_signal(signum)
    rest, errors = process.communicate(timeout=60)
    assert time.monotonic() - sent < 10
    assert process.returncode == -signum
    found = rollouts(out + rest)
    assert list(found) == ["done"]
    assert found["done"]["success"]
    assert errors.decode().splitlines()[-1] == f"strop rollout: stopped by {signum.name}; finished records are kept"
    assert b"Traceback" not in errors
    assert owned(engine, process) == []


def test_a_killed_run_stops_its_containers_and_the_next_one_removes_them(start, engine):
    """What killed runs leave is known by its label (exgentic #192, traceroot #2101)."""
    process = start({"one": LONG, "two": LONG}, "--concurrency", "2")
    container_that_runs(engine, process, "sleep 971")
    limit = time.monotonic() + 30
    while len(owned(engine, process)) < 2 and time.monotonic() < limit:
        time.sleep(0.1)
    process.kill()
    process.communicate()
    # Killing the client is enough to stop them (repopilot #87), though nobody is left to remove them.
    while any(one["State"] == "running" for one in owned(engine, process)) and time.monotonic() < limit + 30:
        time.sleep(0.1)
    assert not any(one["State"] == "running" for one in owned(engine, process))
    living = start({"one": LONG}, "--concurrency", "1")
    container_that_runs(engine, living, "sleep 971")
    assert owned(engine, process) == []
    # A third run lets be what belongs to a living one.
    third = start({"one": SOLVED})
    out, errors = third.communicate(timeout=120)
    assert rollouts(out)["one"]["success"], errors
    assert [one["State"] for one in owned(engine, living)] == ["running"]
    living.send_signal(signal.SIGTERM)
    living.communicate(timeout=60)
    assert owned(engine, living) == []
