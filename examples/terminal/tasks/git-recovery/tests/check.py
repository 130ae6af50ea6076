"""The checks, each a function; a CTRF report of them and the outcome go where Harbor expects them."""

import json
import os
import subprocess
from pathlib import Path

LOGS = Path(os.environ.get("STROP_LOGS", "/logs/verifier"))


def report(*checks):
    """Runs the checks, writes ctrf.json and reward.txt."""
    tests = []
    for check in checks:
        try:
            check()
            status = "passed"
        except Exception as error:
            print(f"{check.__name__}: {error!r}")
            status = "failed"
        tests.append({"name": check.__name__, "status": status, "duration": 0})
    passed = sum(test["status"] == "passed" for test in tests)
    summary = {"tests": len(tests), "passed": passed, "failed": len(tests) - passed}
    LOGS.mkdir(parents=True, exist_ok=True)
    (LOGS / "ctrf.json").write_text(json.dumps({"results": {"summary": summary, "tests": tests}}))
    (LOGS / "reward.txt").write_text(str(int(passed == len(tests))))


def run(*command, **more):
    """What a command prints; it has to succeed."""
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=30, **more).stdout


NOTES = "/app/notes"


def test_the_file_is_back():
    assert (Path(NOTES) / "recipe.txt").read_text() == "flour\nwater\nsalt\n"


def test_it_is_committed():
    assert run("git", "-C", NOTES, "show", "HEAD:recipe.txt") == "flour\nwater\nsalt\n"
    assert run("git", "-C", NOTES, "status", "--porcelain") == ""


def test_no_commit_was_taken_away():
    subjects = run("git", "-C", NOTES, "log", "--format=%s").splitlines()
    assert len(subjects) >= 4
    assert subjects[1:][-3:] == ["Tidy up", "More notes", "Begin"]


report(test_the_file_is_back, test_it_is_committed, test_no_commit_was_taken_away)
