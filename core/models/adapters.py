"""LoRA adapters in peft form: found, checked against their base, and put on it.

Users ran base models for days because an adapter was taken and ignored; so each tensor of the file must find its place
on the model, and each place on the model its tensor.
"""

from __future__ import annotations

import json
import warnings
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.engines.protocol import ModelInfo
from strop.core.errors import DataError, Unavailable, UsageError, missing_extra
from strop.core.models.memory import log

if TYPE_CHECKING:
    from strop.core.models.load import ModelPath

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
LATEST, CHECKPOINT = "latest", "strop.json"
NAMED_AT_MOST = 3


def resolve_adapter(name: str | Path) -> Path:
    """The adapter folder: `name` itself, or what `latest` in a `train --out` folder points to. Raises Unavailable."""
    path = Path(name).expanduser()
    for folder in (path, path / LATEST):
        if (folder / CONFIG).exists():
            if not (folder / WEIGHTS).exists():
                raise Unavailable(f"{folder}: an adapter without weights ({WEIGHTS})")
            return folder.resolve()
    if not path.exists():
        raise Unavailable(f"{path}: no such adapter folder")
    if (path / "config.json").exists() or (path / LATEST / "config.json").exists():
        raise Unavailable(f"{path}: this is a whole model, not an adapter: give it as --model")
    raise Unavailable(f"{path}: no adapter ({CONFIG}) and no `{LATEST}` checkpoint in it")


def adapter_revision(adapter: Path) -> str:
    """12 hex digits over the adapter's config and weights."""
    digest = blake2b(digest_size=6)
    for name in (CONFIG, WEIGHTS):
        digest.update((adapter / name).read_bytes())
    return digest.hexdigest()


def checkpoint_version(folder: Path) -> int | None:
    """How many updates the weights of a checkpoint of `train` have seen; None for a folder that is none."""
    return _read_json(folder / CHECKPOINT).get("version")


def model_info(model: ModelPath, adapter: Path | None, name: str | None) -> ModelInfo:
    """What rollouts say of the policy; the adapter as the user named it, with @ and a hash of its content."""
    if adapter is None:
        return ModelInfo(model.name, model.revision, None, checkpoint_version(model.path))
    label = f"{name or adapter}@{adapter_revision(adapter)}"
    return ModelInfo(model.name, model.revision, label, checkpoint_version(adapter))


def check_base(adapter: Path, model: ModelPath) -> None:
    """Raises UsageError where a checkpoint of `train` says that it was trained on other weights than `model`'s."""
    said = _read_json(adapter / CHECKPOINT)
    if said.get("base_revision") not in (None, model.revision):
        raise UsageError(
            f"{adapter}: this adapter was trained on {said.get('base')} (revision {said['base_revision']}), "
            f"and {model.name} is another model (revision {model.revision})"
        )


def apply_adapter(model: Any, adapter: Path) -> Any:
    """The model with the adapter on it, in eval mode, beside the base's weights (see `merge_adapter`).

    Raises Unavailable where a tensor of the file finds no place on the model, or a place no tensor, or shapes differ.
    """
    try:
        from peft import PeftModel
    except ImportError:
        raise missing_extra("peft", "model") from None
    log.info("putting the adapter %s on its base", adapter)
    try:
        with warnings.catch_warnings():
            # Missing tensors, among others: `check_loaded` refuses them.
            warnings.simplefilter("ignore", UserWarning)
            loaded = PeftModel.from_pretrained(model, str(adapter), is_trainable=False)
    except (ValueError, RuntimeError, OSError, KeyError, TypeError) as error:
        raise Unavailable(f"{adapter}: the adapter does not fit this model: {_shortened(error)}") from None
    check_loaded(loaded, adapter)
    return loaded.eval()


def check_loaded(model: Any, adapter: Path) -> None:
    """Raises Unavailable unless the peft model holds just the tensors of the adapter's file, bit for bit."""
    from peft import get_peft_model_state_dict
    from safetensors import safe_open

    # "auto" would ask the hub whether the base's vocabulary is the original one.
    placed = get_peft_model_state_dict(model, save_embedding_layers=False)
    with safe_open(str(adapter / WEIGHTS), "pt") as file:
        names = set(file.keys())
        homeless, empty = sorted(names - placed.keys()), sorted(placed.keys() - names)
        if homeless:
            raise Unavailable(f"{adapter}: {len(homeless)} tensors find no place on this model: {_some(homeless)}")
        if empty:
            raise Unavailable(f"{adapter}: {len(empty)} tensors are missing: {_some(empty)}")
        for name in sorted(names):
            there = placed[name].detach().cpu()
            if not there.equal(file.get_tensor(name).to(there.dtype)):
                raise Unavailable(f"{adapter}: the tensor {name} was not taken over")


def merge_adapter(model: Any) -> Any:
    """For generation: a float32 model with the update added to its weights, which saves two products a layer.

    A bfloat16 model is returned as it came: its weights would lose updates below 1/256 of themselves.
    """
    import torch

    base = model.get_base_model()
    if base.get_input_embeddings().weight.dtype not in (torch.float32, torch.float64):
        return model
    return model.merge_and_unload().eval()


def _shortened(error: Exception) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__


def _some(names: list[str]) -> str:
    return ", ".join(names[:NAMED_AT_MOST]) + (", ..." if len(names) > NAMED_AT_MOST else "")


def _read_json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except OSError:
        return {}
    except ValueError as error:
        raise DataError(f"{file}: {error}") from None
    return found if isinstance(found, dict) else {}
