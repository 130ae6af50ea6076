"""The three engines on the real model: each is opened once, and vLLM's server is one that the tests start and stop."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

MAX_CONTEXT = 512
ENGINES = ["transformers", pytest.param("vllm", marks=pytest.mark.vllm), pytest.param("server", marks=pytest.mark.vllm)]
# Runs a command in a process group of its own and kills the whole group as soon as its stdin ends: when the test
# process closes the pipe, or dies in whatever way.
GUARD = """
import os, select, signal, subprocess, sys
child = subprocess.Popen(sys.argv[1:], stdin=subprocess.DEVNULL)
while child.poll() is None and not select.select([0], [], [], 0.2)[0]:
    pass
os.killpg(0, signal.SIGKILL)
"""


@contextmanager
def one_thread():
    """Two threads that wait for each other are far slower than one wherever the machine has other work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@contextmanager
def vllm_server(folder, log_path):
    """The URL of a vLLM server for the model in `folder`; it is killed at the end, with all its children."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", "float32",
        "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(MAX_CONTEXT), "--enforce-eager",
        "--enable-lora", "--max-lora-rank", "16", "--disable-log-stats", "--disable-uvicorn-access-log",
    ]  # fmt: skip
    said = {
        "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1", "VLLM_HOST_IP": "127.0.0.1", "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }  # fmt: skip
    with log_path.open("wb") as log:
        guard = subprocess.Popen(
            [sys.executable, "-c", GUARD, *command], stdin=subprocess.PIPE, stdout=log, stderr=log,
            env={**os.environ, **said}, start_new_session=True,
        )  # fmt: skip
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}/health", guard, log_path)
        yield f"http://127.0.0.1:{port}"
    finally:
        guard.stdin.close()
        guard.wait(30)
        assert _is_gone(guard.pid)


def _wait_until_healthy(url, guard, log_path):
    import httpx

    deadline = time.monotonic() + 400
    while time.monotonic() < deadline and guard.poll() is None:
        try:
            if httpx.get(url, timeout=5, trust_env=False).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(0.5)
    raise RuntimeError(f"the server did not come up: {log_path.read_text(errors='replace')[-3000:]}")


def _is_gone(group):
    for _ in range(100):
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.fixture(scope="session")
def open_kind(smol, request):
    """Opens an engine of a kind through the door that the commands take."""
    from strop.core.engines.open import EngineOptions, open_engine

    @contextmanager
    def opened(kind, *, adapter=None):
        if kind != "transformers" and importlib.util.find_spec("vllm") is None:
            pytest.skip("vllm is not installed")
        endpoints = (request.getfixturevalue("server_url"),) if kind == "server" else ()
        options = EngineOptions(
            engine=kind, model=str(smol), device="cpu", dtype="float32", max_context=MAX_CONTEXT, offline=True,
            endpoints=endpoints, adapter=adapter and str(adapter),
        )  # fmt: skip
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
            with one_thread(), open_engine(options) as engine:
                yield engine

    return opened


@pytest.fixture(scope="session")
def server_url(smol, tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vllm is not installed")
    with vllm_server(smol, tmp_path_factory.mktemp("server") / "log.txt") as url:
        yield url


@pytest.fixture(scope="session", params=ENGINES)
def engine(request, open_kind):
    """Each of the three engines, one after the other."""
    with open_kind(request.param) as opened:
        yield opened


@pytest.fixture(scope="session")
def lora(smol, tmp_path_factory):
    """An adapter whose B matrices are not zero: it changes every output."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    folder = tmp_path_factory.mktemp("lora")
    model = AutoModelForCausalLM.from_pretrained(smol, dtype=torch.float32)
    projections = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    model = get_peft_model(model, LoraConfig(r=12, lora_alpha=12, target_modules=projections, task_type="CAUSAL_LM"))
    torch.manual_seed(0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.02)
    model.save_pretrained(folder)
    return folder
