"""What an engine must know of a LoRA adapter (peft form) before it can be sure that it runs it. Needs no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

from strop.core.errors import DataError, Unavailable

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
# What architectures call their output matrix.
OUTPUT_NAMES = {"lm_head", "embed_out"}


@dataclass(frozen=True, slots=True)
class Lora:
    """An adapter folder: its largest rank, a hash of its content, and whether it changes its base at all.

    A fresh adapter's B matrices are zero: its output is its base's, and no comparison can tell them apart.
    `has_output`: a part of it belongs to the output matrix.
    """

    folder: Path
    rank: int
    digest: str
    changes_base: bool
    has_output: bool


def read_lora(folder: Path) -> Lora:
    """Reads the facts of the adapter in `folder`. Raises Unavailable if there is none, DataError for a broken one."""
    config, weights = folder / CONFIG, folder / WEIGHTS
    for file in (config, weights):
        if not file.exists():
            raise Unavailable(f"{folder}: not a LoRA adapter in peft form (no {file.name})")
    try:
        said = json.loads(config.read_text(encoding="utf-8"))
        rank = max([int(said["r"]), *map(int, (said.get("rank_pattern") or {}).values())])
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{config}: no LoRA rank to be read: {error}") from None
    digest = blake2b(digest_size=8)
    for file in (config, weights):
        digest.update(file.read_bytes())
    has_output = any(not OUTPUT_NAMES.isdisjoint(name.split(".")) for name in _tensors(weights))
    return Lora(folder, rank, digest.hexdigest(), _has_nonzero_b(weights), has_output)


def _tensors(weights: Path) -> dict[str, Any]:
    """The names of the tensors with where they lie, in bytes of the file (safetensors: header length, header, data)."""
    try:
        with weights.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            return {
                name: [8 + length + offset for offset in entry["data_offsets"]]
                for name, entry in header.items()
                if name != "__metadata__"
            }
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, MemoryError) as error:
        raise DataError(f"{weights}: not a safetensors file: {error}") from None


def _has_nonzero_b(weights: Path) -> bool:
    """Whether any lora_B tensor holds a bit that is set."""
    with weights.open("rb") as file:
        for name, (start, end) in _tensors(weights).items():
            if "lora_B" in name or "lora_embedding_B" in name:
                file.seek(start)
                data = file.read(end - start)
                if data.count(0) != len(data):
                    return True
    return False
