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


CONFIG = Path("/app/config")


def test_the_file_is_named():
    assert Path("/app/found.txt").read_text().strip() in ("db/main.conf", "./db/main.conf")


def test_the_password_is_gone():
    assert "hunter2" not in "".join(file.read_text() for file in CONFIG.rglob("*") if file.is_file())


def test_the_rest_is_as_it_was():
    assert (CONFIG / "db" / "main.conf").read_text() == "host=db\nuser=shop\npassword=***\ntimeout=5\n"
    assert (CONFIG / "db" / "README").read_text() == "The password is somewhere here.\n"


report(test_the_file_is_named, test_the_password_is_gone, test_the_rest_is_as_it_was)
