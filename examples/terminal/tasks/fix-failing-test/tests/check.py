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


WORK = Path("/app")


def test_the_test_passes():
    assert run("python3", "test_stats.py", cwd=WORK).strip() == "ok"


def test_other_values_too():
    code = "from stats import mean, median; print(median([7, 5]), mean([4]), median([9]))"
    assert run("python3", "-c", code, cwd=WORK).split() == ["6.0", "4.0", "9"]


def test_the_test_is_as_it_was():
    assert (WORK / "test_stats.py").read_text().count("assert ") == 4


report(test_the_test_passes, test_other_values_too, test_the_test_is_as_it_was)
