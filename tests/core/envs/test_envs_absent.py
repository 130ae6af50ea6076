"""What is said where a package of an env, or its data, is not installed: which, and how to get it (exit status 69)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from strop.core.envs import appworld_worker
from strop.core.envs.appworld import AppWorldRoom
from strop.core.errors import DataError, Unavailable
from strop.core.records import Record, Task

# Each runs in a process in which the package cannot be found, so that it says the same wherever the tests run.
HIDE = """
import sys
class Hide:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Hide())
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name.partition(".")[0] in {hidden!r} else find(name)
from strop.core.errors import StropError
from strop.core.records import Record, Task
record = Record.make("task", {task!r})
try:
    {code}
except StropError as error:
    print(type(error).__name__, error.exit_status, error)
"""
CASE = {"prompt": "x", "world": {"classes": ["MathAPI"]}, "reference": {"calls": [[]]}}
GAME = {"world": {"game": "tw-simple", "seed": 1}}


ROOM = "from strop.core.envs.{} import {} as Room; Room().world(record, record.view(Task), 0)"
FAMILY = "from strop.core.tasks.families import *; open_family({!r}, FamilyOptions())"
BFCL = "the package bfcl-eval is missing; install it with: pip install --no-deps bfcl-eval=="
TEXTWORLD = "the package textworld is missing; install it with: pip install 'strop[textworld]'"
ALFWORLD = "the package alfworld is missing; install it with: pip install 'strop[alfworld]'"


@pytest.mark.parametrize(
    ("hidden", "code", "task", "says"),
    [
        ("bfcl_eval", ROOM.format("functions", "FunctionsRoom"), CASE, BFCL),
        ("bfcl_eval", FAMILY.format("bfcl:multi_turn_base"), {}, BFCL),
        ("textworld", ROOM.format("textworld", "TextWorldRoom"), GAME, TEXTWORLD),
        ("textworld", FAMILY.format("textworld:tw-simple"), {}, TEXTWORLD),
        ("alfworld", ROOM.format("alfworld", "AlfWorldRoom"), {"world": {"game": "game.tw-pddl"}}, ALFWORLD),
    ],
)
def test_a_package_that_is_missing_is_named(hidden, code, task, says):
    script = HIDE.format(hidden={hidden}, code=code, task={"id": "t", **task})
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith(f"Unavailable 69 {says}"), done


def appworld(task_id="82e2fac_1"):
    room = AppWorldRoom()
    record = Record.make("task", {"id": "t", "env": "appworld", "world": {"task_id": task_id}})
    try:
        return room.world(record, record.view(Task), 0)
    finally:
        room.close()


def test_appworld_without_its_package(monkeypatch):
    monkeypatch.setenv("STROP_APPWORLD_PYTHON", "/nowhere/python")
    with pytest.raises(Unavailable, match="STROP_APPWORLD_PYTHON: no such program"):
        appworld()
    monkeypatch.delenv("STROP_APPWORLD_PYTHON")
    if importlib.util.find_spec("appworld") is None:
        with pytest.raises(Unavailable, match=r"the package appworld is missing in .*/pip install appworld"):
            appworld()


@pytest.fixture
def python_with_appworld(tmp_path, monkeypatch):
    """An interpreter that finds a package of that name, which is empty: for what is looked at before it is used."""
    (tmp_path / "site" / "appworld").mkdir(parents=True)
    (tmp_path / "site" / "appworld" / "__init__.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("STROP_APPWORLD_PYTHON", sys.executable)
    monkeypatch.setenv("APPWORLD_ROOT", str(tmp_path))
    return tmp_path


def test_appworld_without_its_data(python_with_appworld):
    with pytest.raises(Unavailable, match=r"AppWorld's data are missing .*appworld download data"):
        appworld()
    (python_with_appworld / "data" / "tasks" / "82e2fac_1").mkdir(parents=True)
    assert appworld() is not None
    for wrong in ("82e2fac_2", "../tasks/82e2fac_1"):
        with pytest.raises(DataError, match="AppWorld has no task"):
            appworld(wrong)


def test_appworlds_program_answers_in_the_protocol_and_tells_of_errors(python_with_appworld):
    """It is run by itself, as another interpreter would run it: none of our modules is needed."""
    requests = [
        {"op": "reset", "task": {"id": "t", "world": {"task_id": "82e2fac_1"}}, "seed": 0}, {"op": "snapshot"},
    ]  # fmt: skip
    text = "".join(json.dumps(request) + "\n" for request in requests)
    done = subprocess.run(
        [sys.executable, "-P", Path(appworld_worker.__file__).resolve()], input=text, capture_output=True, text=True,
        timeout=60, env={"PYTHONPATH": str(python_with_appworld / "site")},
    )  # fmt: skip
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert first["error"].startswith("ImportError: cannot import name 'AppWorld'")
    assert second == {"error": "the env appworld has no snapshot"}
    assert done.returncode == 0
