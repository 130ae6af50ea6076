"""Opening and keeping a critic: it lives in the folder `critic` of a checkpoint, in the form of the policy there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import DataError, Unavailable, UsageError
from strop.core.train.checkpoints import LATEST, STATE_FILE
from strop.core.train.critic import HEAD_FILE, Critic
from strop.core.train.policy import LoraOptions, add_lora, load_lora
from strop.core.train.setup import name_for_peft, save_model

if TYPE_CHECKING:
    from strop.core.models.load import ModelPath

CRITIC = "critic"
ABOUT_FILE = "critic.json"


@dataclass(slots=True)
class OpenCritic:
    """A critic, the base it was made from, and where it came from (None: new)."""

    critic: Critic
    base: ModelPath
    start: Path | None

    def optimizer_state(self) -> dict[str, Any] | None:
        """What its optimiser knew; None for a new one. Raises DataError for a damaged file."""
        import torch

        if self.start is None or not (self.start / STATE_FILE).exists():
            return None
        try:
            return torch.load(self.start / STATE_FILE, map_location="cpu", weights_only=True)  # type: ignore[no-any-return]
        except Exception as error:  # noqa: BLE001 (pickle and zip fail in many ways, all mean a damaged file)
            raise DataError(f"{self.start / STATE_FILE}: not an optimiser state ({error})") from None

    def save(self, checkpoint: Path, state: dict[str, Any] | None) -> None:
        """Writes it into the folder `critic` of a checkpoint; `state` None leaves the optimiser out."""
        import torch

        folder = checkpoint / CRITIC
        folder.mkdir()
        save_model(self.critic.model, self.base, folder)
        self.critic.save_head(folder)
        about = {"base": self.base.name, "base_revision": self.base.revision}
        (folder / ABOUT_FILE).write_text(json.dumps(about, indent=1) + "\n", "utf-8")
        if state is not None:
            torch.save(state, folder / STATE_FILE)


def find_critic(folder: Path) -> Path | None:
    """The critic of a `train --out` folder's latest checkpoint, of a checkpoint, or `folder` itself; None if none."""
    for path in (folder / LATEST / CRITIC, folder / CRITIC, folder):
        if (path / HEAD_FILE).exists():
            return path.resolve()
    return None


def critic_base(folder: Path) -> str:
    """The name of the model that a critic was made from. Raises DataError."""
    return str(_about(folder)["base"])


def open_critic(
    base: ModelPath, start: Path | None, *, lora: LoraOptions | None, device: str, dtype: str, seed: int
) -> OpenCritic:
    """The critic in `start`, or a new one: a copy of `base` of its own, with an adapter or with all parameters moving.

    Raises UsageError for a critic of another base, Unavailable for one that does not load.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    from strop.core.models.adapters import CONFIG
    from strop.core.models.load import load_model, resolve_model

    if start is None:
        if lora is None:
            return OpenCritic(
                Critic(load_model(base, device=device, dtype="float32").requires_grad_(True)), base, None
            )
        model = add_lora(load_model(base, device=device, dtype=dtype), lora, seed=seed)
        model.active_peft_config.base_model_name_or_path = name_for_peft(base)
        return OpenCritic(Critic(model), base, None)
    said = _about(start)
    if said.get("base_revision") not in (None, base.revision):
        raise UsageError(f"{start}: this critic was made from {said.get('base')}, and {base.name} is another model")
    if (start / CONFIG).exists():
        model = load_lora(load_model(base, device=device, dtype=dtype), start)
        model.active_peft_config.base_model_name_or_path = name_for_peft(base)
    else:
        model = load_model(resolve_model(str(start), offline=True), device=device, dtype="float32").requires_grad_(True)
    try:
        head = load_file(start / HEAD_FILE)
        return OpenCritic(Critic(model, head), base, start)
    except (OSError, SafetensorError, RuntimeError) as error:
        raise Unavailable(f"{start / HEAD_FILE}: not the head of this critic: {str(error).splitlines()[0]}") from None


def _about(folder: Path) -> dict[str, Any]:
    try:
        found = json.loads((folder / ABOUT_FILE).read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{folder / ABOUT_FILE}: {error}") from None
    if not isinstance(found, dict) or "base" not in found:
        raise DataError(f"{folder / ABOUT_FILE}: does not name its base model")
    return found
