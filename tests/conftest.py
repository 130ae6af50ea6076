"""Fixtures shared by all tests: the real small model, a tiny random one, and a runner for the installed `strop`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# A busy machine stalls for seconds at a time; how long an example takes is no property of ours.
settings.register_profile("strop", deadline=None)
settings.load_profile("strop")

ROOT = Path(__file__).resolve().parent.parent
STROP = Path(sys.executable).with_name("strop")


def pytest_configure(config):
    """A run in the background of a script may come with SIGINT ignored, which every process we start would inherit."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_terminal_summary(terminalreporter):
    """Prints what the tests measured (`record_property`), from worker processes too."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, [])]
    measured = [f"{name} {value}" for report in reports for name, value in report.user_properties]
    if measured:
        terminalreporter.section("measured")
        terminalreporter.write("".join(f"{line}\n" for line in measured))


@dataclass
class Result:
    """What a run of `strop` gave."""

    stdout: bytes
    stderr: str
    status: int

    @property
    def records(self) -> list[dict]:
        return [json.loads(line) for line in self.stdout.split(b"\n") if line.strip()]


def strop(args, input=b"", check=True, env=None, timeout=300, cwd=None) -> Result:
    """Runs the installed `strop ARGS`; `input` is bytes, or a list of dicts written as JSONL."""
    if not isinstance(input, bytes):
        input = b"".join(json.dumps(record, ensure_ascii=False).encode() + b"\n" for record in input)
    done = subprocess.run(
        [STROP, *map(str, args)],
        input=input,
        capture_output=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, **(env or {})},
    )
    result = Result(done.stdout, done.stderr.decode("utf-8", "replace"), done.returncode)
    assert not check or result.status == 0, f"strop {args}: exit {result.status}: {result.stderr[-2000:]}"
    return result


@pytest.fixture(scope="session")
def run_strop():
    return strop


@pytest.fixture(scope="session")
def smol_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct."""
    named = os.environ.get("STROP_TEST_GGUF")
    if named:
        return Path(named)
    script = ROOT / "examples" / "quickstart" / "get_model.sh"
    done = subprocess.run(
        ["bash", script], capture_output=True, text=True, check=True, env={**os.environ, "PYTHON": sys.executable}
    )
    return Path(done.stdout.strip())


@pytest.fixture(scope="session")
def smol(smol_gguf) -> Path:
    """The converted model folder of SmolLM2-135M-Instruct."""
    from strop.core.models.load import resolve_model

    return Path(resolve_model(str(smol_gguf)).path)


@pytest.fixture(scope="session")
def tiny_model(smol, tmp_path_factory) -> Path:
    """A random Llama of about a million parameters behind SmolLM2's tokenizer: for what does not need a real model."""
    import torch
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smol)
    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.3,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def tiny_moe(smol, tmp_path_factory) -> Path:
    """A random Qwen3-MoE (8 experts, 2 a token; its first layer is dense) behind SmolLM2's tokenizer."""
    import torch
    from transformers import AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(smol)
    folder = tmp_path_factory.mktemp("moe")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, moe_intermediate_size=24, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=512, num_experts=8,
        num_experts_per_tok=2, norm_topk_prob=True, mlp_only_layers=[0], tie_word_embeddings=True,
        initializer_range=0.2, bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
