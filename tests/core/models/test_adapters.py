"""Adapters: none is ever taken and ignored."""

import json
import shutil

import pytest

from strop.core.errors import DataError, Unavailable, UsageError
from strop.core.models.adapters import apply_adapter, check_base, merge_adapter, model_info, resolve_adapter
from strop.core.models.load import ModelPath, load_model, resolve_model

IDS = [[5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def adapter(tiny_model, tmp_path_factory):
    """A LoRA folder whose update is not zero."""
    import torch
    from peft import LoraConfig, get_peft_model

    folder = tmp_path_factory.mktemp("adapter")
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = get_peft_model(loaded(tiny_model), config)
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    model.save_pretrained(folder)
    return folder


@pytest.fixture
def changed(adapter, tmp_path):
    """Makes a copy of the adapter whose tensors went through a function."""

    def make(change, **config):
        from safetensors.torch import load_file, save_file

        folder = tmp_path / "changed"
        shutil.copytree(adapter, folder)
        save_file(change(load_file(folder / "adapter_model.safetensors")), folder / "adapter_model.safetensors")
        said = json.loads((folder / "adapter_config.json").read_text())
        (folder / "adapter_config.json").write_text(json.dumps(said | config))
        return folder

    return make


def loaded(folder, dtype="float32"):
    return load_model(resolve_model(str(folder)), device="cpu", dtype=dtype)


def logits(model):
    import torch

    with torch.inference_mode():
        return model(torch.tensor(IDS)).logits.float()


def test_an_adapter_changes_the_model_as_peft_does(tiny_model, adapter):
    import torch
    from peft import PeftModel

    ours = logits(apply_adapter(loaded(tiny_model), adapter))
    assert torch.equal(ours, logits(PeftModel.from_pretrained(loaded(tiny_model), adapter)))
    assert (ours - logits(loaded(tiny_model))).abs().max() > 0.1


def test_merging_changes_nothing_but_rounding(tiny_model, adapter):
    import torch

    beside = apply_adapter(loaded(tiny_model), adapter)
    before = logits(beside)
    merged = merge_adapter(beside)
    assert not hasattr(merged, "get_base_model")
    assert torch.allclose(logits(merged), before, atol=1e-5)


def test_a_bfloat16_model_keeps_its_adapter_beside_it(tiny_model, adapter):
    """Merged, an update below 1/256 of a weight would vanish."""
    model = apply_adapter(loaded(tiny_model, "bfloat16"), adapter)
    assert merge_adapter(model) is model


def test_a_tensor_too_many_is_not_dropped(tiny_model, changed):
    odd = "base_model.model.model.layers.0.mlp.odd_proj.lora_A.weight"
    folder = changed(lambda t: t | {odd: next(iter(t.values())).clone()})
    with pytest.raises(Unavailable, match=r"1 tensors find no place.*odd_proj"):
        apply_adapter(loaded(tiny_model), folder)


def test_a_tensor_too_few_is_not_made_up(tiny_model, changed):
    folder = changed(lambda t: dict(list(t.items())[1:]))
    with pytest.raises(Unavailable, match=r"1 tensors are missing"):
        apply_adapter(loaded(tiny_model), folder)


def test_other_key_names_are_not_ignored(tiny_model, changed):
    """Keys of another framework: peft itself only warns and goes on with the base."""
    folder = changed(lambda t: {name.replace("base_model.model.model", "transformer.h"): x for name, x in t.items()})
    with pytest.raises(Unavailable, match="find no place"):
        apply_adapter(loaded(tiny_model), folder)


def test_a_rank_that_is_not_that_of_the_tensors(tiny_model, changed):
    with pytest.raises(Unavailable, match="does not fit"):
        apply_adapter(loaded(tiny_model), changed(lambda t: t, r=8))


def test_modules_that_the_model_lacks(tiny_model, changed):
    with pytest.raises(Unavailable, match="does not fit"):
        apply_adapter(loaded(tiny_model), changed(lambda t: t, target_modules=["no_such_module"]))


def test_a_base_of_another_width(adapter, tmp_path, tiny_model):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig.from_pretrained(tiny_model)
    config.hidden_size = 32
    config.head_dim = 8
    with pytest.raises(Unavailable, match="does not fit"):
        apply_adapter(LlamaForCausalLM(config), adapter)


def test_the_latest_checkpoint_of_a_training(adapter, tmp_path):
    shutil.copytree(adapter, tmp_path / "v000002")
    (tmp_path / "latest").symlink_to("v000002")
    assert resolve_adapter(tmp_path) == (tmp_path / "v000002").resolve()
    assert resolve_adapter(adapter) == adapter.resolve()


def test_folders_that_are_no_adapters(tmp_path, tiny_model, adapter):
    with pytest.raises(Unavailable, match="no such adapter"):
        resolve_adapter(tmp_path / "nothing")
    with pytest.raises(Unavailable, match="no adapter"):
        resolve_adapter(tmp_path)
    with pytest.raises(Unavailable, match=r"a whole model.*--model"):
        resolve_adapter(tiny_model)
    shutil.copy(adapter / "adapter_config.json", tmp_path)
    with pytest.raises(Unavailable, match="without weights"):
        resolve_adapter(tmp_path)


def test_a_checkpoint_knows_its_base(adapter, tmp_path, tiny_model):
    folder = tmp_path / "v000007"
    shutil.copytree(adapter, folder)
    model = resolve_model(str(tiny_model))
    about = {"version": 7, "base": "tiny", "base_revision": model.revision}
    (folder / "strop.json").write_text(json.dumps(about))
    check_base(folder, model)
    info = model_info(model, folder, "runs/1")
    assert (info.version, info.revision) == (7, model.revision)
    assert info.adapter.startswith("runs/1@")
    with pytest.raises(UsageError, match=r"trained on tiny .* another model"):
        check_base(folder, ModelPath(model.path, "0" * 16, "elsewhere"))
    (folder / "strop.json").write_text("{")
    with pytest.raises(DataError, match=r"strop\.json"):
        check_base(folder, model)


def test_an_adapter_is_named_with_its_content(adapter, changed, tiny_model):
    model = resolve_model(str(tiny_model))
    one = model_info(model, adapter, "x").adapter
    other = model_info(model, changed(lambda t: {name: value * 2 for name, value in t.items()}), "x").adapter
    assert one != other
    assert model_info(model, None, None).adapter is None
