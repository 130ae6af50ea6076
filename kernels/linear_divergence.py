"""Divergence between two next-token distributions, each given by hidden states and an output matrix.

Neither's logits [T, V] are ever held. A first pass over blocks of the vocabulary finds both normalisers, a second adds
up the divergence, and the gradient recomputes the blocks: it needs a sum over the whole vocabulary first, and taking
that off afterwards, as the difference of two large rows, would lose digits. The teacher is frozen.

Serves NSD's "full" anchor (KL(p_ref || p_theta) over the whole vocabulary, where the paper has the sampled token only)
and the full-vocabulary losses of OPSD and GKD.

Axes: T tokens, H hidden size (student and teacher may differ), V vocabulary, B words of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from strop.kernels.logit_blocks import BLOCK_VOCAB, inverse_temperature, logit_blocks, operand, product, wide_dtype

DIVERGENCES = ("forward", "reverse", "jsd")
# Half of linear_logprob's: two blocks of logits and what is computed of both exist at a time.
BLOCK_TOKENS = 1024
# exp() of it is 0 even in float64; -inf of an excluded word would make 0 * inf.
MIN_LOGPROB = -1e4


class Softmax(NamedTuple):
    """softmax((hidden @ weight.T + bias) / temperature): hidden [T, H] and weight [V, H] of one dtype, bias [V].

    `temperature` is positive, one number or one for each token.
    """

    hidden: Tensor
    weight: Tensor
    bias: Tensor | None = None
    temperature: float | Tensor = 1.0


def linear_divergence(
    student: Softmax,
    teacher: Softmax,
    *,
    divergence: str = "forward",
    beta: float = 0.5,
    block_tokens: int = BLOCK_TOKENS,
    block_vocab: int = BLOCK_VOCAB,
) -> Tensor:
    """Divergence of the student q from the teacher p at each token [T], in nats.

    "forward" is KL(p || q), "reverse" KL(q || p), "jsd" the generalised Jensen-Shannon divergence of GKD
    (arXiv:2306.13649, section 2): beta KL(p || m) + (1 - beta) KL(q || m) with m = beta p + (1 - beta) q, 0 < beta < 1;
    divided by beta it tends to the forward KL for small beta, and by 1 - beta to the reverse one for large. (TRL calls
    the limits themselves beta 0 and 1.)

    Float32 (float64 if an input is); differentiable once with respect to the student's hidden, weight and bias. A
    word that one side excludes (a bias of -inf) has log-probability -1e4 there. At most `block_tokens` x `block_vocab`
    logits of each exist at a time. Raises ValueError for shapes that do not fit, among them different vocabularies.

    Source: our choice of blocks and passes; the gradients are those of softmax.

    >>> hidden, weight = torch.zeros(1, 2), torch.zeros(4, 2)
    >>> linear_divergence(Softmax(hidden, weight), Softmax(hidden, weight)).tolist()
    [0.0]
    """
    _check(student, teacher, divergence, beta)
    if min(block_tokens, block_vocab) < 1:
        raise ValueError("blocks hold at least one token and one word")
    bias = None if teacher.bias is None else teacher.bias.detach()
    frozen = Softmax(teacher.hidden.detach(), teacher.weight.detach(), bias)
    inverses = tuple(inverse_temperature(side.temperature, side.hidden) for side in (student, teacher))
    result_T: Tensor = _LinearDivergence.apply(  # type: ignore[no-untyped-call]
        student.hidden, student.weight, student.bias, frozen, inverses, (divergence, beta), (block_tokens, block_vocab)
    )
    return result_T


def _check(student: Softmax, teacher: Softmax, divergence: str, beta: float) -> None:
    for name, side in (("student", student), ("teacher", teacher)):
        hidden, weight = side.hidden, side.weight
        if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
            shapes = f"hidden {tuple(hidden.shape)} and weight {tuple(weight.shape)}"
            raise ValueError(f"the {name}'s {shapes} are not [T, H] and [V, H]")
        if hidden.dtype != weight.dtype:
            raise ValueError(f"the {name}'s hidden is {hidden.dtype}, its weight is {weight.dtype}")
        if side.bias is not None and side.bias.shape != weight.shape[:1]:
            raise ValueError(f"the {name}'s bias {tuple(side.bias.shape)} for a vocabulary of {weight.shape[0]}")
    if student.hidden.shape[0] != teacher.hidden.shape[0]:
        raise ValueError(f"{student.hidden.shape[0]} tokens of the student, {teacher.hidden.shape[0]} of the teacher")
    if student.weight.shape[0] != teacher.weight.shape[0]:
        words = f"{student.weight.shape[0]} words, the teacher's {teacher.weight.shape[0]}"
        raise ValueError(f"the student's vocabulary has {words}")
    if divergence not in DIVERGENCES:
        raise ValueError(f"divergence {divergence!r} is none of {', '.join(DIVERGENCES)}")
    if divergence == "jsd" and not 0 < beta < 1:
        raise ValueError(f"beta {beta} must lie between 0 and 1")


class _Part(NamedTuple):
    """A block of tokens: student and teacher, their inverse temperatures [T] and, once known, normalisers [T, 2].

    A normaliser is the largest logit and the log of the sum of exp(logit - largest). Added up they would be rounded to
    the size of the logits, and that error is a factor on every probability.
    """

    sides: tuple[Softmax, Softmax]
    inverses: tuple[Tensor, Tensor]
    normalisers: tuple[Tensor, Tensor]

    def cut(self, tokens: slice) -> _Part:
        """The same for some of the tokens."""
        student, teacher = (side._replace(hidden=side.hidden[tokens]) for side in self.sides)
        inverses, normalisers = ((one[tokens], other[tokens]) for one, other in (self.inverses, self.normalisers))
        return _Part((student, teacher), inverses, normalisers)

    def normalise(self, block: int) -> None:
        """Finds the normalisers, in place."""
        for side, normaliser_T2 in enumerate(self.normalisers):
            largest_T = torch.full_like(normaliser_T2[:, 0], -torch.inf)
            total_T = torch.zeros_like(largest_T)
            for _, _, logits_TB in self.logits(side, block):
                new_T = torch.maximum(largest_T, logits_TB.amax(1))
                # Before the first word that is not excluded there is no maximum to subtract.
                shift_T = torch.where(new_T == -torch.inf, 0, new_T)
                total_T *= (largest_T - shift_T).exp()
                total_T += logits_TB.sub_(shift_T[:, None]).exp_().sum(1)
                largest_T = new_T
            normaliser_T2.copy_(torch.stack((largest_T, total_T.log()), 1))

    def logits(self, side: int, block: int) -> Iterator[tuple[int, Tensor, Tensor]]:
        """(first word, weight block, logits [T, B]) of one side, for each block of the vocabulary."""
        hidden_TH, weight_VH, bias, _ = self.sides[side]
        return logit_blocks(hidden_TH, weight_VH, bias, self.inverses[side], block)

    def log_probabilities(self, block: int) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """(words, the student's weight block, log q [T, B], log p [T, B]) for each block of the vocabulary."""
        for both in zip(self.logits(0, block), self.logits(1, block), strict=True):
            log_q_TB, log_p_TB = (
                logits_TB.sub_(normaliser_T2[:, :1]).sub_(normaliser_T2[:, 1:]).clamp_(min=MIN_LOGPROB)
                for (_, _, logits_TB), normaliser_T2 in zip(both, self.normalisers, strict=True)
            )
            start, weight_BH, _ = both[0]
            yield slice(start, start + block), weight_BH, log_q_TB, log_p_TB


def _terms(log_q_TB: Tensor, log_p_TB: Tensor, kind: tuple[str, float]) -> tuple[Tensor, Tensor, Tensor]:
    """The summands of the divergence, q, and s: the gradient to the student's logits is s - q * (the sum of s)."""
    divergence, beta = kind
    q_TB = log_q_TB.exp()
    if divergence == "reverse":
        value_TB = log_q_TB.sub_(log_p_TB).mul_(q_TB)
        return value_TB, q_TB, value_TB
    p_TB = log_p_TB.exp()
    if divergence == "forward":
        return log_p_TB.sub_(log_q_TB).mul_(p_TB), q_TB, p_TB.neg_()
    log_m_TB = torch.logaddexp(log_p_TB + math.log(beta), log_q_TB + math.log1p(-beta))
    student_TB = log_q_TB.sub_(log_m_TB).mul_(q_TB).mul_(1 - beta)
    return log_p_TB.sub_(log_m_TB).mul_(p_TB).mul_(beta).add_(student_TB), q_TB, student_TB


class _LinearDivergence(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_TH: Tensor,
        weight_VH: Tensor,
        bias: Tensor | None,
        teacher: Softmax,
        inverses: tuple[Tensor, Tensor],
        kind: tuple[str, float],
        blocks: tuple[int, int],
    ) -> Tensor:
        num_tokens = hidden_TH.shape[0]
        normalisers = (inverses[0].new_zeros(num_tokens, 2), inverses[1].new_zeros(num_tokens, 2))
        # The value, and the sum of s that `_terms` speaks of.
        wide = torch.promote_types(inverses[0].dtype, inverses[1].dtype)
        value_T, mean_T = hidden_TH.new_zeros(2, num_tokens, dtype=wide)
        whole = _Part((Softmax(hidden_TH, weight_VH, bias), teacher), inverses, normalisers)
        for start in range(0, num_tokens, blocks[0]):
            tokens = slice(start, start + blocks[0])
            part = whole.cut(tokens)
            part.normalise(blocks[1])
            for _, _, log_q_TB, log_p_TB in part.log_probabilities(blocks[1]):
                term_TB, _, s_TB = _terms(log_q_TB, log_p_TB, kind)
                value_T[tokens] += term_TB.sum(1)
                mean_T[tokens] += s_TB.sum(1)
        ctx.save_for_backward(hidden_TH, weight_VH, bias, mean_T, *normalisers)
        ctx.teacher, ctx.inverses, ctx.kind, ctx.blocks = teacher, inverses, kind, blocks
        # clamp: no divergence is negative, but the rounding of the sum of equals may be.
        return torch.clamp(value_T, min=0)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_T: Tensor) -> tuple[Tensor | None, ...]:
        hidden_TH, weight_VH, bias, mean_T, *normalisers = ctx.saved_tensors
        grads = [
            torch.zeros_like(one, dtype=wide_dtype(one.dtype)) if wanted else None
            for one, wanted in zip((hidden_TH, weight_VH, bias), ctx.needs_input_grad, strict=False)
        ]
        grad_hidden, grad_weight, grad_bias = grads
        whole = _Part((Softmax(hidden_TH, weight_VH, bias), ctx.teacher), ctx.inverses, tuple(normalisers))
        for start in range(0, hidden_TH.shape[0], ctx.blocks[0]):
            tokens = slice(start, start + ctx.blocks[0])
            operand_TH, scale_T = operand(hidden_TH[tokens]), grad_T[tokens] * ctx.inverses[0][tokens]
            for words, weight_BH, log_q_TB, log_p_TB in whole.cut(tokens).log_probabilities(ctx.blocks[1]):
                _, q_TB, s_TB = _terms(log_q_TB, log_p_TB, ctx.kind)
                slope_TB = s_TB.sub_(q_TB.mul_(mean_T[tokens, None])).mul_(scale_T[:, None]).to(q_TB.dtype)
                if grad_hidden is not None:
                    grad_hidden[tokens] += product(slope_TB, weight_BH)
                if grad_weight is not None:
                    grad_weight[words] += product(slope_TB.T, operand_TH)
                if grad_bias is not None:
                    grad_bias[words] += slope_TB.sum(0)
        narrow = zip(grads, (hidden_TH, weight_VH, bias), strict=True)
        return (*(None if grad is None else grad.to(one.dtype) for grad, one in narrow), None, None, None, None)
