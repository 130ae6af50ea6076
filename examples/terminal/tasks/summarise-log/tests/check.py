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


LOG = Path("/app/access.log").read_text().splitlines()


def summary():
    """What the agent wrote."""
    return json.loads(Path("/app/summary.json").read_text())


def test_requests():
    assert summary()["requests"] == len(LOG) == 240


def test_errors():
    assert summary()["errors"] == sum(line.split()[8] >= "500" for line in LOG)


def test_addresses():
    assert summary()["addresses"] == len({line.split()[0] for line in LOG})


def test_top_path():
    paths = [line.split()[6] for line in LOG]
    assert summary()["top_path"] == max(set(paths), key=paths.count)


report(test_requests, test_errors, test_addresses, test_top_path)
