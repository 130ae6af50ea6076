"""GGUF files become ordinary model folders, once: dequantised, in the cache, under the hash of their content."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

from strop.core.errors import DataError, OutputFailed, Unavailable, missing_extra
from strop.core.models.memory import check_memory, log, quiet_transformers

# Part of the folder's name: a later converter that writes something else must not find the old folder.
CONVERTER = 2
# Loading unpacks to float32 and then keeps a bfloat16 copy.
PEAK_BYTES_PER_WEIGHT = 6
STAMP = "strop-gguf.json"


def convert_gguf(file: Path) -> Path:
    """The model folder of a GGUF file: from the cache, or converted into it now.

    The weights are dequantised by transformers and saved as bfloat16 (half of float32; the rounding, 2**-9 relative, is
    far below what 4 to 8 bit quantisation already did), with tokenizer, chat template and generation config. A folder
    appears whole or not at all, and of two processes one converts while the other waits. Raises DataError for a file
    that is no GGUF, Unavailable where memory, a package or support for the architecture is missing.
    """
    revision = content_hash(file)
    target = cache_folder() / f"{file.stem}-{revision}-v{CONVERTER}"
    if (target / STAMP).exists():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / f".{target.name}.lock"):
            if not (target / STAMP).exists():
                _convert_into(file, revision, target)
    except OSError as error:
        raise OutputFailed(f"{error.filename or target}: {error.strerror}") from None
    return target


def cache_folder() -> Path:
    """Where converted models are kept: $XDG_CACHE_HOME/strop/models, or ~/.cache/strop/models."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strop" / "models"


def content_hash(file: Path) -> str:
    """16 hex digits of BLAKE2b over the file's bytes."""
    digest = blake2b(digest_size=8)
    with file.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """An exclusive lock that a killed process lets go of by dying."""
    import fcntl

    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _convert_into(file: Path, revision: str, target: Path) -> None:
    prefix = f".{target.name}.part-"
    for leftover in target.parent.glob(f"{prefix}*"):
        # We hold the lock, so whoever made this was killed.
        shutil.rmtree(leftover, ignore_errors=True)
    num_weights = _count_weights(file)
    check_memory(num_weights * PEAK_BYTES_PER_WEIGHT, f"converting {file.name} ({num_weights / 1e6:.0f}M weights)")
    part = Path(tempfile.mkdtemp(prefix=prefix, dir=target.parent))
    try:
        log.info("converting %s into %s; this is done once", file, target)
        _write_folder(file, part)
        stamp = {"source": file.name, "revision": revision, "converter": CONVERTER}
        (part / STAMP).write_text(json.dumps(stamp) + "\n", encoding="utf-8")
        part.chmod(0o755)
        part.rename(target)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _count_weights(file: Path) -> int:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise missing_extra("gguf", "model") from None
    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(str(file)).tensors)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise DataError(f"{file}: not a readable GGUF file ({error})") from None


def _write_folder(file: Path, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quiet_transformers()
    source: dict[str, Any] = {"gguf_file": file.name, "local_files_only": True}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **source)
        model = AutoModelForCausalLM.from_pretrained(
            str(file.parent), dtype=torch.float32, **_dequantised(), **source
        )
    except (ValueError, KeyError, NotImplementedError, RuntimeError) as error:
        raise Unavailable(f"{file}: transformers cannot convert this GGUF file: {error}") from None
    plain = _without_quantiser(model).to(torch.bfloat16)
    plain.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    for saved in folder.iterdir():
        # safetensors makes private files; a cache may be shared.
        saved.chmod(0o644)


def _dequantised() -> dict[str, Any]:
    """From 5.16 on transformers would keep the blocks packed where it has a kernel for them."""
    try:
        from transformers import GgufConfig
    except ImportError:
        return {}
    return {"quantization_config": GgufConfig(dequantize=True)}


def _without_quantiser(model: Any) -> Any:
    """The same weights in a model that knows nothing of GGUF, since a quantised one refuses to be saved."""
    import copy

    import torch

    config = copy.deepcopy(model.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with torch.device("meta"):
        plain = type(model)(config)
    plain.load_state_dict(model.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
