"""The env `command`: programs in two languages, and every way in which a program can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from strop.core.envs.command import CommandRoom, arguments_of
from strop.core.envs.tool_calls import BadCall, Call
from strop.core.envs.world import ToolResult
from strop.core.errors import DataError
from strop.core.records import Record, Task
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.reports import Assertion
from strop.core.tasks.verifiers import open_verifiers

DATA = Path(__file__).resolve().parents[2] / "data" / "envs"
GUESS = f"command:{sys.executable} {DATA / 'guess.py'}"
TILL = f"command:{sys.executable} {DATA / 'till.py'}"


@pytest.fixture
def room():
    made = CommandRoom(request_s=20.0)
    yield made
    made.close()


def world_of(room, env, seed=0, **fields):
    record = Record.make("task", {"id": "t", "env": env, "verifier": {"name": "env"}, **fields})
    return room.world(record, record.view(Task), seed)


def program(tmp_path, body):
    """A program whose answer to a request is what `body` prints."""
    file = tmp_path / "program.py"
    file.write_text("import json, os, sys, time\nfor line in sys.stdin:\n    request = json.loads(line)\n"
                    + textwrap.indent(textwrap.dedent(body), "    "))  # fmt: skip
    return f"command:{sys.executable} {file}"


def say(world, text, calls=(), seconds_left=60.0):
    return world.act(text, list(calls), seconds_left=seconds_left)


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_game_of_text(room):
    world = world_of(room, GUESS, secret=42)
    opening = world.reset()
    assert opening.messages == [{"role": "user", "content": "A number from 1 to 100. Your guess?"}]
    assert opening.tools == []
    first = say(world, "50")
    assert (first.results, first.reward, first.done) == ([ToolResult("It is less.")], 0.0, False)
    assert say(world, "forty").results == [ToolResult("That is no number.", valid=False)]
    last = say(world, "42")
    assert (last.done, last.stop, last.reward) == (True, "env", 1.0)
    verdict = world.judge()
    assert (verdict.reward, verdict.success, verdict.error) == (1.0, True, None)


def test_an_episode_that_was_cut_off_is_no_success(room):
    world = world_of(room, GUESS, secret=42)
    world.reset()
    say(world, "50")
    assert (world.judge().reward, world.judge().success) == (0.0, False)


def test_the_program_knows_the_seed_and_is_used_again(room):
    first = world_of(room, GUESS, seed=6)
    first.reset()
    say(first, "1")
    pid = first._program.pid
    first.close()
    first.close()
    second = world_of(room, GUESS, seed=107)
    second.reset()
    assert second._program.pid == pid
    assert say(second, "8").done
    assert second.judge().success
    third = world_of(room, GUESS)
    third.reset()
    assert third._program.pid != pid


def test_a_snapshot_goes_back_and_into_another_program(room):
    world = world_of(room, GUESS, secret=42)
    world.reset()
    for _ in range(3):
        say(world, "1")
    snapshot = json.loads(json.dumps(world.snapshot()))
    assert say(world, "42").done
    other = world_of(room, GUESS, secret=42)
    assert other.restore(snapshot).messages[0]["content"] == "You have guessed 3 times."
    assert not other.judge().success
    world.restore(snapshot)
    for again in (world, other):
        assert not any(say(again, "1").done for _ in range(3))
        assert say(again, "1").done
        assert not again.judge().success


def test_another_language(room):
    world = world_of(room, f"command:bash {DATA / 'guess.sh'}")
    world.reset()
    assert say(world, "7").results == [ToolResult("No.")]
    assert say(world, "42").done
    assert world.judge().success


def test_tools_results_and_assertions(room):
    world = world_of(room, TILL, wanted=["tea", "bread"])
    opening = world.reset()
    assert [tool["function"]["name"] for tool in opening.tools] == ["put"]
    put = Call("put", {"thing": "tea"})
    outcome = say(world, "I put it.", [put, BadCall("no such tool", name="get"), put])
    assert outcome.results == [
        ToolResult("1 in the basket"),
        ToolResult("no such tool", valid=False),
        ToolResult("It is there already.", valid=False),
    ]
    assert outcome.messages == []
    end = say(world, "Done.")
    assert (end.done, end.results) == (True, [])
    verdict = world.judge()
    assert (verdict.reward, verdict.success) == (0.0, False)
    assert verdict.assertions == [Assertion("tea", "passed"), Assertion("bread", "failed")]


FAULTS = {
    "sys.stderr.write('no disk\\n'); sys.exit(3)": r"ended with exit status 3; on stderr: no disk",
    "os.kill(os.getpid(), 9)": "was killed by SIGKILL",
    "print('Loading...', flush=True)": "not JSON .*'Loading...'",
    "print('[1]', flush=True)": r"no JSON object: '\[1\]'",
    "print('{}', flush=True)": 'no "observation"',
    "print(json.dumps({'observation': 3}), flush=True)": r"Expected .*, got `int` - at `\$.observation`",
    "print(json.dumps({'error': 'no licence'}), flush=True)": "asked to reset: no licence",
    'print(\'{"observation": ""}\\n{}\', flush=True)': "more than one line",
    "os.close(1); time.sleep(60)": "closed its stdout",
}


@pytest.mark.parametrize("body", FAULTS)
def test_a_program_that_fails_is_an_error_of_the_machine(room, tmp_path, body):
    world = world_of(room, program(tmp_path, body))
    with pytest.raises(SandboxLost, match=f"env command: .*{FAULTS[body]}") as caught:
        world.reset()
    assert sys.executable in str(caught.value)
    assert "reset" in str(caught.value)
    world.close()


def test_a_line_beyond_all_bounds(room, tmp_path):
    world = world_of(room, program(tmp_path, "while True: sys.stdout.write('x' * 65536)"))
    with pytest.raises(SandboxLost, match="a line of more than 8388608 bytes"):
        world.reset()


def test_long_lines_both_ways_and_a_full_stderr(room, tmp_path):
    body = """
        sys.stderr.write("noise\\n" * 100_000)
        print(json.dumps({"observation": request.get("action", "") + "!"}), flush=True)
    """
    world = world_of(room, program(tmp_path, body))
    world.reset()
    text = "é" * 1_000_000
    assert say(world, text).results == [ToolResult(text + "!")]


def test_what_was_not_asked_for(room, tmp_path):
    body = """
        print(json.dumps({"observation": ""}), flush=True)
        time.sleep(0.2)
        print("late", flush=True)
    """
    world = world_of(room, program(tmp_path, body))
    world.reset()
    time.sleep(1)
    with pytest.raises(SandboxLost, match="said something that it was not asked for: 'late'"):
        say(world, "x")


def test_a_program_that_hangs_is_ended_with_all_it_started(tmp_path):
    body = f"""
        import subprocess
        child = subprocess.Popen(["sleep", "600"])
        open({str(tmp_path / "pids")!r}, "w").write(f"{{os.getpid()}} {{child.pid}}")
        time.sleep(600)
    """
    room = CommandRoom(request_s=2.0)
    with pytest.raises(SandboxLost, match="did not answer within 2 s"):
        world_of(room, program(tmp_path, body)).reset()
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, pids))
    room.close()


def test_the_time_of_the_episode_bounds_a_step(room, tmp_path, monkeypatch):
    monkeypatch.setattr("strop.core.envs.command.GRACE_S", 0.5)
    body = """
        if request["op"] == "step": time.sleep(60)
        print(json.dumps({"observation": ""}), flush=True)
    """
    world = world_of(room, program(tmp_path, body))
    world.reset()
    began = time.monotonic()
    with pytest.raises(SandboxLost, match=r"asked to step, did not answer within 0\.6 s"):
        say(world, "x", seconds_left=0.1)
    assert time.monotonic() - began < 15


def test_close_ends_what_waits(tmp_path):
    room = CommandRoom()
    world = world_of(room, program(tmp_path, "time.sleep(600)"))
    caught = []

    def reset():
        try:
            world.reset()
        except SandboxLost as error:
            caught.append(str(error))

    thread = threading.Thread(target=reset)
    thread.start()
    deadline = time.monotonic() + 20
    while world._program is None and time.monotonic() < deadline:
        time.sleep(0.02)
    pid = world._program.pid
    room.close()
    room.close()
    thread.join(20)
    assert not thread.is_alive()
    assert len(caught) == 1
    assert not is_running(pid)
    with pytest.raises(SandboxLost, match="stopped"):
        world_of(room, GUESS).reset()


def test_episodes_side_by_side(room):
    def play(secret):
        world = world_of(room, GUESS, secret=secret)
        world.reset()
        low, high = 1, 100
        while True:
            middle = (low + high) // 2
            outcome = say(world, str(middle))
            if outcome.done:
                world.close()
                return world.judge().success
            low, high = (middle + 1, high) if "more" in outcome.results[0].text else (low, middle - 1)

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(play, range(1, 41))) == [True] * 40
    assert 1 <= len(room._programs._all) <= 4


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ("command", "names no program"),
        ("command:", "names no program"),
        ("command:'x", "cannot be split"),
        ("command:/nowhere/prog --fast", "no such program, or not executable: '/nowhere/prog'"),
    ],
)
def test_an_env_that_names_no_program_is_bad_data(room, env, says):
    with pytest.raises(DataError, match=says) as caught:
        world_of(room, env)
    assert caught.value.field == "env"


def test_arguments_are_split_as_a_shell_would():
    assert arguments_of("command:bash -c 'echo a  b'") == ("bash", "-c", "echo a  b")


def test_a_response_alone_is_nothing_to_judge():
    record = Record.make("task", {"id": "t", "env": GUESS, "verifier": {"name": "env"}})
    with open_verifiers() as verifiers:
        verdict = verifiers.verify("42", record, record.view(Task))
        assert "environment of the episode" in verdict.error
        extra = Record.make("task", {"id": "t", "env": GUESS, "verifier": {"name": "env", "x": 1}})
        with pytest.raises(DataError, match="unknown field"):
            verifiers.check(extra, extra.view(Task))


def test_nothing_is_left_after_an_interrupt(tmp_path):
    """A run that is stopped by SIGINT ends its programs."""
    script = f"""
import os, sys, time
from strop.core.envs.command import CommandRoom
from strop.core.records import Record, Task
room = CommandRoom()
record = Record.make("task", {{"id": "t", "env": {GUESS!r}}})
world = room.world(record, record.view(Task), 0)
try:
    world.reset()
    print(world._program.pid, flush=True)
    time.sleep(60)
finally:
    room.close()
"""
    running = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=dict(os.environ)
    )
    pid = running.stdout.readline().decode().strip()
    assert is_running(pid)
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=30)
    assert not is_running(pid)


def test_what_is_no_text_is_no_error_of_the_program(room):
    world = world_of(room, GUESS)
    world.reset()
    assert say(world, "\ud800").results == [ToolResult("That is no number.", valid=False)]
