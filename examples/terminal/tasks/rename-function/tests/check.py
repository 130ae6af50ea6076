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


SHOP = Path("/app/shop")


def test_it_prints_what_it_printed():
    assert run("python3", "-m", "shop", cwd="/app") == "calc says 3.5\n"


def test_the_new_name_is_there():
    code = "from shop.price import total_price, calculate_tax; from shop.order import bill; print(bill([10]), total_price([1]))"
    assert run("python3", "-c", code, cwd="/app").split() == ["12.0", "1.0"]


def test_the_old_name_is_gone():
    import re

    for file in SHOP.glob("*.py"):
        code = re.sub(r'"[^"\n]*"', "", file.read_text())
        assert not re.search(r"\bcalc\b", code), file


report(test_it_prints_what_it_printed, test_the_new_name_is_there, test_the_old_name_is_gone)
