"""Models by name: folders, hub ids, files; what is missing is said, and a revision follows the content."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from strop.core.errors import DataError, Unavailable, UsageError
from strop.core.models import load
from strop.core.models.load import context_length, load_model, resolve_model


def test_a_folder_has_the_revision_of_its_content(tiny_model, tmp_path):
    model = resolve_model(str(tiny_model))
    assert (model.path, model.name) == (tiny_model, str(tiny_model))
    copy = tmp_path / "elsewhere"
    shutil.copytree(tiny_model, copy)
    assert resolve_model(str(copy)).revision == model.revision
    weights = bytearray((copy / "model.safetensors").read_bytes())
    weights[-1] ^= 1
    (copy / "model.safetensors").write_bytes(weights)
    assert resolve_model(str(copy)).revision != model.revision


def test_the_out_folder_of_a_training_is_its_latest_checkpoint(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "v000003")
    (tmp_path / "latest").symlink_to("v000003")
    assert resolve_model(str(tmp_path)).path == tmp_path / "v000003"


@pytest.mark.parametrize("name", ["./no/such/folder", "/no/such", "nothing", "missing.gguf", "a/b/c"])
def test_no_such_model(name):
    with pytest.raises(Unavailable, match="no such model folder"):
        resolve_model(name)


def test_a_hub_id_offline_and_not_cached(tmp_path):
    """In a process of its own, whose hub cache is empty: nothing is asked of the network."""
    code = "from strop.core.models.load import resolve_model; resolve_model('some-owner/some-model', offline=True)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "HF_HOME": str(tmp_path)}
    )
    assert "Unavailable: some-owner/some-model: no such folder" in done.stderr
    assert "--offline was given" in done.stderr


def test_a_hub_id_from_the_cache_has_the_commit_as_its_revision(tiny_model, tmp_path):
    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / "models--some-owner--some-model"
    shutil.copytree(tiny_model, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    code = (
        "from strop.core.models.load import *\n"
        "for name in ('some-owner/some-model', 'some-owner/some-model@main'):\n"
        "    model = resolve_model(name, offline=True)\n"
        "    print(model.revision, model.name, load_tokenizer(model).vocab_size)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={**os.environ, "HF_HOME": str(tmp_path)}
    )
    assert done.stdout.splitlines() == [
        f"{commit} some-owner/some-model 49152", f"{commit} some-owner/some-model@main 49152"
    ], done.stderr  # fmt: skip


def test_folders_that_are_no_models(tmp_path):
    with pytest.raises(Unavailable, match=r"has a config\.json"):
        resolve_model(str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(Unavailable, match=r"this is an adapter.*--adapter"):
        resolve_model(str(tmp_path))


def test_a_file_that_is_no_model(tmp_path):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(DataError, match=r"a folder, a hub id or a \.gguf file"):
        resolve_model(str(tmp_path / "weights.bin"))


def test_a_folder_without_weights(tiny_model, tmp_path):
    shutil.copy(tiny_model / "config.json", tmp_path)
    with pytest.raises(Unavailable, match="without weights"):
        load_model(resolve_model(str(tmp_path)), device="cpu")


def test_weights_that_do_not_load(tiny_model, tmp_path):
    shutil.copy(tiny_model / "config.json", tmp_path)
    (tmp_path / "model.safetensors").write_bytes((tiny_model / "model.safetensors").read_bytes()[:-1000])
    with pytest.raises(Unavailable, match="cannot load"):
        load_model(resolve_model(str(tmp_path)), device="cpu")


def test_an_architecture_that_is_not_known(tiny_model, tmp_path):
    shutil.copytree(tiny_model, tmp_path / "m")
    config = json.loads((tiny_model / "config.json").read_text())
    (tmp_path / "m" / "config.json").write_text(json.dumps(config | {"model_type": "no-such-thing"}))
    with pytest.raises(Unavailable, match="cannot load"):
        load_model(resolve_model(str(tmp_path / "m")), device="cpu")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_loaded_model_is_what_was_asked_for(tiny_model, dtype):
    model = load_model(resolve_model(str(tiny_model)), device="cpu", dtype=dtype)
    assert str(model.dtype) == f"torch.{dtype}"
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_auto_takes_bfloat16_where_the_machine_has_it(monkeypatch):
    monkeypatch.setattr(load, "cpu_has_bfloat16", lambda: False)
    assert load.choose_dtype("auto", "cpu") == "float32"
    monkeypatch.setattr(load, "cpu_has_bfloat16", lambda: True)
    assert load.choose_dtype("auto", "cpu") == "bfloat16"
    assert load.choose_dtype("auto", "cuda") == load.choose_dtype("auto", "cuda:1") == "bfloat16"
    assert load.choose_dtype("float16", "cpu") == "float16"
    with pytest.raises(UsageError, match="--dtype fp8"):
        load.choose_dtype("fp8", "cpu")


def test_a_gpu_that_is_not_there(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert load.choose_device("auto") == "cpu"
    with pytest.raises(Unavailable, match="no CUDA device"):
        load.choose_device("cuda")


def test_too_little_memory_is_said_before_it_is_taken(tiny_model, monkeypatch, caplog):
    model = resolve_model(str(tiny_model))
    monkeypatch.setattr("strop.core.models.memory.available_bytes", lambda: 100_000)
    with pytest.raises(Unavailable, match=r"in float32 \(1M weights\) needs about .* are free"):
        load_model(model, device="cpu", dtype="float32")
    monkeypatch.setattr("strop.core.models.memory.available_bytes", lambda: 1 << 33)
    with caplog.at_level("INFO", logger="strop.models"):
        load_model(model, device="cpu", dtype="float32")
    assert "needs about 0.0 GiB of 8.0 GiB free" in caplog.text
    assert "on cpu in float32" in caplog.text


def test_available_memory_is_a_sensible_number():
    from strop.core.models.memory import available_bytes

    found = available_bytes()
    assert found is None or 1 << 20 < found < 1 << 50


def test_the_context_is_the_models_own_or_less(tiny_model, tmp_path):
    model = resolve_model(str(tiny_model))
    assert context_length(model) == 512
    assert context_length(model, 100) == 100
    with pytest.raises(UsageError, match=r"--max-context 513.* 512"):
        context_length(model, 513)
    (tmp_path / "config.json").write_text('{"model_type": "x", "text_config": {"n_positions": 77}}')
    assert context_length(resolve_model(str(tmp_path))) == 77


def test_weights_are_counted_from_headers(smol):
    assert load.count_weights(load.weight_files(smol)) == 134_515_008
