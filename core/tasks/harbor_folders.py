"""Task records written as folders in Harbor's layout; `core/tasks/harbor.py` reads them back as the same records."""

from __future__ import annotations

import base64
import json
import re
import shlex
from pathlib import Path, PurePosixPath
from typing import Any

from strop.core.errors import DataError
from strop.core.records import Task
from strop.core.tasks.verifiers.tests import FOLDER, TestsOptions
from strop.core.tasks.verifiers.verdict import options_of

SETUP = "setup.sh"
# What the reader makes of RUN instructions, and what this makes RUN instructions of again.
_STEP = re.compile(r"cd (?P<folder>[^\n]+)\n(?P<command>.+)")


def write_folder(task: Task, root: Path) -> Path:
    """Writes the folder root/ID. Raises DataError for a task that the layout cannot hold, or whose folder is there."""
    if task.env != "shell":
        raise DataError(f"{task.env!r}; Harbor's tasks are of the env shell", field="env")
    if not isinstance(task.prompt, str):
        raise DataError("Harbor's instruction is a text, not messages", field="prompt")
    options = options_of(task, TestsOptions) if task.verifier and task.verifier.get("name") == "tests" else None
    if options is None or options.folder != FOLDER:
        raise DataError(f"Harbor's tasks are judged by tests in {FOLDER}", field="verifier")
    if PurePosixPath(task.id).name != task.id or task.id in (".", ".."):
        raise DataError(f"{task.id!r} is no name of a folder", field="id")
    files = dict(options.files)
    if options.command != f"bash {FOLDER}/test.sh":
        if "test.sh" in files:
            raise DataError(f"Harbor runs {FOLDER}/test.sh, and this is another command", field="verifier.command")
        files["test.sh"] = f"#!/bin/sh\n{options.command}\n"
    folder = root / task.id
    try:
        folder.mkdir(parents=True)
    except FileExistsError:
        raise DataError(f"{folder} is there already", field="id") from None
    sandbox = task.sandbox or {}
    (folder / "instruction.md").write_text(task.prompt + "\n", "utf-8")
    (folder / "task.toml").write_text(_config(sandbox, options), "utf-8")
    _write_environment(folder / "environment", sandbox)
    for name, content in files.items():
        _write(folder / "tests" / name, content)
    if isinstance(task.reference, str):
        _write(folder / "solution" / "solve.sh", task.reference)
    return folder


def _config(sandbox: dict[str, Any], options: TestsOptions) -> str:
    lines = ['version = "1.0"', "", "[agent]", f"timeout_sec = {_number(sandbox.get('max_time_s', 900.0))}", "",
             "[verifier]", f"timeout_sec = {_number(options.timeout_s)}", "", "[environment]"]  # fmt: skip
    if "cpus" in sandbox:
        lines.append(f"cpus = {_number(sandbox['cpus'])}")
    if "memory_gib" in sandbox:
        lines.append(f"memory_mb = {_number(sandbox['memory_gib'] * 1024)}")
    return "\n".join(lines) + "\n"


def _write_environment(folder: Path, sandbox: dict[str, Any]) -> None:
    """The Dockerfile, and the files it copies. A setup that is no series of RUN is copied in and run as a script."""
    workdir = sandbox.get("workdir", "/app")
    image = sandbox.get("image")
    lines = [f"FROM {image}" if image else "# FROM names the image; this task leaves it open.", f"WORKDIR {workdir}"]
    lines += [f"ENV {name}={shlex.quote(value)}" for name, value in (sandbox.get("env") or {}).items()]
    for number, (name, content) in enumerate((sandbox.get("files") or {}).items()):
        # Two targets may have one name.
        source = f"files/{number}/{PurePosixPath(name).name}"
        _write(folder / source, content)
        lines.append(f"COPY {json.dumps([source, str(PurePosixPath(workdir) / name)])}")
    setup = sandbox.get("setup")
    steps = None if setup is None else run_steps(setup)
    if steps is not None:
        here = workdir
        for there, command in steps:
            if there != here:
                lines.append(f"WORKDIR {there}")
                here = there
            lines.append(f"RUN {command}")
        if here != workdir:
            lines.append(f"WORKDIR {workdir}")
    elif setup is not None:
        _write(folder / SETUP, setup)
        lines += [f'COPY ["{SETUP}", "/opt/{SETUP}"]', f"RUN sh /opt/{SETUP}"]
    _write(folder / "Dockerfile", "\n".join(lines) + "\n")


def run_steps(setup: str) -> list[tuple[str, str]] | None:
    """The (folder, command) of each RUN of which the reader made this setup; None for one that is of another shape."""
    head, _, rest = setup.partition("\n")
    if head != "set -e" or not rest:
        return None
    lines = rest.split("\n")
    steps = []
    for at in range(0, len(lines), 2):
        found = _STEP.fullmatch("\n".join(lines[at : at + 2]))
        if found is None or any(mark in found["folder"] for mark in "'\"\\ "):
            return None
        steps.append((found["folder"], found["command"]))
    return steps


def _number(value: float) -> str:
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _write(path: Path, content: str | dict[str, str]) -> None:
    data = content.encode("utf-8") if isinstance(content, str) else base64.b64decode(content["base64"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    if data.startswith(b"#!"):
        path.chmod(0o755)
