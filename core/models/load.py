"""Models by name: a folder, a hub id or a GGUF file becomes a folder with a revision, and a folder a model."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import DataError, Unavailable, UsageError, missing_extra
from strop.core.models.gguf import STAMP, content_hash, convert_gguf
from strop.core.models.memory import check_memory, log, quiet_transformers

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")
# What architectures call the number of positions they were made for.
CONTEXT_NAMES = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")
UNLIMITED = 1 << 30
WEIGHT_PATTERNS = ("*.safetensors", "*.bin")
# A hub repository may hold the same weights in several forms; these are the ones transformers needs.
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "tokenizer*", "*.tiktoken")


@dataclass(frozen=True, slots=True)
class ModelPath:
    """A model that is here: its folder, its revision (content hash, or a hub commit), and the name the user gave."""

    path: Path
    revision: str
    name: str


def resolve_model(name: str, *, offline: bool = False) -> ModelPath:
    """Finds a model: a Hugging Face folder, a `.gguf` file (converted once into the cache), or a hub id.

    A hub id may carry a revision (`owner/model@REVISION`) and is fetched unless `offline`. Raises Unavailable where
    there is no such model, DataError for a file that is none.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise DataError(f"{name}: a model is a folder, a hub id or a .gguf file")
        folder = convert_gguf(path)
        return ModelPath(folder, _folder_revision(folder), name)
    if path.is_dir():
        if not (path / "config.json").exists():
            # The --out folder of a `train` of all parameters.
            path = (path / "latest").resolve() if (path / "latest" / "config.json").exists() else path
        if not (path / "config.json").exists():
            raise Unavailable(_no_config(path))
        return ModelPath(path, _folder_revision(path), name)
    if name.startswith((".", "/", "~")) or name.endswith(".gguf") or name.count("/") != 1:
        raise Unavailable(f"{name}: no such model folder or file, and not a hub id (owner/model)")
    return _from_hub(name, offline=offline)


def _no_config(path: Path) -> str:
    if (path / "adapter_config.json").exists() or (path / "latest" / "adapter_config.json").exists():
        return f"{path}: this is an adapter, not a model: give its base as --model and this folder as --adapter"
    return f"{path}: a model folder has a config.json, and this one has not"


def _from_hub(name: str, *, offline: bool) -> ModelPath:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
    except ImportError:
        raise missing_extra("transformers", "model") from None
    repository, _, revision = name.partition("@")
    offline = offline or os.environ.get("HF_HUB_OFFLINE", "") not in ("", "0")
    try:
        folder = snapshot_download(
            repository, revision=revision or None, allow_patterns=list(HUB_PATTERNS), local_files_only=offline
        )
    except LocalEntryNotFoundError:
        why = "--offline was given" if offline else "the hub cannot be reached"
        raise Unavailable(f"{name}: no such folder, not in the cache of hub models, and {why}") from None
    except (HfHubHTTPError, ValueError, OSError) as error:
        raise Unavailable(f"{name}: no such folder, and not to be had from the hub: {_first_line(error)}") from None
    path = Path(folder)
    if not (path / "config.json").exists():
        raise Unavailable(_no_config(path))
    return ModelPath(path, path.name, name)


def _folder_revision(folder: Path) -> str:
    """16 hex digits over config and weights, so that a changed model has another revision wherever it lies."""
    stamp = folder / STAMP
    files = [folder / "config.json", *([stamp] if stamp.exists() else weight_files(folder))]
    digest = blake2b(digest_size=8)
    for file in files:
        digest.update(f"{file.name}:{content_hash(file)};".encode())
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder that hold weights, in order of their names: safetensors, else PyTorch's own."""
    for pattern in WEIGHT_PATTERNS:
        if files := sorted(file for file in folder.glob(pattern) if not file.name.startswith("adapter_")):
            return files
    return []


def choose_device(device: str) -> str:
    """ "auto" is CUDA where there is a device, else the CPU. Raises Unavailable for a GPU that is not there."""
    torch = _torch()
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise Unavailable(f"--device {device}: no CUDA device is here; --device cpu runs without one")
    return device


def choose_dtype(dtype: str, device: str) -> str:
    """ "auto" is bfloat16 on CUDA and on CPUs with bfloat16 instructions, else float32."""
    if dtype not in DTYPES:
        raise UsageError(f"--dtype {dtype}: expected one of {', '.join(DTYPES)}")
    if dtype != "auto":
        return dtype
    return "bfloat16" if device.startswith("cuda") or cpu_has_bfloat16() else "float32"


def cpu_has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16 itself; elsewhere it is emulated and slower than float32."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return False
    return any(flag in flags for flag in ("avx512_bf16", "amx_bf16", " bf16"))


def load_model(model: ModelPath, *, device: str = "auto", dtype: str = "auto", is_encoder: bool = False) -> Any:
    """The transformers model, in eval mode, on `device` in `dtype` (see choose_device, choose_dtype).

    A causal language model, or with `is_encoder` whatever the folder holds, without a head: it gives hidden states.
    Raises Unavailable where memory, weights or support for the architecture is missing.
    """
    torch = _torch()
    from safetensors import SafetensorError
    from transformers import AutoModel, AutoModelForCausalLM

    quiet_transformers()
    device = choose_device(device)
    dtype = choose_dtype(dtype, device)
    files = weight_files(model.path)
    if not files:
        raise Unavailable(f"{model.path}: a model folder without weights (*.safetensors)")
    num_weights = count_weights(files)
    if num_weights and not device.startswith("cuda"):
        width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
        check_memory(num_weights * width, f"{model.name} in {dtype} ({num_weights / 1e6:.0f}M weights)")
    log.info("loading %s on %s in %s", model.path, device, dtype)
    try:
        loaded = (AutoModel if is_encoder else AutoModelForCausalLM).from_pretrained(
            str(model.path), dtype=getattr(torch, dtype), local_files_only=True
        )
    except (ValueError, KeyError, OSError, RuntimeError, SafetensorError) as error:
        raise Unavailable(f"{model.path}: transformers cannot load this model: {_first_line(error)}") from None
    return loaded.to(device).eval().requires_grad_(False)


def count_weights(files: list[Path]) -> int:
    """Weights in safetensors files, from their headers alone; 0 where the files are of another form.

    Raises Unavailable for a damaged file.
    """
    total = 0
    for file in files:
        if file.suffix != ".safetensors":
            return 0
        with file.open("rb") as stream:
            try:
                header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
            except (ValueError, OverflowError, MemoryError):
                raise Unavailable(f"{file}: a damaged weight file (no safetensors header)") from None
        for name, entry in header.items():
            if name != "__metadata__":
                size = 1
                for length in entry["shape"]:
                    size *= length
                total += size
    return total


def context_length(model: ModelPath, wanted: int | None = None) -> int:
    """Most tokens of prompt and response together: the model's own limit, or `wanted` where that is less.

    Raises UsageError if more is wanted than the model was made for.
    """
    config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    config = config | (config.get("text_config") or {})
    limits = [config[name] for name in CONTEXT_NAMES if isinstance(config.get(name), int)]
    limit = limits[0] if limits else UNLIMITED
    if wanted is not None and wanted > limit:
        raise UsageError(f"--max-context {wanted}: {model.name} was made for {limit} tokens at most")
    return wanted or limit


def vocab_size(model: ModelPath) -> int:
    """How many token ids the model knows; its tokenizer may have fewer. Raises Unavailable where it does not say."""
    config = json.loads((model.path / "config.json").read_text(encoding="utf-8"))
    size = (config | (config.get("text_config") or {})).get("vocab_size")
    if not isinstance(size, int):
        raise Unavailable(f"{model.path}: its config.json has no vocab_size")
    return size


def load_tokenizer(model: ModelPath) -> Tokenizer:
    """The tokenizer of a model folder. Raises Unavailable for a folder without one."""
    from strop.core.models.tokens import Tokenizer

    return Tokenizer.from_folder(model.path)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _torch() -> Any:
    try:
        import torch
        import transformers  # noqa: F401
    except ImportError as error:
        raise missing_extra(error.name or "torch", "model") from None
    return torch
