"""Task folders as Terminal-Bench 1 has them: an older layout than Harbor's, read into the same records.

    task.yaml            what the agent is told (`instruction`), time limits
    Dockerfile           and the files it copies
    run-tests.sh         judges, with tests/ beside it, in /tests
    solution.sh          how it can be done; never shown to the agent

A docker-compose.yaml that says more than how to build that one image cannot be read; it makes the folder a bad row.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from strop.core.errors import missing_extra
from strop.core.records import Task

AGENT_S, TESTS_S = 360.0, 60.0
TESTS_FOLDER = "/tests"


def is_terminal_bench(folder: Path) -> bool:
    """Whether a folder has this layout and not Harbor's."""
    return (folder / "task.yaml").exists() and not (folder / "task.toml").exists()


def read_terminal_bench(
    folder: Path, read_environment: Callable[[], dict[str, Any]], read_files: Callable[[str], dict[str, Any]],
    bad: Callable[[str], Exception],
) -> Task:  # fmt: skip
    """The task in a folder. Raises what `bad` makes of a message where half of its files are missing.

    `read_environment` reads the Dockerfile into a record's `sandbox`, `read_files` the files below a folder.
    """
    config = _config(folder, bad)
    prompt = config.get("instruction")
    if not isinstance(prompt, str) or not prompt.strip():
        raise bad("task.yaml holds no instruction")
    script = folder / "run-tests.sh"
    if not script.exists():
        raise bad("run-tests.sh is missing; nothing judges the task")
    services = _services(folder, bad)
    if len(services) > 1:
        raise bad(f"docker-compose.yaml starts {len(services)} containers, and a sandbox is one")
    files = read_files("tests") | {"run-tests.sh": script.read_text("utf-8")}
    verifier = {
        "name": "tests", "files": files, "timeout_s": _seconds(config, "max_test_timeout_sec", TESTS_S, bad),
        "command": f"TEST_DIR={TESTS_FOLDER} bash {TESTS_FOLDER}/run-tests.sh",
    }  # fmt: skip
    sandbox = read_environment()
    sandbox["max_time_s"] = _seconds(config, "max_agent_timeout_sec", AGENT_S, bad)
    solution = folder / "solution.sh"
    reference = solution.read_text("utf-8", "replace") if solution.exists() else None
    return Task(
        id=folder.name, prompt=prompt.strip(), env="shell", verifier=verifier, reference=reference, sandbox=sandbox
    )


def _config(folder: Path, bad: Callable[[str], Exception]) -> dict[str, Any]:
    found = _yaml(folder / "task.yaml", bad)
    if not isinstance(found, dict):
        raise bad("task.yaml holds no mapping")
    return found


def _services(folder: Path, bad: Callable[[str], Exception]) -> dict[str, Any]:
    file = folder / "docker-compose.yaml"
    found = _yaml(file, bad) if file.exists() else {}
    services = found.get("services") if isinstance(found, dict) else None
    return services if isinstance(services, dict) else {}


def _yaml(file: Path, bad: Callable[[str], Exception]) -> Any:
    try:
        import yaml  # type: ignore[import-untyped]
    except ImportError:
        raise missing_extra("pyyaml", "envs") from None
    try:
        return yaml.safe_load(file.read_text("utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise bad(f"{file.name}: {str(error).partition(chr(10))[0]}") from None


def _seconds(config: dict[str, Any], name: str, default: float, bad: Callable[[str], Exception]) -> float:
    value = config.get(name, default)
    if not isinstance(value, int | float) or value <= 0:
        raise bad(f"task.yaml: {name} is {value!r}; expected seconds")
    return float(value)
