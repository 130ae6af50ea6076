"""The family `harbor:DIR`: task folders in Harbor's layout, as Terminal-Bench 2 has them, one task a folder.

    task.toml            time limits, and what the environment may use
    instruction.md       what the agent is told
    environment/         a Dockerfile and the files it copies
    tests/test.sh        judges; writes /logs/verifier/reward.txt or ends with its status (with the other files there)
    solution/solve.sh    how it can be done; never shown to the agent

No image is built: of the Dockerfile FROM, WORKDIR, COPY, ADD of plain files, ENV and RUN are read, and the files and
commands become the record's `sandbox`, so that a record holds its task whole and runs in either kind of sandbox.
Another instruction makes the folder a bad row, which says why. Folders of Terminal-Bench 1 are read as well
(core/tasks/terminal_bench.py), and core/tasks/harbor_folders.py writes folders back.
"""

from __future__ import annotations

import base64
import json
import re
import shlex
import tomllib
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from strop.core.errors import InputMissing, Where
from strop.core.records import Task
from strop.core.tasks.families import BadRow, Family, FamilyOptions
from strop.core.tasks.terminal_bench import is_terminal_bench, read_terminal_bench

FOLDER_FILES = ("instruction.md", "task.toml", "task.yaml")
NO_EFFECT = ("CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "SHELL", "ARG", "USER")
AGENT_S, VERIFIER_S = 900.0, 900.0


@dataclass(slots=True)
class Environment:
    """What a Dockerfile says."""

    image: str | None = None
    workdir: str = "/app"
    files: dict[str, str | dict[str, str]] = field(default_factory=dict)
    commands: list[str] = field(default_factory=list)
    env: dict[str, str] = field(default_factory=dict)
    source: str = "environment"


class HarborTasks(Family):
    """Every folder below DIR that holds an instruction.md, in order of their names; or DIR itself."""

    is_finite = True

    def __init__(self, path: str, options: FamilyOptions) -> None:
        root = Path(path).expanduser()
        super().__init__(root.resolve().name, options)
        self.spec = f"harbor:{root.resolve().name}"
        if not root.is_dir():
            raise InputMissing(f"{path}: no such folder")
        folders = [root] if any((root / name).exists() for name in FOLDER_FILES) else [
            folder for folder in sorted(root.iterdir()) if folder.is_dir() and not folder.name.startswith(".")
        ]  # fmt: skip
        self._folders = [folder for folder in folders if self.admits(folder.name)]
        if not self._folders:
            raise InputMissing(f"{path}: no task folder there (one with {FOLDER_FILES[0]})")

    def make(self, index: int, seed: int) -> Task:
        """The task of folder `index`. Raises IndexError beyond the last, BadRow for a folder that is not whole."""
        return read_folder(self._folders[index])


def read_folder(folder: Path) -> Task:
    """The task in a folder. Raises BadRow where half of its files are missing or make no sense."""
    if is_terminal_bench(folder):
        return read_terminal_bench(
            folder, lambda: _plain_sandbox(read_dockerfile(folder, ".")), lambda name: _files(folder, name),
            lambda message: _bad(folder, message),
        )  # fmt: skip
    config = _config(folder)
    prompt = _text(folder, "instruction.md").strip()
    if not prompt:
        raise _bad(folder, "instruction.md is empty")
    tests = _files(folder, "tests")
    if "test.sh" not in tests:
        raise _bad(folder, "tests/test.sh is missing; nothing judges the task")
    verifier: dict[str, Any] = {"name": "tests", "files": tests, "command": "bash /tests/test.sh"}
    verifier["timeout_s"] = _seconds(folder, config, "verifier", VERIFIER_S)
    solution = folder / "solution" / "solve.sh"
    reference = solution.read_text("utf-8", "replace") if solution.exists() else None
    sandbox = _sandbox(folder, config)
    return Task(id=folder.name, prompt=prompt, env="shell", verifier=verifier, reference=reference, sandbox=sandbox)


def _sandbox(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The record's `sandbox`: what the agent finds, and how long it has."""
    told = config.get("environment", {})
    sandbox = _plain_sandbox(read_dockerfile(folder, "environment"))
    if told.get("docker_image"):
        sandbox["image"] = told["docker_image"]
    if isinstance(told.get("cpus"), int | float):
        sandbox["cpus"] = float(told["cpus"])
    if (memory := _gib(told)) is not None:
        sandbox["memory_gib"] = memory
    sandbox["max_time_s"] = _seconds(folder, config, "agent", AGENT_S)
    return sandbox


def _plain_sandbox(environment: Environment) -> dict[str, Any]:
    sandbox: dict[str, Any] = {} if environment.image is None else {"image": environment.image}
    sandbox["workdir"] = environment.workdir
    if environment.files:
        sandbox["files"] = environment.files
    if environment.commands:
        sandbox["setup"] = "set -e\n" + "\n".join(environment.commands)
    if environment.env:
        sandbox["env"] = environment.env
    return sandbox


def read_dockerfile(folder: Path, inner: str = "environment") -> Environment:
    """The environment that the Dockerfile below a folder describes; without one it is empty. Raises BadRow."""
    file = folder / inner / "Dockerfile"
    found = Environment(source=inner)
    if not file.exists():
        return found
    text = re.sub(r"\\\n", " ", "\n".join(line for line in file.read_text("utf-8").split("\n") if line[:1] != "#"))
    for line in filter(str.strip, text.split("\n")):
        word, _, rest = line.strip().partition(" ")
        _instruction(folder, found, word.upper(), rest.strip())
    return found


def _instruction(folder: Path, found: Environment, word: str, rest: str) -> None:
    if word == "FROM":
        if found.image is not None:
            raise _bad(folder, "the Dockerfile has several stages; name a built image in task.toml")
        found.image = rest.split()[0]
    elif word == "WORKDIR":
        found.workdir = str(PurePosixPath(found.workdir) / rest)
    elif word in ("COPY", "ADD"):
        _copy(folder, found, rest)
    elif word == "ENV":
        pairs = shlex.split(rest)
        found.env |= dict(pair.split("=", 1) for pair in pairs) if "=" in pairs[0] else {pairs[0]: " ".join(pairs[1:])}
    elif word == "RUN":
        found.commands.append(f"cd {shlex.quote(found.workdir)}\n{rest}")
    elif word not in NO_EFFECT:
        raise _bad(folder, f"the Dockerfile's {word} is not read; name a built image in task.toml (docker_image)")


def _copy(folder: Path, found: Environment, rest: str) -> None:
    names = [name for name in _words(rest) if not name.startswith("--")]
    if len(names) < 2 or "--from=" in rest or "://" in rest:
        raise _bad(folder, f"the Dockerfile copies {rest!r}, which is no file of the folder")
    target = str(PurePosixPath(found.workdir) / names[-1])
    for name in names[:-1]:
        source = folder / found.source / name
        if source.is_dir():
            inside = _files(folder, f"{found.source}/{name}")
            found.files |= {f"{target}/{inner}": data for inner, data in inside.items()
                            if (name, inner) != (".", "Dockerfile")}  # fmt: skip
        elif source.is_file():
            into = names[-1].endswith("/") or len(names) > 2 or names[-1] in (".", "./")
            found.files[f"{target}/{source.name}" if into else target] = _content(source)
        else:
            path = PurePosixPath(found.source) / name
            raise _bad(folder, f"{path} is missing, which the Dockerfile copies")


def _words(rest: str) -> list[str]:
    """The words of a COPY, which may be a JSON array."""
    if rest.startswith("["):
        try:
            words = json.loads(rest)
        except ValueError:
            return []
        return words if all(isinstance(word, str) for word in words) else []
    return shlex.split(rest)


def _files(folder: Path, name: str) -> dict[str, str | dict[str, str]]:
    root = folder / name
    return {path.relative_to(root).as_posix(): _content(path) for path in sorted(root.rglob("*")) if path.is_file()}


def _content(path: Path) -> str | dict[str, str]:
    data = path.read_bytes()
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(data).decode()}


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "task.toml"
    if not file.exists():
        raise _bad(folder, "task.toml is missing")
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise _bad(folder, f"task.toml: {error}") from None


def _seconds(folder: Path, config: dict[str, Any], part: str, default: float) -> float:
    value = config.get(part, {}).get("timeout_sec", default)
    if not isinstance(value, int | float) or value <= 0:
        raise _bad(folder, f"task.toml: {part}.timeout_sec is {value!r}; expected seconds")
    return float(value)


def _gib(told: dict[str, Any]) -> float | None:
    if isinstance(told.get("memory_mb"), int | float):
        return float(told["memory_mb"]) / 1024
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([MG])i?B?", str(told.get("memory", "")), re.IGNORECASE)
    return None if match is None else float(match[1]) / (1024 if match[2].upper() == "M" else 1)


def _text(folder: Path, name: str) -> str:
    try:
        return (folder / name).read_text("utf-8")
    except FileNotFoundError:
        raise _bad(folder, f"{name} is missing") from None
    except (OSError, UnicodeDecodeError) as error:
        raise _bad(folder, f"{name}: {error}") from None


def _bad(folder: Path, message: str) -> BadRow:
    return BadRow(message, where=Where(str(folder), 1), field=None, text=str(folder))
