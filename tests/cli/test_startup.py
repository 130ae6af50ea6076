"""Start-up is part of the interface: what it must not import. How long it takes is in tests/bench/bench_cli.py."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

STROP = str(Path(sys.executable).with_name("strop"))
# What a tool that only computes on records has no business importing.
HEAVY = {"torch", "numpy", "transformers", "vllm", "sklearn", "docker", "pydantic", "rich", "scipy", "httpx"}
ROLLOUTS = "".join(
    json.dumps(
        {"kind": "rollout", "id": f"g{g}/{i}", "task": f"g{g}", "group": f"g{g}", "group_size": 5, "sample": i,
         "reward": float(i % 2), "success": bool(i % 2)}
    ) + "\n"
    for g in range(2) for i in range(5)
)  # fmt: skip


@pytest.mark.parametrize(
    ("args", "allowed"),
    [
        (["--help"], set()),
        (["--version"], set()),
        (["advantage", "--help"], set()),
        (["train", "--help"], set()),
        (["rollout", "--help"], set()),
        (["rollout", "--no-such-option"], set()),
        (["advantage", "--grpo"], set()),
        (["calibrate", "--band", "0.2:0.8"], set()),
        (["synth-tasks", "arithmetic", "-n", "3"], set()),
        (["report", "--column", "a=b", "--quiet"], set()),
        (["horizon"], set()),
        (["advantage", "--gigpo"], {"numpy"}),
        (["advantage", "--gaca"], {"numpy"}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_nothing_heavy_is_imported(args, allowed):
    command = [sys.executable, "-X", "importtime", STROP, *args]
    env = {key: value for key, value in os.environ.items() if not key.startswith("STROP_")}
    done = subprocess.run(command, input=ROLLOUTS, capture_output=True, text=True, timeout=60, env=env)
    modules = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    assert "strop.cli.main" in modules
    roots = {module.partition(".")[0] for module in modules}
    assert not roots & (HEAVY - allowed)


def test_the_overview_does_not_even_import_typer():
    done = subprocess.run([sys.executable, "-X", "importtime", STROP, "--help"], capture_output=True, text=True)
    assert "typer" not in done.stderr
    assert "msgspec" not in done.stderr
