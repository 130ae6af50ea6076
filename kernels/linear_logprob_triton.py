"""The Triton form of linear_logprob's forward pass: log-probability, entropy, and the rows of the gradient to hidden.

A program takes a block of tokens through a part of the vocabulary: logits of a block in registers, online softmax, and
the sums over exp(logit) * weight kept in a part of memory that belongs to this program alone. So nothing is added
atomically, and the same call on the same device gives the same bits. Parts are joined by the same rescaling.

Axes: T tokens, H hidden size, V vocabulary, S parts of the vocabulary.
"""
# ruff: noqa: ANN001  (a kernel's arguments are pointers and numbers, which Triton types by itself)

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.kernels.linear_logprob import Sums, Wants

# What a program holds at a time; with these nothing spills on sm_90 (no GPU was at hand to measure speed by). The rows
# need registers of their own, so there a program takes fewer tokens.
BLOCK_TOKENS, BLOCK_TOKENS_ROWS = 128, 64
BLOCK_VOCAB = 128
BLOCK_HIDDEN = 64
NUM_WARPS, NUM_STAGES = 8, 3


@triton.jit  # type: ignore[untyped-decorator]
def _softmax_parts(  # type: ignore[no-untyped-def]
    hidden, weight, bias, targets, inverse,
    largest, totals, shifted, target_logits, rows, entropy_rows,
    num_tokens, vocabulary, size, stride_ht, stride_hh, stride_wv, stride_wh, blocks_per_part,
    HAS_BIAS: tl.constexpr, WANT_ENTROPY: tl.constexpr, WANT_ROWS: tl.constexpr, WANT_ENTROPY_ROWS: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_H: tl.constexpr,
) -> None:  # fmt: skip
    # int64: a matrix of 2 ** 31 elements is not rare.
    t = tl.program_id(0).to(tl.int64) * BLOCK_T + tl.arange(0, BLOCK_T)
    part = tl.program_id(1).to(tl.int64)
    t_mask = t < num_tokens
    h = tl.arange(0, BLOCK_H)
    target = tl.load(targets + t, mask=t_mask, other=-1)
    scale = tl.load(inverse + t, mask=t_mask, other=1.0)
    max_T = tl.full([BLOCK_T], -float("inf"), tl.float32)
    target_T = tl.full([BLOCK_T], -float("inf"), tl.float32)
    sum_T = tl.zeros([BLOCK_T], tl.float32)
    shifted_T = tl.zeros([BLOCK_T], tl.float32)
    out = (part * num_tokens + t)[:, None] * size
    for block in range(blocks_per_part):
        v = (part * blocks_per_part + block) * BLOCK_V + tl.arange(0, BLOCK_V)
        v_mask = v < vocabulary
        logits = tl.zeros([BLOCK_T, BLOCK_V], tl.float32)
        for start in range(0, size, BLOCK_H):
            h_mask = start + h < size
            hidden_TH = tl.load(
                hidden + t[:, None] * stride_ht + (start + h)[None, :] * stride_hh,
                mask=t_mask[:, None] & h_mask[None, :], other=0.0,
            )  # fmt: skip
            weight_HV = tl.load(
                weight + v[None, :] * stride_wv + (start + h)[:, None] * stride_wh,
                mask=v_mask[None, :] & h_mask[:, None], other=0.0,
            )  # fmt: skip
            logits = tl.dot(hidden_TH, weight_HV, logits, input_precision="ieee")
        if HAS_BIAS:
            logits += tl.load(bias + v, mask=v_mask, other=0.0).to(tl.float32)[None, :]
        logits = tl.where(v_mask[None, :], logits * scale[:, None], -float("inf"))

        is_target = v[None, :] == target[:, None]
        inside = tl.max(is_target.to(tl.int32), 1) > 0
        target_T = tl.where(inside, tl.max(tl.where(is_target, logits, -float("inf")), 1), target_T)
        new_max = tl.maximum(max_T, tl.max(logits, 1))
        # Before the first word that is not excluded there is no maximum to subtract.
        shift_T = tl.where(new_max == -float("inf"), 0.0, new_max)
        step_T = tl.where(max_T == -float("inf"), 0.0, max_T - shift_T)
        decay_T = tl.exp(step_T)
        logits -= shift_T[:, None]
        exp = tl.exp(logits)
        if WANT_ENTROPY:
            # An excluded word adds nothing, and 0 * -inf would be NaN.
            weighted = tl.maximum(logits, -1e4) * exp
            shifted_T = (shifted_T + step_T * sum_T) * decay_T + tl.sum(weighted, 1)
        sum_T = sum_T * decay_T + tl.sum(exp, 1)
        max_T = new_max
        if WANT_ROWS:
            narrow = exp.to(weight.dtype.element_ty)
            if WANT_ENTROPY_ROWS:
                shares = weighted.to(weight.dtype.element_ty)
            for start in range(0, size, BLOCK_H):
                h_mask = start + h < size
                weight_VH = tl.load(
                    weight + v[:, None] * stride_wv + (start + h)[None, :] * stride_wh,
                    mask=v_mask[:, None] & h_mask[None, :], other=0.0,
                )  # fmt: skip
                place = out + (start + h)[None, :]
                mask = t_mask[:, None] & h_mask[None, :]
                before = tl.load(rows + place, mask=mask, other=0.0)
                tl.store(
                    rows + place,
                    tl.dot(narrow, weight_VH, before * decay_T[:, None], input_precision="ieee"),
                    mask=mask,
                )
                if WANT_ENTROPY_ROWS:
                    moved = tl.load(entropy_rows + place, mask=mask, other=0.0) + before * step_T[:, None]
                    tl.store(
                        entropy_rows + place,
                        tl.dot(shares, weight_VH, moved * decay_T[:, None], input_precision="ieee"),
                        mask=mask,
                    )
            # The next block reads these sums back, perhaps in another thread.
            tl.debug_barrier()
    tl.store(largest + part * num_tokens + t, max_T, mask=t_mask)
    tl.store(totals + part * num_tokens + t, sum_T, mask=t_mask)
    tl.store(target_logits + part * num_tokens + t, target_T, mask=t_mask)
    if WANT_ENTROPY:
        tl.store(shifted + part * num_tokens + t, shifted_T, mask=t_mask)


def triton_sums(
    hidden_TH: Tensor,
    weight_VH: Tensor,
    bias: Tensor | None,
    targets_T: Tensor,
    inverse_T: Tensor,
    wants: Wants,
    num_parts: int | None = None,
) -> Sums:
    """The sums of softmax(inverse_T * (hidden @ weight.T + bias)) over the vocabulary, in float32.

    hidden and weight are float32 or narrower, of one dtype and on one device; products of narrow operands are
    accumulated in float32, and those of float32 ones are not rounded to TF32. `num_parts` defaults to as many as give
    every multiprocessor a program; the memory for rows is that many times [T, H].
    """
    num_tokens, size = hidden_TH.shape
    vocabulary = weight_VH.shape[0]
    block_tokens = BLOCK_TOKENS_ROWS if wants.rows else BLOCK_TOKENS
    token_blocks, vocab_blocks = triton.cdiv(num_tokens, block_tokens), triton.cdiv(vocabulary, BLOCK_VOCAB)
    if num_parts is None:
        # Triton's interpreter works on tensors of the CPU, and one program at a time.
        device = torch.cuda.get_device_properties(hidden_TH.device) if hidden_TH.is_cuda else None
        num_parts = device.multi_processor_count // token_blocks if device else 1
    blocks_per_part = triton.cdiv(vocab_blocks, min(max(num_parts, 1), vocab_blocks))
    num_parts = triton.cdiv(vocab_blocks, blocks_per_part)

    def zeros(*shape: int, wanted: bool = True) -> Tensor:
        return torch.zeros(shape if wanted else 0, dtype=torch.float32, device=hidden_TH.device)

    parts = Sums(
        largest=zeros(num_parts, num_tokens),
        total=zeros(num_parts, num_tokens),
        shifted=zeros(num_parts, num_tokens, wanted=wants.entropy),
        target=zeros(num_parts, num_tokens),
        rows=zeros(num_parts, num_tokens, size, wanted=wants.rows),
        entropy_rows=zeros(num_parts, num_tokens, size, wanted=wants.entropy_rows),
    )
    _softmax_parts[(token_blocks, num_parts)](
        hidden_TH, weight_VH, weight_VH if bias is None else bias, targets_T.contiguous(), inverse_T.contiguous(),
        *parts, num_tokens, vocabulary, size, *hidden_TH.stride(), *weight_VH.stride(), blocks_per_part,
        HAS_BIAS=bias is not None, WANT_ENTROPY=wants.entropy, WANT_ROWS=wants.rows,
        WANT_ENTROPY_ROWS=wants.entropy_rows, BLOCK_T=block_tokens, BLOCK_V=BLOCK_VOCAB, BLOCK_H=BLOCK_HIDDEN,
        num_warps=NUM_WARPS, num_stages=NUM_STAGES,
    )  # fmt: skip
    return _joined(parts)


def _joined(parts: Sums) -> Sums:
    """The parts [S, T] of the vocabulary, rescaled to one largest logit and added up."""
    largest_T = parts.largest.amax(0)
    step_ST = torch.where(parts.largest == -torch.inf, 0, parts.largest - largest_T)
    decay_ST = step_ST.exp()
    # In place and part by part: a temporary would be as large as the rows of all the parts together.
    for part, (step_T, decay_T) in enumerate(zip(step_ST[..., None], decay_ST[..., None], strict=True)):
        if parts.entropy_rows.numel():
            parts.entropy_rows[part].addcmul_(parts.rows[part], step_T).mul_(decay_T)
        if parts.rows.numel():
            parts.rows[part].mul_(decay_T)
    shifted_T = parts.shifted
    if shifted_T.numel():
        shifted_T = ((shifted_T + step_ST * parts.total) * decay_ST).sum(0)
    rows_TH, entropy_rows_TH = (one.sum(0) if one.numel() else one for one in (parts.rows, parts.entropy_rows))
    return Sums(
        largest_T, (parts.total * decay_ST).sum(0), shifted_T, parts.target.amax(0), rows_TH, entropy_rows_TH
    )
