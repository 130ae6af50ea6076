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


def book():
    """What the parts make."""
    return "".join(part.read_text() for part in sorted((WORK / "parts").glob("*.txt")))


def test_make_joins_the_parts():
    (WORK / "book.txt").unlink(missing_ok=True)
    run("make", cwd=WORK)
    assert (WORK / "book.txt").read_text() == book()


def test_nothing_is_done_twice():
    run("make", cwd=WORK)
    before = (WORK / "book.txt").stat().st_mtime_ns
    run("make", cwd=WORK)
    assert (WORK / "book.txt").stat().st_mtime_ns == before


def test_a_changed_part_counts():
    run("make", cwd=WORK)
    part = WORK / "parts" / "02-middle.txt"
    part.write_text("Something happened.\n")
    os.utime(part, (2_000_000_000, 2_000_000_000))
    run("make", cwd=WORK)
    assert (WORK / "book.txt").read_text() == book()


report(test_make_joins_the_parts, test_nothing_is_done_twice, test_a_changed_part_counts)
