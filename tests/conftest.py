"""Fixtures shared by all tests: a small real model, a tiny random one, an engine of containers, a runner of `strop`."""

from __future__ import annotations

import fcntl
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

from strop.core.errors import Unavailable

# A busy machine stalls for seconds at a time; how long an example takes is no property of ours.
settings.register_profile("strop", deadline=None)
settings.load_profile("strop")

ROOT = Path(__file__).resolve().parent.parent
STROP = Path(sys.executable).with_name("strop")
IMAGE = "strop-test:minbase"


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


@pytest.fixture(scope="session")
def tiny_encoder(tmp_path_factory) -> Path:
    """A random BERT of two layers that knows nine words: token 5 is "yes", 6 "no", 7 "river", 8 "stone"."""
    torch = pytest.importorskip("torch", reason="torch is missing (extra model)")
    from transformers import BertConfig, BertModel, BertTokenizer

    folder = tmp_path_factory.mktemp("bert")
    words = ["yes", "no", "river", "stone", "cloud", "lamp", "a", "b", "c"]
    (folder / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]) + "\n")
    BertTokenizer(str(folder / "vocab.txt")).save_pretrained(folder)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=14, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=40, initializer_range=0.5,
    )  # fmt: skip
    BertModel(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def engine():
    """A driver of the engine that is here."""
    pytest.importorskip("docker", reason="the package docker is missing (extra sandbox)")
    from strop.core.sandbox.docker import DockerSandboxes

    try:
        driver = DockerSandboxes()
    except Unavailable as error:
        pytest.skip(f"{error} (or bash .pkg/docker.sh start)")
    with driver:
        yield driver


@pytest.fixture(scope="session")
def image(engine) -> str:
    """An image with sh, coreutils and python3: the one that is named, or one made by debootstrap."""
    named = os.environ.get("STROP_TEST_IMAGE", IMAGE)
    # Workers of one run must not all make it.
    with (Path(tempfile.gettempdir()) / "strop-test-image.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if any(named in (one["RepoTags"] or []) for one in engine.api.images()):
            return named
        if "STROP_TEST_IMAGE" in os.environ:
            pytest.skip(f"the engine has no image {named} (STROP_TEST_IMAGE)")
        if not shutil.which("debootstrap") or os.getuid() != 0:
            pytest.skip(f"no image {named}, STROP_TEST_IMAGE names none, and debootstrap (as root) is not here")
        with tempfile.TemporaryDirectory() as root:
            made = ["debootstrap", "--variant=minbase", "--include=python3-minimal", "stable", root]
            done = subprocess.run(made, capture_output=True, text=True)
            if done.returncode:
                pytest.skip(f"debootstrap could not make an image: {done.stdout[-300:]}")
            with subprocess.Popen(["tar", "-C", root, "-c", "."], stdout=subprocess.PIPE) as tar:
                name, _, tag = named.partition(":")
                engine.slow_api.import_image_from_data(tar.stdout, repository=name, tag=tag)
    return named


@pytest.fixture(scope="session")
def shell_less(engine) -> Iterator[str]:
    """An image that holds one text file, this process's own."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("readme"))
    tag = f"shell-less-{os.getpid()}"
    engine.api.import_image_from_data(data.getvalue(), repository="strop-test", tag=tag)
    yield f"strop-test:{tag}"
    engine.api.remove_image(f"strop-test:{tag}", force=True)
