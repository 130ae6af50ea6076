"""The optimiser step: packs in, gradients added up exactly, one update out, with the figures people ask for."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.core.models.packing import pack
from strop.core.train.losses import LossOptions, kl_estimates, nsd, opsd, token_losses, token_weights

if TYPE_CHECKING:
    from strop.core.train.examples import Example, TrainSequence
    from strop.core.train.policy import Policy


@dataclass(frozen=True, slots=True)
class OptimOptions:
    """AdamW and its surroundings. `warmup` updates raise the rate linearly; `max_grad_norm` 0 never clips."""

    lr: float = 1e-5
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    warmup: int = 0
    max_grad_norm: float = 1.0
    denominator: str = "token"
    constant_tokens: int = 0
    pack_tokens: int = 2048


@dataclass(slots=True)
class Sums:
    """Sums over trained tokens of one update; the means in a report are these over their counts."""

    tokens: int = 0
    trained: int = 0
    compared: int = 0
    loss: float = 0.0
    values: dict[str, float] = field(default_factory=dict)
    gap_max: float = 0.0

    def add(self, name: str, value: float) -> None:
        """Adds to the sum of this name."""
        self.values[name] = self.values.get(name, 0.0) + value


@dataclass(frozen=True, slots=True)
class StepReport:
    """One update in figures (name -> value); means are over all trained tokens. `seconds` is for the summary only."""

    update: int
    metrics: dict[str, float]
    trained: int
    tokens: int
    seconds: float


class Trainer:
    """Holds the optimiser of a policy and makes updates.

    `updates` counts them over the life of the weights; the warm-up counts those of the optimiser.
    """

    def __init__(self, policy: Policy, loss: LossOptions, optim: OptimOptions) -> None:
        import torch

        self.policy = policy
        self.loss = loss
        self.optim = optim
        self.updates = 0
        self._first_update = 0
        self._parameters = [parameter for _, parameter in policy.trainable()]
        self.optimizer = torch.optim.AdamW(
            self._parameters, lr=optim.lr, betas=optim.betas, weight_decay=optim.weight_decay
        )

    def update(self, examples: list[Example], on_pack: Callable[[int], None] = lambda _: None) -> StepReport:
        """One update from an optimiser batch. The same whatever the packs and their order (to rounding).

        `on_pack` hears the number of tokens of each pack done. Raises ValueError for an empty batch.
        """
        started = time.monotonic()
        sums = self.accumulate(examples, on_pack)
        norm = self._clip()
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.updates += 1
        seconds = time.monotonic() - started
        metrics = _means(sums, self.loss)
        metrics.update(grad_norm=norm, lr=rate, tokens_per_s=sums.tokens / max(seconds, 1e-9))
        return StepReport(self.updates, metrics, sums.trained, sums.tokens, seconds)

    def accumulate(self, examples: list[Example], on_pack: Callable[[int], None] = lambda _: None) -> Sums:
        """Adds the gradient of the batch's loss to the parameters; returns what was seen on the way."""
        if not examples:
            raise ValueError("an update needs at least one example")
        per_example = token_weights(
            [one.num_trained for one in examples], self.optim.denominator, self.optim.constant_tokens
        )
        weighted = [
            (sequence, weight)
            for one, weight in zip(examples, per_example, strict=True)
            for sequence in one.sequences
        ]
        lengths = [sequence.num_fed for sequence, _ in weighted]
        budget = self.optim.pack_tokens if self.policy.can_pack else 1
        sums = Sums()
        for indices in pack(lengths, budget):
            self._backward([weighted[i] for i in indices], sums)
            on_pack(sum(lengths[i] for i in indices))
        return sums

    def _backward(self, part: list[tuple[TrainSequence, float]], sums: Sums) -> None:
        import torch

        options = self.loss
        batch = self.policy.pack_batch([sequence for sequence, _ in part])
        weights = torch.tensor(
            [weight for sequence, weight in part for _ in sequence.positions], dtype=torch.float64
        ).to(batch.advantages)
        reference = self.policy.reference_logprobs(batch) if options.kl_coef else None
        teacher = self.policy.teacher_softmax(batch) if options.divergence else None
        with self.policy.replaying(batch):
            entropy_grad, full = options.entropy_coef != 0, None
            if options.divergence is not None and teacher is not None:
                logprobs, entropy, full = self.policy.logprobs_and_divergence(
                    batch, teacher, options.divergence, entropy_grad=entropy_grad
                )
            else:
                logprobs, entropy = self.policy.logprobs(batch, entropy_grad=entropy_grad)
            if options.loss == "opsd" and full is not None:
                result = opsd(full)
            elif options.loss == "nsd":
                result = nsd(logprobs, batch.logp_ref, batch.gate, batch.old, options.nsd, full)
            else:
                result = token_losses(logprobs, batch.old, batch.advantages, options)
            per_token = result.loss
            if reference is not None:
                kl = kl_estimates(logprobs, reference, options.kl_estimator)
                per_token = per_token + options.kl_coef * kl
                sums.add("kl_reference", float(kl.detach().sum()))
            if options.entropy_coef:
                per_token = per_token - options.entropy_coef * entropy
            loss = (weights * per_token).sum()
            torch.autograd.backward(loss)
        sums.loss += float(loss.detach())
        sums.trained += len(logprobs)
        sums.tokens += sum(map(len, batch.token_ids))
        sums.add("entropy", float(entropy.detach().sum()))
        sums.add("clip_share", float(result.clipped.sum()))
        sums.add("mask_share", float(result.masked.sum()))
        for name, values in result.parts.items():
            sums.add(name, float(values.detach().sum()))
        if options.loss == "nsd":
            sums.add("gate_open_share", float((batch.gate > 0).sum()))
        _compare(logprobs.detach(), batch.old, sums)

    def _rate(self) -> float:
        own = self.updates - self._first_update
        return self.optim.lr * min(1.0, (own + 1) / self.optim.warmup) if self.optim.warmup else self.optim.lr

    def _clip(self) -> float:
        import torch

        bound = self.optim.max_grad_norm or math.inf
        return float(torch.nn.utils.clip_grad_norm_(self._parameters, bound, error_if_nonfinite=True))

    def continue_from(self, updates: int) -> None:
        """The weights have seen so many updates; the optimiser is new unless `load_state` follows."""
        self.updates = self._first_update = updates

    def state(self) -> dict[str, Any]:
        """The optimiser's state by parameter name, on the CPU."""
        names = [name for name, _ in self.policy.trainable()]
        inner = self.optimizer.state_dict()
        return {
            "updates": self.updates,
            "first_update": self._first_update,
            "state": {names[i]: {k: v.cpu() if hasattr(v, "cpu") else v for k, v in entry.items()}
                      for i, entry in inner["state"].items()},
        }  # fmt: skip

    def load_state(self, saved: dict[str, Any]) -> None:
        """Continues from `state()`; the rate, betas and decay stay those of this trainer."""
        names = [name for name, _ in self.policy.trainable()]
        inner = self.optimizer.state_dict()
        missing = [name for name in names if saved["state"] and name not in saved["state"]]
        if missing:
            raise ValueError(f"the saved optimiser knows nothing of {missing[0]}")
        inner["state"] = {i: saved["state"][name] for i, name in enumerate(names) if name in saved["state"]}
        self.optimizer.load_state_dict(inner)
        self.updates, self._first_update = int(saved["updates"]), int(saved["first_update"])


def _compare(logprobs: Any, old: Any, sums: Sums) -> None:
    """The gap to the rollout's log-probabilities, where it has any."""
    known = ~old.isnan()
    count = int(known.sum())
    if not count:
        return
    gap = (logprobs - old)[known]
    sums.compared += count
    sums.add("gap", float(gap.abs().sum()))
    sums.gap_max = max(sums.gap_max, float(gap.abs().max()))
    # k3 of rollout policy to trained policy: unbiased, never negative.
    sums.add("kl_rollout", float(kl_estimates(-gap, -gap * 0, "k3").sum()))


def _means(sums: Sums, options: LossOptions) -> dict[str, float]:
    metrics = {"loss": sums.loss}
    metrics.update(
        (name, sums.values[name] / sums.trained)
        for name in ("kl_reference", "entropy", "clip_share", "mask_share", "push", "anchor", "gate", "gate_open_share")
        if name in sums.values
    )
    if sums.compared:
        metrics["kl_rollout"] = sums.values["kl_rollout"] / sums.compared
        metrics["logprob_gap_mean"] = sums.values["gap"] / sums.compared
        metrics["logprob_gap_max"] = sums.gap_max
    return metrics
