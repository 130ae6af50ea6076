"""The critic: a model of its own with a scalar head that says what reward a state still promises (T1, section 2.3).

It is trained on the returns that `advantage --gae` wrote beside the tokens, and held near the values it gave before
(V_old, the `values` in the records, made before this update):

    loss = mean over tokens of max((V - R)^2, (V_clip - R)^2),   V_clip = V_old + clip(V - V_old, -eps, eps)

The value of a sampled token is that of the state before it. The head starts at zero, so that a new critic promises
nothing and the first advantages are the rewards themselves (our choice: the paper is silent).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.models.packed import hidden_states, packed_attention, probe
from strop.core.models.packing import pack

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from strop.core.train.examples import Example, TrainSequence

HEAD_FILE = "value_head.safetensors"
# T1's learning rates: 1.5e-5 for the critic, 1e-6 for the actor (its text says 30 times, its tables make it 15).
RATE_RATIO = 15.0
VALUE_CLIP = 0.2


@dataclass(frozen=True, slots=True)
class CriticOptions:
    """`lr` and AdamW's surroundings are T1's (0.9, 0.98, 0.1); `value_clip` eps_v, 0 for none."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.98)
    weight_decay: float = 0.1
    value_clip: float = VALUE_CLIP
    max_grad_norm: float = 1.0
    pack_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class CriticReport:
    """One update in figures. `explained_variance` is that of the values before it, over all tokens together."""

    loss: float
    explained_variance: float | None
    value_mean: float
    clip_share: float
    grad_norm: float
    seconds: float


def value_losses(value_T: Tensor, old_T: Tensor, return_T: Tensor, clip: float) -> tuple[Tensor, Tensor]:
    """The loss of each token, and whether the clip stops its gradient. `clip` 0: the plain square."""
    import torch

    plain_T = (value_T - return_T).square()
    if not clip:
        return plain_T, torch.zeros_like(plain_T, dtype=torch.bool)
    held_T = old_T + (value_T - old_T).clamp(-clip, clip)
    held_loss_T = (held_T - return_T).square()
    stopped_T = (held_loss_T >= plain_T) & ((value_T - old_T).abs() > clip)
    return torch.maximum(plain_T, held_loss_T), stopped_T


class Critic:
    """A causal model and a linear head [hidden -> 1]; values come from the hidden state before each sampled token."""

    def __init__(self, model: Any, head: Any = None) -> None:
        import torch

        self.model = model
        self.can_pack = probe(model)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        embedding = base.get_input_embeddings().weight
        output = base.get_output_embeddings()
        if output is not None and output.weight is not embedding:
            # No value goes through it.
            output.requires_grad_(False)
        # Never narrower than float32: a value's last digits are the advantage's first.
        wide = torch.float64 if embedding.dtype == torch.float64 else torch.float32
        self.head = torch.nn.Linear(base.config.get_text_config().hidden_size, 1, device=embedding.device, dtype=wide)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        if head is not None:
            self.head.load_state_dict(head)
        model.eval()

    def trainable(self) -> list[tuple[str, Any]]:
        """Names and parameters that move: the model's own that ask for it, and the head."""
        own = [(name, parameter) for name, parameter in self.model.named_parameters() if parameter.requires_grad]
        return [*own, *((f"value_head.{name}", parameter) for name, parameter in self.head.named_parameters())]

    def values(self, sequences: list[TrainSequence]) -> Tensor:
        """The value [T] of the state before each trained position of the sequences, in order."""
        rows: list[int] = []
        start = 0
        fed = [one.token_ids[: one.positions[-1]] for one in sequences]
        for one, ids in zip(sequences, fed, strict=True):
            rows.extend(start + position - 1 for position in one.positions)
            start += len(ids)
        with packed_attention(self.model):
            hidden = hidden_states(self.model, fed)
        return self.head(hidden[rows].to(self.head.weight.dtype)).squeeze(-1)  # type: ignore[no-any-return]

    def value_lists(self, sequences: list[TrainSequence], pack_tokens: int = 2048) -> list[list[float]]:
        """The values of each sequence's positions, without a gradient."""
        import torch

        found: list[list[float]] = [[] for _ in sequences]
        lengths = [one.positions[-1] for one in sequences]
        with torch.inference_mode():
            for indices in pack(lengths, pack_tokens if self.can_pack else 1):
                values = self.values([sequences[i] for i in indices]).tolist()
                for i in indices:
                    num = len(sequences[i].positions)
                    found[i], values = values[:num], values[num:]
        return found

    def save_head(self, folder: Path) -> None:
        """Writes the head beside the model's weights."""
        from safetensors.torch import save_file

        save_file({name: tensor.detach().cpu() for name, tensor in self.head.state_dict().items()}, folder / HEAD_FILE)


class CriticTrainer:
    """Holds the critic's optimiser and makes its updates."""

    def __init__(self, critic: Critic, options: CriticOptions) -> None:
        import torch

        self.critic = critic
        self.options = options
        self._parameters = [parameter for _, parameter in critic.trainable()]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=options.lr, betas=options.betas, weight_decay=options.weight_decay
        )

    def update(self, examples: list[Example], on_pack: Callable[[int], None] = lambda _: None) -> CriticReport:
        """One update on all tokens of the batch, each with weight 1 / tokens, the same however they are packed.

        Raises ValueError for an empty batch, RuntimeError for a gradient that is not finite (nothing is applied then).
        """
        import torch

        started = time.monotonic()
        sequences = [sequence for one in examples for sequence in one.sequences]
        total = sum(len(one.positions) for one in sequences)
        if not total:
            raise ValueError("an update of the critic needs at least one token")
        lengths = [one.positions[-1] for one in sequences]
        loss = clipped = values = 0.0
        for indices in pack(lengths, self.options.pack_tokens if self.critic.can_pack else 1):
            part = [sequences[i] for i in indices]
            value_T = self.critic.values(part)
            old_T = value_T.new_tensor([value for one in part for value in one.values])
            return_T = value_T.new_tensor([value for one in part for value in one.returns])
            loss_T, stopped_T = value_losses(value_T, old_T, return_T, self.options.value_clip)
            torch.autograd.backward(loss_T.sum() / total)
            loss += float(loss_T.detach().sum()) / total
            clipped += float(stopped_T.sum()) / total
            values += float(value_T.detach().sum()) / total
            on_pack(sum(lengths[i] for i in indices))
        norm = torch.nn.utils.clip_grad_norm_(
            self._parameters, self.options.max_grad_norm or float("inf"), error_if_nonfinite=True
        )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        seconds = time.monotonic() - started
        return CriticReport(loss, explained_variance(sequences), values, clipped, float(norm), seconds)

    def state(self) -> dict[str, Any]:
        """The optimiser's state by parameter name, on the CPU."""
        names = [name for name, _ in self.critic.trainable()]
        inner = self.optimizer.state_dict()["state"]
        return {names[i]: {k: v.cpu() if hasattr(v, "cpu") else v for k, v in one.items()} for i, one in inner.items()}

    def load_state(self, saved: dict[str, Any]) -> None:
        """Continues from `state()`. Raises ValueError where it is of another critic."""
        names = [name for name, _ in self.critic.trainable()]
        if missing := [name for name in names if saved and name not in saved]:
            raise ValueError(f"the saved optimiser of the critic knows nothing of {missing[0]}")
        inner = self.optimizer.state_dict()
        inner["state"] = {i: saved[name] for i, name in enumerate(names) if name in saved}
        self.optimizer.load_state_dict(inner)


def explained_variance(sequences: list[TrainSequence]) -> float | None:
    """1 - Var[R - V_old] / Var[R] over all tokens (not a mean of parts); None where the returns do not vary."""
    import numpy as np

    return_T = np.array([value for one in sequences for value in one.returns])
    value_T = np.array([value for one in sequences for value in one.values])
    spread = float(return_T.var())
    return None if spread == 0 else 1 - float((return_T - value_T).var()) / spread
