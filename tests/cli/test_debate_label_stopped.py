"""`strop debate-label` that is stopped in its work and then goes on: no line lost, none twice, no file torn."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

pytestmark = pytest.mark.timeout(120)
STROP = Path(sys.executable).with_name("strop")
NUM_EXAMPLES = 24
# Support always accepts, the others never; it says who it is, so that a test sees whether it is left behind.
ROLE = """
import json, os, sys, time
with open(os.environ["PIDS"], "a") as pids:
    print(os.getpid(), file=pids)
for line in sys.stdin:
    time.sleep(0.02)
    asked = json.loads(line)
    cite = f"[skill:{asked['skills'][0]['id']}]"
    text = {"support": "Vote: 2", "verdict": f"{cite}\\nGap: tools\\nVerdict: 1"}.get(asked["role"], "Vote: 1")
    print(json.dumps({"text": text}), flush=True)
"""


@pytest.fixture
def work(tmp_path):
    """A folder with examples, a role, and a bank and a buffer of an earlier run."""
    (tmp_path / "role.py").write_text(ROLE)
    examples = ({"id": f"e{i}", "query": f"rebook flight {i}", "agent": {"tools": ["search"]}}
                for i in range(NUM_EXAMPLES))  # fmt: skip
    (tmp_path / "examples.jsonl").write_text("".join(json.dumps(one) + "\n" for one in examples))
    skill = {"kind": "skill", "id": "old", "title": "t", "principle": "p", "when_to_apply": "flight", "tags": []}
    entry = {"kind": "disagreement", "id": "x", "pattern": "topic/over_accept", "priority": 1.5, "query": "q"}
    for place in ("whole", "stopped"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "bank.jsonl").write_text(json.dumps(skill) + "\n")
        (tmp_path / place / "buffer.jsonl").write_text(json.dumps(entry) + "\n")
    return tmp_path


def command(work, place):
    """The same files are read and, at the end, written."""
    folder = work / place
    role = f"command:{sys.executable} {work / 'role.py'}"
    return [
        str(STROP), "debate-label", "-q", "--role", role, "--rounds", "1", "--every", "3", "--seed", "1",
        "--skills", str(folder / "bank.jsonl"), "--skills-out", str(folder / "bank.jsonl"),
        "--buffer", str(folder / "buffer.jsonl"), "--replies", str(folder / "replies.jsonl"),
        str(work / "examples.jsonl"),
    ]  # fmt: skip


def told(work, place):
    """The environment that says where the role leaves its process id."""
    return {**os.environ, "PIDS": str(work / place / "pids")}


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def wait_until(holds):
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.01)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL], ids=lambda one: one.name)
@pytest.mark.parametrize("num_replies", [3, 17, 40])
def test_a_stopped_run_goes_on_and_ends_like_one_that_was_not(work, signum, num_replies):
    whole, stopped = work / "whole", work / "stopped"
    subprocess.run([*command(work, "whole"), "--resume", whole / "out.jsonl"], check=True, env=told(work, "whole"))
    before = [(stopped / name).read_bytes() for name in ("bank.jsonl", "buffer.jsonl")]
    resumed = [*command(work, "stopped"), "--resume", str(stopped / "out.jsonl")]
    replies = stopped / "replies.jsonl"
    with subprocess.Popen(resumed, stderr=subprocess.PIPE, env=told(work, "stopped")) as process:
        wait_until(lambda: replies.exists() and replies.read_bytes().count(b"\n") >= num_replies)
        process.send_signal(signum)
        errors = process.stderr.read().decode()
        assert process.wait(30) == -signum
    assert "Traceback" not in errors
    wait_until(lambda: not any(map(is_running, (stopped / "pids").read_text().split())))
    # Nothing is half-written: what is put in place at the end is as it was.
    assert [(stopped / name).read_bytes() for name in ("bank.jsonl", "buffer.jsonl")] == before
    num_kept = len(replies.read_bytes().splitlines())
    assert num_replies <= num_kept < 4 * NUM_EXAMPLES, "the signal came too late to test anything"
    subprocess.run(resumed, check=True, env=told(work, "stopped"))
    for name in ("out.jsonl", "bank.jsonl", "buffer.jsonl", "replies.jsonl"):
        assert (stopped / name).read_bytes() == (whole / name).read_bytes(), name
    written = [json.loads(line) for line in (stopped / "out.jsonl").read_text().splitlines()]
    kinds = Counter(one.get("kind", "example") for one in written)
    assert kinds["example"] == kinds["label"] == NUM_EXAMPLES
    assert kinds["skill"] > 0
    assert {path.name for path in stopped.iterdir()} == {
        "out.jsonl", "bank.jsonl", "buffer.jsonl", "replies.jsonl", "pids"
    }  # fmt: skip


def test_a_reader_that_has_enough_ends_the_run_without_a_word(work):
    stopped = work / "stopped"
    before = [(stopped / name).read_bytes() for name in ("bank.jsonl", "buffer.jsonl")]
    with subprocess.Popen(
        command(work, "stopped"), stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=told(work, "stopped")
    ) as process:
        assert json.loads(process.stdout.readline())["id"] == "e0"
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == -signal.SIGPIPE
    assert [(stopped / name).read_bytes() for name in ("bank.jsonl", "buffer.jsonl")] == before
    wait_until(lambda: not any(map(is_running, (stopped / "pids").read_text().split())))
    kept = [json.loads(line) for line in (stopped / "replies.jsonl").read_text().splitlines()]
    assert 12 <= len(kept) < 4 * NUM_EXAMPLES


def test_a_signal_between_bank_and_buffer_waits_until_both_are_there(work):
    # The program stops the run when the first of the two files is put in place.
    stopped = work / "stopped"
    stop = (
        "import os, signal, sys\nfrom pathlib import Path\nfrom strop.cli.main import main\n"
        "replace = Path.replace\n"
        "def stopping(self, target):\n"
        "    Path.replace = replace\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return replace(self, target)\n"
        "Path.replace = stopping\nsys.argv[0] = 'strop'\nmain()\n"
    )
    arguments = command(work, "stopped")[1:]
    done = subprocess.run(
        [sys.executable, "-c", stop, *arguments], capture_output=True, check=False, env=told(work, "stopped")
    )
    assert done.returncode == -signal.SIGTERM
    used = {json.loads(line).get("used") for line in (stopped / "buffer.jsonl").read_text().splitlines()} - {None}
    skills = {json.loads(line)["id"] for line in (stopped / "bank.jsonl").read_text().splitlines()}
    assert used
    assert used <= skills
