"""Log-probability (and entropy) of given tokens straight from hidden states and the output matrix.

The logits [T, V] are never held: a block of tokens meets the vocabulary block by block, with the softmax's maximum and
sum carried along (the online softmax of Milakov and Gimelshein, arXiv:1805.02867). The gradient to the hidden states
is one row per token times the incoming scalar, so those rows are accumulated in the same pass and nothing is recomputed
for them; the gradient to the matrix and the bias recomputes the blocks. The passes over the vocabulary are matrix
products of torch here, and one Triton kernel in `linear_logprob_triton`.

Axes: T tokens, H hidden size, V vocabulary.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strop.kernels.logit_blocks import (
    BLOCK_TOKENS,
    BLOCK_VOCAB,
    inverse_temperature,
    logit_blocks,
    operand,
    product,
    wide_dtype,
)

FORMS = ("auto", "blocked", "triton")


def linear_logprob(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    targets_T: Tensor,
    *,
    temperature: float | Tensor = 1.0,
    bias: Tensor | None = None,
    block_tokens: int = BLOCK_TOKENS,
    block_vocab: int = BLOCK_VOCAB,
    return_entropy: bool = False,
    entropy_grad: bool = True,
    form: str = "auto",
) -> tuple[Tensor, ...]:
    """`log_softmax((hidden @ weight.T + bias) / temperature)` at the targets, in nats, and the entropy if asked for.

    `hidden_TH` and `weight_VH` are floating, of one dtype; `targets_T` are ids in [0, V); `temperature` is positive,
    one number or one for each token. Returns `(logprobs_T,)` or `(logprobs_T, entropy_T)`, in float32 (float64 for
    float64 input): products of bfloat16 operands are accumulated and kept in float32. Differentiable once with respect
    to hidden, weight and bias; `entropy_grad=False` makes the entropy a mere measurement and saves a matrix product.
    At most `block_tokens` x `block_vocab` logits exist at a time. `form` "triton" keeps them in registers, and takes
    bfloat16, float16 and float32; "auto" chooses it on a GPU for the two narrow types (float32 products are left to the
    vendor's library) where Triton is installed. Raises ValueError for shapes or ids that do not fit.

    Source: our choice of blocks and of accumulating the gradient in the forward pass; the mathematics is softmax's.

    >>> hidden, weight = torch.zeros(1, 2), torch.zeros(4, 2)
    >>> round(linear_logprob(hidden, weight, torch.tensor([3]))[0].item(), 4)
    -1.3863
    """
    _check(hidden_TH, weight_VH, targets_T, bias, block_tokens, block_vocab)
    inverse_T, is_triton = inverse_temperature(temperature, hidden_TH), _is_triton(form, hidden_TH)
    blocks = (block_tokens, block_vocab)
    logprobs_T, entropy_T = _LinearLogprob.apply(  # type: ignore[no-untyped-call]
        hidden_TH, weight_VH, bias, targets_T, inverse_T, blocks, return_entropy, entropy_grad, is_triton
    )
    return (logprobs_T, entropy_T) if return_entropy else (logprobs_T,)


def _check(
    hidden_TH: Tensor, weight_VH: Tensor, targets_T: Tensor, bias: Tensor | None, block_tokens: int, block_vocab: int
) -> None:
    if hidden_TH.dim() != 2 or weight_VH.dim() != 2 or hidden_TH.shape[1] != weight_VH.shape[1]:
        shapes = f"hidden {tuple(hidden_TH.shape)} and weight {tuple(weight_VH.shape)}"
        raise ValueError(f"{shapes} are not [T, H] and [V, H]")
    if targets_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"{tuple(targets_T.shape)} targets for {hidden_TH.shape[0]} tokens")
    if hidden_TH.dtype != weight_VH.dtype:
        raise ValueError(f"hidden is {hidden_TH.dtype}, weight is {weight_VH.dtype}")
    if bias is not None and bias.shape != weight_VH.shape[:1]:
        raise ValueError(f"bias {tuple(bias.shape)} for a vocabulary of {weight_VH.shape[0]}")
    if min(block_tokens, block_vocab) < 1:
        raise ValueError("blocks hold at least one token and one word")
    if targets_T.numel() and not 0 <= int(targets_T.min()) <= int(targets_T.max()) < weight_VH.shape[0]:
        raise ValueError(f"a target lies outside the vocabulary of {weight_VH.shape[0]}")


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _is_triton(form: str, hidden_TH: Tensor) -> bool:
    if form not in FORMS:
        raise ValueError(f"form {form!r} is none of {', '.join(FORMS)}")
    if form == "triton" and hidden_TH.dtype == torch.float64:
        raise ValueError("the Triton form keeps its sums in float32, and hidden is float64")
    narrow = hidden_TH.dtype in (torch.bfloat16, torch.float16)
    return form == "triton" or (form == "auto" and hidden_TH.is_cuda and narrow and _has_triton())


class Wants(NamedTuple):
    """What a pass over the vocabulary has to bring, besides the log-probability."""

    entropy: bool
    rows: bool
    entropy_rows: bool


class Sums(NamedTuple):
    """What a pass over the vocabulary brings, per token; what was not wanted is empty.

    The largest logit; the sums of e = exp(logit - largest) and of e (logit - largest); the target's logit, all [T]; and
    the sums of e * weight and of e (logit - largest) * weight, [T, H].
    """

    largest: Tensor
    total: Tensor
    shifted: Tensor
    target: Tensor
    rows: Tensor
    entropy_rows: Tensor


class _Running:
    """Online softmax of one token block: maximum, sum of exponentials, and the sums weighted by them."""

    def __init__(self, targets_T: Tensor, wants: Wants) -> None:
        self.targets_T, self.wants = targets_T, wants
        self.max_T: Tensor | None = None
        self.sum_T = self.target_T = self.shifted_T = self.rows_TH = self.entropy_rows_TH = torch.empty(0)

    def add(self, logits_TB: Tensor, start: int, weight_BH: Tensor) -> None:
        """Takes in the logits of the words [start, start + B); overwrites them."""
        inside_T = (self.targets_T >= start) & (self.targets_T < start + logits_TB.shape[1])
        index_T = torch.where(inside_T, self.targets_T - start, 0)
        target_T = logits_TB.gather(1, index_T[:, None]).squeeze(1)
        max_T = logits_TB.amax(1)
        if self.max_T is None:
            self._rescale(None, max_T, weight_BH)
            self.target_T = torch.full_like(target_T, -torch.inf)
        else:
            self._rescale(self.max_T, torch.maximum(self.max_T, max_T), weight_BH)
        self.target_T = torch.where(inside_T, target_T, self.target_T)
        assert self.max_T is not None
        # A block whose words are all excluded (bias -inf) has no maximum to subtract.
        shift_T = torch.where(self.max_T == -torch.inf, 0, self.max_T)
        logits_TB.sub_(shift_T[:, None])
        exp_TB = torch.exp(logits_TB) if self.wants.entropy else logits_TB.exp_()
        self.sum_T += exp_TB.sum(1)
        if self.wants.rows:
            self.rows_TH += product(exp_TB, weight_BH)
        if self.wants.entropy:
            # clamp: an excluded word adds nothing, and 0 * -inf would be NaN.
            weighted_TB = logits_TB.clamp_(min=-1e4).mul_(exp_TB)
            self.shifted_T += weighted_TB.sum(1)
            if self.wants.entropy_rows:
                self.entropy_rows_TH += product(weighted_TB, weight_BH)

    def _rescale(self, old_T: Tensor | None, new_T: Tensor, weight_BH: Tensor) -> None:
        self.max_T = new_T
        if old_T is None:
            shape = (new_T.shape[0], weight_BH.shape[1])
            self.sum_T = torch.zeros_like(new_T)
            self.shifted_T = new_T.new_zeros(new_T.shape if self.wants.entropy else 0)
            self.rows_TH = new_T.new_zeros(shape if self.wants.rows else 0)
            self.entropy_rows_TH = new_T.new_zeros(shape if self.wants.entropy_rows else 0)
            return
        step_T = torch.where(old_T == -torch.inf, 0, old_T - new_T)
        scale_T = step_T.exp()
        if self.wants.entropy:
            self.shifted_T = (self.shifted_T + step_T * self.sum_T) * scale_T
            if self.wants.entropy_rows:
                self.entropy_rows_TH.add_(self.rows_TH * step_T[:, None]).mul_(scale_T[:, None])
        self.sum_T *= scale_T
        if self.wants.rows:
            self.rows_TH *= scale_T[:, None]


class _LinearLogprob(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        targets_T: Tensor,
        inverse_T: Tensor,
        blocks: tuple[int, int],
        want_entropy: bool,
        entropy_grad: bool,
        is_triton: bool,
    ) -> tuple[Tensor, Tensor]:
        num_tokens, dtype = hidden_TH.shape[0], wide_dtype(hidden_TH.dtype)
        want_rows = ctx.needs_input_grad[0]
        wants = Wants(want_entropy, want_rows, want_rows and want_entropy and entropy_grad)
        logprobs_T, normaliser_T = hidden_TH.new_empty(2, num_tokens, dtype=dtype)
        entropy_T = hidden_TH.new_empty(num_tokens if want_entropy else 0, dtype=dtype)
        # d logprob / d hidden and d entropy / d hidden, one row per token.
        rows_TH = hidden_TH.new_empty(hidden_TH.shape if want_rows else 0, dtype=dtype)
        entropy_rows_TH = hidden_TH.new_empty(hidden_TH.shape if wants.entropy_rows else 0, dtype=dtype)
        for start in range(0, num_tokens, blocks[0]):
            part = slice(start, start + blocks[0])
            inputs = (hidden_TH[part], weight_VH, bias, targets_T[part], inverse_T[part])
            if is_triton:
                from strop.kernels.linear_logprob_triton import triton_sums

                sums = triton_sums(*inputs, wants)
            else:
                sums = _blocked_sums(*inputs, wants, blocks[1])
            normaliser_T[part] = sums.largest + sums.total.log()
            logprobs_T[part] = sums.target - normaliser_T[part]
            if wants.entropy:
                entropy_T[part] = sums.total.log() - sums.shifted / sums.total
            if wants.rows:
                mean_TH = sums.rows.div_(sums.total[:, None])
                rows_TH[part] = (weight_VH[targets_T[part]] - mean_TH).mul_(inverse_T[part, None])
                if wants.entropy_rows:
                    # dH/dlogit = -p (log p + H), and the mean of (log p) under p is -H.
                    mean_shift_T = sums.shifted / sums.total
                    sums.entropy_rows.div_(sums.total[:, None]).sub_(mean_TH * mean_shift_T[:, None])
                    entropy_rows_TH[part] = sums.entropy_rows.mul_(-inverse_T[part, None])
        ctx.save_for_backward(
            hidden_TH, weight_VH, bias, targets_T, inverse_T, normaliser_T, entropy_T, rows_TH, entropy_rows_TH
        )
        ctx.blocks = blocks
        ctx.entropy_grad = want_entropy and entropy_grad
        if not ctx.entropy_grad:
            ctx.mark_non_differentiable(entropy_T)
        return logprobs_T, entropy_T

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_logprobs_T: Tensor, grad_entropy_T: Tensor) -> tuple[Tensor | None, ...]:
        (hidden_TH, weight_VH, bias, targets_T, inverse_T, normaliser_T, entropy_T, rows_TH, entropy_rows_TH) = (
            ctx.saved_tensors
        )
        if not ctx.entropy_grad:
            grad_entropy_T = torch.zeros_like(grad_logprobs_T)
        grad_hidden = grad_weight = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_hidden = rows_TH * grad_logprobs_T[:, None]
            if ctx.entropy_grad:
                grad_hidden += entropy_rows_TH * grad_entropy_T[:, None]
            grad_hidden = grad_hidden.to(hidden_TH.dtype)
        if ctx.needs_input_grad[1] or (bias is not None and ctx.needs_input_grad[2]):
            entropy_T = entropy_T if ctx.entropy_grad else torch.zeros_like(normaliser_T)
            grad_weight, grad_bias = _weight_gradient(
                hidden_TH, weight_VH, bias, targets_T, inverse_T, ctx.blocks,
                normaliser_T, entropy_T, grad_logprobs_T, grad_entropy_T,
            )  # fmt: skip
        return grad_hidden, grad_weight, grad_bias, None, None, None, None, None, None


def _blocked_sums(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias: Tensor | None,
    targets_T: Tensor,
    inverse_T: Tensor,
    wants: Wants,
    block: int,
) -> Sums:
    running = _Running(targets_T, wants)
    for start, weight_BH, logits_TB in logit_blocks(hidden_TH, weight_VH, bias, inverse_T, block):
        running.add(logits_TB, start, weight_BH)
    assert running.max_T is not None
    return Sums(
        running.max_T, running.sum_T, running.shifted_T, running.target_T, running.rows_TH, running.entropy_rows_TH
    )


def _weight_gradient(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias: Tensor | None,
    targets_T: Tensor,
    inverse_T: Tensor,
    blocks: tuple[int, int],
    normaliser_T: Tensor,
    entropy_T: Tensor,
    grad_logprobs_T: Tensor,
    grad_entropy_T: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """Recomputes each block's softmax: dlogit = g (1[target] - p) - h p (log p + H), over the temperature."""
    dtype = wide_dtype(hidden_TH.dtype)
    grad_weight = weight_VH.new_zeros(weight_VH.shape, dtype=dtype)
    grad_bias = None if bias is None else bias.new_zeros(bias.shape, dtype=dtype)
    for first in range(0, hidden_TH.shape[0], blocks[0]):
        part = slice(first, first + blocks[0])
        operand_TH, scale_T = operand(hidden_TH[part]), inverse_T[part]
        target_grad_T = grad_logprobs_T[part] * scale_T
        for start, _, logits_TB in logit_blocks(hidden_TH[part], weight_VH, bias, scale_T, blocks[1]):
            log_p_TB = logits_TB.sub_(normaliser_T[part, None])
            p_TB = log_p_TB.exp()
            # clamp: see _Running.add.
            factor_TB = log_p_TB.clamp_(min=-1e4).add_(entropy_T[part, None]).mul_(grad_entropy_T[part, None])
            grad_TB = factor_TB.add_(grad_logprobs_T[part, None]).mul_(p_TB).mul_(-scale_T[:, None])
            grad_weight[start : start + blocks[1]] += product(grad_TB.T, operand_TH)
            if grad_bias is not None:
                grad_bias[start : start + blocks[1]] += grad_TB.sum(0)
        grad_weight.index_add_(0, targets_T[part], hidden_TH[part].to(dtype) * target_grad_T[:, None])
        if grad_bias is not None:
            grad_bias.index_add_(0, targets_T[part], target_grad_T)
    return grad_weight.to(weight_VH.dtype), None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
