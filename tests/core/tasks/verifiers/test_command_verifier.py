"""The verifier command: what a program may answer, and everything else as an error and never as a reward of 0."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from strop.core.errors import Where
from strop.core.records import Record, Task
from strop.core.tasks.verifiers import Verdict, open_verifiers


def judge(verifiers, program, response="r", timeout_s=20.0, **fields):
    command = [sys.executable, "-S", "-c", program] if isinstance(program, str) else program
    line = json.dumps(
        {
            "kind": "task",
            "id": "t",
            "verifier": {"name": "command", "command": command, "timeout_s": timeout_s},
            **fields,
        }
    )
    record = Record.parse(line, Where("f", 1))
    return verifiers.verify(response, record, record.view(Task))


@pytest.fixture
def verifiers():
    with open_verifiers() as opened:
        yield opened


def test_the_program_sees_the_record_as_it_came_and_the_response(verifiers):
    program = "import sys, json; q = json.load(sys.stdin); print(json.dumps({'reward': 0.5, 'details': q}))"
    verdict = judge(verifiers, program, "a\u2028\nb", own={"x": [1, 2.50]}, prompt="é")
    assert (verdict.reward, verdict.success, verdict.error) == (0.5, False, None)
    assert verdict.details["response"] == "a\u2028\nb"
    assert verdict.details["task"]["own"] == {"x": [1, 2.5]}
    assert verdict.details["task"]["kind"] == "task"


@pytest.mark.parametrize(
    ("answer", "verdict"),
    [
        ('{"reward": 1}', Verdict(1.0, True)),
        ('{"reward": 0.99}', Verdict(0.99, False)),
        ('{"reward": 0, "success": true}', Verdict(0.0, True)),
        ('{"reward": -2.5, "details": {"a": 1}, "more": 1}\\n', Verdict(-2.5, False, {"a": 1})),
    ],
)
def test_verdicts(verifiers, answer, verdict):
    assert judge(verifiers, f"print('{answer}')") == verdict


@pytest.mark.parametrize(
    ("program", "message"),
    [
        ("pass", "not a verdict"),
        ("print('ok')", "not a verdict"),
        ("print('1')", "not a verdict (Expected `object`, got `int`)"),
        ("print('{\"reward\": NaN}')", "not a verdict"),
        ("print('{\"reward\": 1e999}')", "not a verdict"),
        ('print(\'{"reward": "1"}\')', "not a verdict"),
        ("print('{\"reward\": true}')", "not a verdict"),
        ('print(\'{"reward": 1}{"reward": 0}\')', "not a verdict"),
        ("print('{\"reward\": null}')", 'no "reward" in'),
        ("print('{}')", 'no "reward" in'),
        ('print(\'{"error": "no GPU"}\')', "verifier command: no GPU"),
        ("print('{\"reward\": 1}'); raise SystemExit(4)", "ended with exit status 4"),
        ("import sys; sys.exit('it went\\nwrong')", "ended with exit status 1: it went\nwrong"),
        ("import os; print('{\"reward\": 1}', flush=True); os.kill(os.getpid(), 11)", "was killed by SIGSEGV"),
        ("import sys\nwhile True: sys.stdout.write('x' * 65536)", "an answer of more than 1048576 bytes"),
        (
            "import sys\nfor _ in range(200): sys.stderr.write('e' * 65536)\nsys.exit(2)",
            "ended with exit status 2: eee",
        ),
        ("import sys; sys.stdout.buffer.write(bytes([255, 254]))", "not a verdict"),
    ],
)
def test_everything_else_is_an_error(verifiers, program, message):
    verdict = judge(verifiers, program)
    assert verdict.error is not None
    assert verdict.error.startswith("verifier command: ")
    assert message in verdict.error
    assert len(verdict.error) < 1000


def test_a_program_that_does_not_end(verifiers):
    started = time.monotonic()
    verdict = judge(verifiers, "import time; print('{\"reward\": 1}', flush=True); time.sleep(60)", timeout_s=0.5)
    assert verdict.error == "verifier command: no verdict within 0.5 s"
    # One that closed its pipes and goes on.
    verdict = judge(verifiers, "import os, time; os.close(1); os.close(2); time.sleep(60)", timeout_s=0.5)
    assert verdict.error == "verifier command: no verdict within 0.5 s"
    assert time.monotonic() - started < 15


def gone(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc, which only Linux has")
@pytest.mark.parametrize("ending", ["time.sleep(60)", "print('{\"reward\": 1}')"])
def test_its_whole_process_group_goes(verifiers, tmp_path, ending):
    note = tmp_path / "pid"
    program = (
        "import subprocess, sys, time\n"
        "helper = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(60)'])\n"
        f"open({str(note)!r}, 'w').write(str(helper.pid))\n{ending}\n"
    )
    started = time.monotonic()
    verdict = judge(verifiers, program, timeout_s=3.0)
    assert (verdict.error is None) == ending.startswith("print")
    # A helper that holds the pipes does not make us wait for it.
    assert time.monotonic() - started < 15
    time.sleep(0.1)
    assert gone(int(note.read_text()))


def test_a_large_question_and_a_program_that_does_not_read_it(verifiers):
    large = "x" * 5_000_000
    assert judge(verifiers, "print('{\"reward\": 1}')", large).success
    program = "import sys, json; r = json.load(sys.stdin)['response']; print(json.dumps({'reward': len(r)}))"
    assert judge(verifiers, program, large).reward == 5_000_000


def test_a_text_is_split_without_a_shell(verifiers, tmp_path):
    script = tmp_path / "my grader"
    program = "import sys, json; print(json.dumps({'reward': 1, 'details': {'args': sys.argv[1:]}}))"
    script.write_text(f"#!{sys.executable}\n{program}\n")
    script.chmod(0o755)
    verifier = {"name": "command", "command": f"'{script}' 'a b' '$HOME;'"}
    record = Record.make("task", {"id": "t", "verifier": verifier})
    verdict = verifiers.verify("r", record, record.view(Task))
    assert verdict.details == {"args": ["a b", "$HOME;"]}


def test_programs_run_side_by_side_and_closing_ends_them():
    opened = open_verifiers()
    got = []
    program = "import time; time.sleep(60)"
    threads = [threading.Thread(target=lambda: got.append(judge(opened, program))) for _ in range(3)]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    started = time.monotonic()
    opened.close()
    for thread in threads:
        thread.join(10)
    assert time.monotonic() - started < 5
    assert [verdict.error is not None for verdict in got] == [True] * 3
    assert judge(opened, program).error == "verifier command: stopped"


def test_it_inherits_no_open_files(verifiers, tmp_path):
    secret = os.open(tmp_path / "f", os.O_CREAT | os.O_RDWR)
    try:
        program = "import os, json; print(json.dumps({'reward': len(os.listdir('/dev/fd'))}))"
        # stdin, stdout, stderr, and the one that lists.
        assert judge(verifiers, program).reward == 4
    finally:
        os.close(secret)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks into /proc, which only Linux has")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_tool_and_its_grader(tmp_path, signum):
    note = tmp_path / "pid"
    program = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    verifier = {"name": "command", "command": [sys.executable, "-S", "-c", program]}
    records = [
        {"kind": "task", "id": "t", "prompt": "p", "verifier": verifier},
        {"kind": "rollout", "id": "r", "task": "t", "response": "x"},
    ]
    strop = Path(sys.executable).with_name("strop")
    tool = subprocess.Popen(
        [strop, "rollout", "--rescore"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    tool.stdin.write("".join(json.dumps(record) + "\n" for record in records).encode())
    tool.stdin.flush()
    deadline = time.monotonic() + 20
    while not (note.exists() and note.read_text()) and time.monotonic() < deadline:
        time.sleep(0.05)
    tool.send_signal(signum)
    stdout, stderr = tool.communicate(timeout=8)
    assert tool.returncode == -signum
    assert stderr.decode() == f"strop rollout: stopped by {signum.name}; finished records are kept\n"
    assert json.loads(stdout)["kind"] == "task"
    assert gone(int(note.read_text()))
