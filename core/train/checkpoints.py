"""Checkpoints: DIR/v000001/ in the form transformers, peft and vLLM load, written beside and renamed; DIR/latest.

A version is the number of updates its weights have seen. `latest` is a symbolic link, moved by a rename, so that a
reader sees the old weights or the new ones and never half of either.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from dataclasses import asdict, dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import DataError, OutputFailed, Unavailable
from strop.core.records import CheckpointInfo

if TYPE_CHECKING:
    from collections.abc import Callable

NAME = re.compile(r"v(\d{6,})")
LATEST = "latest"
STATE_FILE, ABOUT_FILE = "optimizer.pt", "strop.json"
FORMAT = 1


@dataclass(slots=True)
class About:
    """What strop.json says of a checkpoint.

    `consumed` are the groups (or examples) that the run has used so far, `done` whether the run came to the end of its
    input; `options` are those of the run, compared when it is resumed. `lora_rank` is null for full parameters.
    """

    version: int
    base: str
    base_revision: str
    sha256: str = ""
    lora_rank: int | None = None
    start_version: int = 0
    done: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    consumed: list[str] = field(default_factory=list)
    strop: str = ""
    format: int = FORMAT


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint on disk."""

    path: Path
    about: About

    def optimizer_state(self) -> dict[str, Any] | None:
        """The optimiser's state as `Trainer.state` gave it, or None if the folder has none. Raises DataError."""
        import torch

        file = self.path / STATE_FILE
        if not file.exists():
            return None
        try:
            return torch.load(file, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 (pickle and zip fail in many ways, all mean a damaged file)
            raise DataError(f"{file}: not an optimiser state ({error})") from None

    @property
    def info(self) -> CheckpointInfo:
        """The fields of a checkpoint record."""
        about = self.about
        return CheckpointInfo(path=str(self.path), version=about.version, base=about.base, sha256=about.sha256)


def find_checkpoint(folder: Path) -> Checkpoint | None:
    """The latest checkpoint of a `train --out` folder, or the checkpoint that `folder` itself is; None if neither."""
    for path in (folder / LATEST, folder):
        if (path / ABOUT_FILE).exists():
            return read_checkpoint(path.resolve() if path.is_symlink() else path)
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this folder. Raises DataError if its strop.json is no such thing."""
    try:
        values = json.loads((path / ABOUT_FILE).read_text("utf-8"))
        about = About(**{name: values[name] for name in About.__slots__ if name in values})
    except (OSError, ValueError, TypeError) as error:
        raise DataError(f"{path / ABOUT_FILE}: {error}") from None
    if about.format != FORMAT:
        raise Unavailable(f"{path}: written by another strop (format {about.format}, this one reads {FORMAT})")
    return Checkpoint(path, about)


def write_checkpoint(
    folder: Path, about: About, state: dict[str, Any] | None, save_weights: Callable[[Path], None]
) -> Checkpoint:
    """Writes DIR/vNNNNNN with the weights that `save_weights` puts into a folder, then moves `latest` to it.

    Fills in the sha256. A checkpoint of the same version is replaced. Raises OutputFailed.
    """
    import torch

    target = folder / f"v{about.version:06d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=folder))
        try:
            save_weights(temporary)
            about.sha256 = weights_digest(temporary)
            if state is not None:
                torch.save(state, temporary / STATE_FILE)
            (temporary / ABOUT_FILE).write_text(json.dumps(asdict(about), indent=1) + "\n", "utf-8")
            _publish(temporary, target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        point_latest(folder, target.name)
    except OSError as error:
        raise OutputFailed(f"{error.filename or target}: {error.strerror or error}") from None
    return Checkpoint(target, about)


def rewrite_about(checkpoint: Checkpoint) -> None:
    """Writes strop.json of a checkpoint again, by a rename: its weights stand, what is said of the run has changed."""
    part = checkpoint.path / f".{ABOUT_FILE}.part"
    try:
        part.write_text(json.dumps(asdict(checkpoint.about), indent=1) + "\n", "utf-8")
        part.replace(checkpoint.path / ABOUT_FILE)
    except OSError as error:
        raise OutputFailed(f"{error.filename or part}: {error.strerror}") from None


def _publish(temporary: Path, target: Path) -> None:
    umask = os.umask(0)
    os.umask(umask)
    # mkdtemp and safetensors make private files; give them the modes that ordinary writes would have.
    temporary.chmod(0o777 & ~umask)
    for file in temporary.rglob("*"):
        if file.is_file():
            file.chmod(0o666 & ~umask)
            with file.open("rb") as stream:
                os.fsync(stream.fileno())
    if target.exists():
        old = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".old", dir=target.parent))
        target.replace(old)
        temporary.rename(target)
        shutil.rmtree(old)
    else:
        temporary.rename(target)


def point_latest(folder: Path, name: str) -> None:
    """Moves DIR/latest to `name` by a rename."""
    link = folder / f".{LATEST}.{os.getpid()}.part"
    link.unlink(missing_ok=True)
    link.symlink_to(name)
    link.replace(folder / LATEST)


def remove_leftovers(folder: Path) -> None:
    """What killed runs left half-written."""
    for path in folder.glob(".v*.part"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(".v*.old"):
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{LATEST}.*.part"):
        path.unlink(missing_ok=True)


def keep_newest(folder: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints (0 keeps all); never the one that `latest` points to."""
    versions = sorted((path for path in folder.iterdir() if NAME.fullmatch(path.name)), key=lambda path: path.name)
    current = (folder / LATEST).resolve().name
    for path in versions[: len(versions) - keep] if keep else []:
        if path.name != current:
            shutil.rmtree(path)


def weights_digest(folder: Path) -> str:
    """sha256 over the weight files, in order of their names."""
    digest = sha256()
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
