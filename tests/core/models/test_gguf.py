"""GGUF files: converted once, whole or not at all, the same each time."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from strop.core.errors import DataError, OutputFailed, Unavailable
from strop.core.models.gguf import STAMP, cache_folder, convert_gguf
from strop.core.models.load import load_model, load_tokenizer, resolve_model

CONVERT = """
import logging, sys
logging.basicConfig(level=logging.INFO, format="%(message)s")
from pathlib import Path
from strop.core.models.gguf import convert_gguf
print(convert_gguf(Path(sys.argv[1])))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache of models."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return cache_folder()


def converter(file, cache):
    return subprocess.Popen(
        [sys.executable, "-c", CONVERT, file], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parent.parent)},
    )  # fmt: skip


def contents(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_folder_is_a_model_with_tokenizer_template_and_end_tokens(tiny_gguf, cache):
    import gguf
    import torch

    model = resolve_model(str(tiny_gguf))
    assert model.path.parent == cache
    assert model.path.name.startswith("tiny.Q8_0-")
    assert model.name == str(tiny_gguf)
    tokenizer = load_tokenizer(model)
    assert tokenizer.eos_ids == {2}
    assert tokenizer.encode_prompt([{"role": "user", "content": "hi"}])[0] == 1
    assert tokenizer.decode(tokenizer.encode_prompt("hi the re")) == "hi the re"
    loaded = load_model(model, device="cpu", dtype="float32")
    # Every weight is the dequantised one, rounded to bfloat16.
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(str(tiny_gguf)).tensors}
    for name, weight in (("token_embd", loaded.model.embed_tokens.weight), ("output", loaded.lm_head.weight),
                         ("blk.0.ffn_down", loaded.model.layers[0].mlp.down_proj.weight)):  # fmt: skip
        tensor = tensors[f"{name}.weight"]
        values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
        assert torch.equal(weight, values.bfloat16().float())
    assert {str(file.stat().st_mode & 0o777) for file in model.path.iterdir()} == {str(0o644)}


def test_twice_is_equal_and_the_second_time_nothing_is_done(tiny_gguf, cache, tmp_path, monkeypatch):
    first = convert_gguf(tiny_gguf)
    before = {file: file.stat().st_mtime_ns for file in first.iterdir()}
    assert convert_gguf(tiny_gguf) == first
    assert {file: file.stat().st_mtime_ns for file in first.iterdir()} == before
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "other"))
    second = convert_gguf(tiny_gguf)
    assert second != first
    assert contents(second) == contents(first)
    assert resolve_model(str(first)).revision == resolve_model(str(second)).revision


def test_another_content_under_the_same_name_is_another_model(tiny_gguf, cache, tmp_path):
    copy = tmp_path / tiny_gguf.name
    data = bytearray(tiny_gguf.read_bytes())
    data[-1] ^= 0x3F
    copy.write_bytes(data)
    one, other = resolve_model(str(tiny_gguf)), resolve_model(str(copy))
    assert one.path != other.path
    assert one.revision != other.revision


def test_a_killed_conversion_leaves_no_half_model(tiny_gguf, cache):
    child = converter(tiny_gguf, cache)
    deadline = time.monotonic() + 120
    while not list(cache.glob(".*.part-*")) and time.monotonic() < deadline:
        assert child.poll() is None
        time.sleep(0.005)
    child.send_signal(signal.SIGKILL)
    child.communicate()
    assert list(cache.glob(".*.part-*"))
    assert not list(cache.glob("tiny*"))
    folder = convert_gguf(tiny_gguf)
    assert (folder / STAMP).exists()
    # What the killed one left is gone too.
    assert not list(cache.glob(".*.part-*"))
    assert load_tokenizer(resolve_model(str(folder))).eos_ids == {2}


def test_of_two_processes_one_converts(tiny_gguf, cache):
    children = [converter(tiny_gguf, cache) for _ in range(2)]
    outputs = [child.communicate(timeout=300) for child in children]
    assert [child.returncode for child in children] == [0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert sum(stderr.count("this is done once") for _, stderr in outputs) == 1
    assert len(list(cache.glob("tiny*"))) == 1


def test_memory_is_estimated_before_it_is_taken(tiny_gguf, cache, monkeypatch, caplog):
    with caplog.at_level("INFO", logger="strop.models"):
        monkeypatch.setattr("strop.core.models.memory.available_bytes", lambda: 1000)
        with pytest.raises(Unavailable, match=r"converting tiny\.Q8_0\.gguf .* needs about .* are free"):
            convert_gguf(tiny_gguf)
        assert not list(cache.glob("*tiny*[0-9]"))
        monkeypatch.setattr("strop.core.models.memory.available_bytes", lambda: 1 << 40)
        convert_gguf(tiny_gguf)
    assert "needs about 0.0 GiB of 1024.0 GiB free" in caplog.text


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a gguf file at all", b"GGUF\x03\0\0\0" + b"\xff" * 40])
def test_a_file_that_is_none(cache, tmp_path, content):
    file = tmp_path / "bad.gguf"
    file.write_bytes(content)
    with pytest.raises(DataError, match="not a readable GGUF"):
        convert_gguf(file)
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_an_architecture_that_is_not_known(cache, tmp_path):
    import gguf

    file = tmp_path / "odd.gguf"
    writer = gguf.GGUFWriter(file, "no-such-architecture")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Unavailable, match="cannot convert"):
        convert_gguf(file)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_cache_that_cannot_be_written(tiny_gguf, tmp_path, monkeypatch):
    tmp_path.chmod(0o500)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OutputFailed):
        convert_gguf(tiny_gguf)


def test_a_cache_that_is_a_file(tiny_gguf, tmp_path, monkeypatch):
    (tmp_path / "strop").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OutputFailed, match="strop"):
        convert_gguf(tiny_gguf)


@pytest.mark.slow
def test_the_real_file_converts_to_the_same_bytes(smol_gguf, smol, cache):
    """`smol` was converted in some earlier run, perhaps of another process; this one is fresh."""
    fresh = contents(convert_gguf(smol_gguf))
    stored = contents(Path(smol))
    assert fresh.keys() == stored.keys()
    assert [name for name in fresh if fresh[name] != stored[name]] == []
    assert json.loads(fresh["config.json"])["dtype"] == "bfloat16"
    assert "quantization_config" not in json.loads(fresh["config.json"])
