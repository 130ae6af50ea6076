"""The contract: command lines with known answers, whose names of options and fields do not change.

Each script of tests/contract/ runs with the `strop` of this environment, and fails with the first answer that differs.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = Path(__file__).resolve().parent / "contract"
CHECKS = sorted(path.name for path in CONTRACT.glob("[!_]*.py"))


def test_the_checks_of_this_stage_are_here():
    assert {"advantage.py", "calibrate.py", "streams.py"} <= set(CHECKS)


@pytest.mark.parametrize("check", CHECKS)
def test_contract(check):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    env = {**os.environ, "PATH": path}
    command = [sys.executable, check]
    # streams.py also bounds the time of `strop --help`, which a machine busy with something else can miss.
    for _ in range(3):
        done = subprocess.run(command, cwd=CONTRACT, env=env, capture_output=True, text=True, timeout=300)
        if done.returncode == 0 or "--help takes" not in done.stdout:
            break
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip(), "a check that holds says so"
