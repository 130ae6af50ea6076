"""The model in training: which parameters move, its log-probabilities on packs, and the reference it may be held to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.errors import UsageError, missing_extra
from strop.core.models.packed import hidden_states, output_head, packed_attention, probe

if TYPE_CHECKING:
    from torch import Tensor

    from strop.core.train.examples import TrainSequence
    from strop.kernels.linear_divergence import Softmax

ALL_LINEAR = "all-linear"


@dataclass(frozen=True, slots=True)
class LoraOptions:
    """LoRA (arXiv:2106.09685): rank, alpha (the update is scaled by alpha / rank) and the layers it goes into."""

    rank: int = 16
    alpha: float = 32.0
    targets: tuple[str, ...] = (ALL_LINEAR,)


@dataclass(slots=True)
class PackBatch:
    """One pack as tensors: the sequences' tokens, and what belongs to the trained positions, in the same order.

    A teacher reads `teacher_ids`, where the trained positions are in `teacher_rows`: the policy's own tokens, but for a
    self-teacher with a prompt of its own. `routing` [T, L, K] holds the experts to use for each of the T tokens that
    are fed; None leaves it to the model.
    """

    token_ids: list[list[int]]
    rows: Tensor
    teacher_ids: list[list[int]]
    teacher_rows: Tensor
    targets: Tensor
    temperature: Tensor
    old: Tensor
    advantages: Tensor
    logp_ref: Tensor
    gate: Tensor
    routing: Tensor | None = None


class Policy:
    """A causal model whose trained positions are scored from hidden states; only those meet the output matrix.

    `reference` is another model to hold the policy to; None means the policy with its adapter switched off.
    `compute_dtype` below float32 runs a float32 model under autocast: narrow products, weights and updates kept wide.
    """

    def __init__(self, model: Any, *, reference: Any = None, compute_dtype: str | None = None) -> None:
        import torch

        self.model = model
        self._narrow = getattr(torch, compute_dtype) if compute_dtype in ("bfloat16", "float16") else None
        self.is_lora = hasattr(model, "get_base_model")
        self.can_pack = probe(model)
        self._reference = reference
        self._check_head()
        # No dropout: the log-probabilities must be those of the model that sampled.
        model.eval()

    def _check_head(self) -> None:
        head = self._base.get_output_embeddings()
        if self.is_lora and hasattr(head, "lora_A"):
            raise UsageError("the adapter changes the output matrix (lm_head); choose other --lora-targets")

    @property
    def _base(self) -> Any:
        return self.model.get_base_model() if self.is_lora else self.model

    @property
    def vocabulary(self) -> int:
        """How many token ids the model knows."""
        return int(self._base.get_input_embeddings().weight.shape[0])

    @property
    def device(self) -> Any:
        """Where the inputs go."""
        return self._base.get_input_embeddings().weight.device

    def trainable(self) -> Iterator[tuple[str, Any]]:
        """Names and parameters that move, in a fixed order."""
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def pack_batch(self, sequences: list[TrainSequence]) -> PackBatch:
        """The tensors of a pack. The last token of a sequence is only predicted, never fed."""
        import torch

        rows: list[int] = []
        teacher_rows: list[int] = []
        targets: list[int] = []
        start = teacher_start = 0
        teacher_ids = [one.teacher_ids for one in sequences]
        for one, read in zip(sequences, teacher_ids, strict=True):
            rows.extend(start + position - 1 for position in one.positions)
            teacher_rows.extend(teacher_start + one.teacher_shift + position - 1 for position in one.positions)
            targets.extend(one.token_ids[position] for position in one.positions)
            start += len(one.token_ids) - 1
            teacher_start += len(read)
        nan = float("nan")

        def column(values: list[float]) -> Tensor:
            return torch.tensor(values, dtype=torch.float64).to(device=self.device, dtype=self.sum_dtype)

        return PackBatch(
            token_ids=[one.token_ids[:-1] for one in sequences],
            rows=torch.tensor(rows, device=self.device),
            teacher_ids=teacher_ids,
            teacher_rows=torch.tensor(teacher_rows, device=self.device),
            targets=torch.tensor(targets, device=self.device),
            temperature=column([one.temperature for one in sequences for _ in one.positions]),
            old=column([value for one in sequences for value in (one.old_logprobs or [nan] * len(one.positions))]),
            advantages=column([value for one in sequences for value in one.advantages]),
            logp_ref=column([value for one in sequences for value in one.logp_ref]),
            gate=column([value for one in sequences for value in one.gate]),
            routing=_routing_of(sequences),
        )

    def replaying(self, batch: PackBatch) -> AbstractContextManager[None]:
        """Within it the policy uses the experts of the batch's record, if it has one; left after the backward pass.

        The reference is to be computed outside: it chooses freely.
        """
        from strop.core.models.routing import replaying

        return nullcontext() if batch.routing is None else replaying(self.model, batch.routing)

    @property
    def sum_dtype(self) -> Any:
        """The dtype of losses: float32, or float64 for a float64 model."""
        import torch

        weight = self._base.get_input_embeddings().weight
        return torch.float64 if weight.dtype == torch.float64 else torch.float32

    def logprobs(self, batch: PackBatch, *, entropy_grad: bool) -> tuple[Tensor, Tensor]:
        """Log-probabilities (nats) of the trained tokens and the entropies of their distributions."""
        logprobs, entropy = self._score(self._softmax(self.model, batch), batch, entropy_grad=entropy_grad)
        return logprobs, entropy

    def logprobs_and_divergence(
        self, batch: PackBatch, teacher: Softmax, choice: tuple[str, float], *, entropy_grad: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """What `logprobs` gives, and the divergence (nats) from the teacher over the whole vocabulary.

        `teacher` is `teacher_softmax` of the same batch; `choice` a divergence of the kernel and its beta.
        """
        from strop.kernels.linear_divergence import linear_divergence

        policy = self._softmax(self.model, batch)
        logprobs, entropy = self._score(policy, batch, entropy_grad=entropy_grad)
        divergence, beta = choice
        return logprobs, entropy, linear_divergence(policy, teacher, divergence=divergence, beta=beta)

    def teacher_softmax(self, batch: PackBatch) -> Softmax:
        """The reference's distributions at the trained tokens, given what a teacher reads; no gradient."""
        import torch

        with torch.no_grad(), self._as_reference() as model:
            return self._softmax(model, batch, as_teacher=True)

    def reference_logprobs(self, batch: PackBatch) -> Tensor:
        """Log-probabilities of the trained tokens under the reference; no gradient."""
        import torch

        with torch.no_grad(), self._as_reference() as model:
            (logprobs,) = self._score(self._softmax(model, batch), batch, entropy_grad=None)
        return logprobs

    @contextmanager
    def _as_reference(self) -> Iterator[Any]:
        """The model that plays the reference: another one, or the policy with its adapter off."""
        if self._reference is not None:
            yield self._reference
            return
        if not self.is_lora:
            raise UsageError("a KL penalty on full parameters needs a reference model")
        with self.model.disable_adapter():
            yield self.model

    def _softmax(self, model: Any, batch: PackBatch, *, as_teacher: bool = False) -> Softmax:
        """The distributions at the trained tokens, as hidden states and an output matrix."""
        import torch

        from strop.kernels.linear_divergence import Softmax

        head = output_head(model)
        narrow = self._narrow
        autocast = nullcontext() if narrow is None else torch.autocast(self.device.type, narrow)
        with packed_attention(model), autocast:
            hidden = hidden_states(model, batch.teacher_ids if as_teacher else batch.token_ids)
        weight = head.weight if narrow is None else head.weight.to(narrow)
        rows = batch.teacher_rows if as_teacher else batch.rows
        return Softmax(hidden[rows].to(weight.dtype), weight, head.bias, batch.temperature * head.divisor)

    def _score(self, softmax: Softmax, batch: PackBatch, *, entropy_grad: bool | None) -> tuple[Tensor, ...]:
        """Log-probabilities of the trained tokens, and unless `entropy_grad` is None the entropies."""
        from strop.kernels.linear_logprob import linear_logprob

        return linear_logprob(
            softmax.hidden, softmax.weight, batch.targets, temperature=softmax.temperature, bias=softmax.bias,
            return_entropy=entropy_grad is not None, entropy_grad=bool(entropy_grad),
        )  # fmt: skip


def _routing_of(sequences: list[TrainSequence]) -> Tensor | None:
    """The routing of the tokens that are fed. Raises ValueError where some sequences have one and some do not."""
    import numpy as np
    import torch

    some = [one.routing for one in sequences if one.routing is not None]
    if not some:
        return None
    if [len(one.token_ids) - 1 for one in sequences] != [len(rows) for rows in some]:
        raise ValueError("a pack in which not every token has its routing")
    return torch.from_numpy(np.concatenate(some).astype(np.int64))


def add_lora(model: Any, options: LoraOptions, *, seed: int) -> Any:
    """The model with a fresh LoRA adapter in float32, whose update is zero. Raises UsageError for unknown targets."""
    import torch

    try:
        from peft import LoraConfig, get_peft_model
    except ImportError:
        raise missing_extra("peft", "model") from None
    targets: Any = ALL_LINEAR if options.targets == (ALL_LINEAR,) else list(options.targets)
    config = LoraConfig(
        r=options.rank, lora_alpha=options.alpha, target_modules=targets, lora_dropout=0.0, bias="none",
        task_type="CAUSAL_LM",
    )  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            return get_peft_model(model, config)
        except ValueError as error:
            raise UsageError(f"--lora-targets {','.join(options.targets)}: {error}") from None


def load_lora(model: Any, folder: Path) -> Any:
    """The model with the adapter of a peft folder, ready to be trained on. Raises Unavailable if it does not fit."""
    from strop.core.models.adapters import apply_adapter

    loaded = apply_adapter(model, folder)
    for name, parameter in loaded.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return loaded

