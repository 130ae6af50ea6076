"""Logits of a block of the vocabulary at a time, in the precision that sums are kept in.

Axes: T tokens, H hidden size, V vocabulary, B words of a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

# 2,048 x 2,048 float32 logits are 16 MiB. Long token blocks keep the matrix products efficient, and a vocabulary block
# is converted to float32 once per token block.
BLOCK_TOKENS = 2048
BLOCK_VOCAB = 2048
# Products of narrow operands into float32 came to torch.mm with 2.8; before, the operands are converted.
NARROW_PRODUCTS = torch.__version__ >= (2, 8)  # type: ignore[operator]


def inverse_temperature(temperature: float | Tensor, hidden_TH: Tensor) -> Tensor:
    """1 / temperature for each token [T]; ValueError unless positive, and one number or one for each token."""
    temperature_T = torch.as_tensor(temperature, dtype=wide_dtype(hidden_TH.dtype), device=hidden_TH.device)
    if temperature_T.dim() and temperature_T.shape != hidden_TH.shape[:1]:
        raise ValueError(f"{tuple(temperature_T.shape)} temperatures for {hidden_TH.shape[0]} tokens")
    if not bool((temperature_T > 0).all()):
        raise ValueError("the temperature must be positive")
    return temperature_T.reciprocal().detach().expand(hidden_TH.shape[0])


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are kept in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operand(tensor: Tensor) -> Tensor:
    """What enters a matrix product: narrow types stay so on an accelerator, whose products accumulate in float32.

    A CPU's bfloat16 product rounds its result to bfloat16 (an error of 0.06 on a logit of 16) and, where the CPU has no
    bfloat16 instructions, is also many times slower than the converted one.
    """
    return tensor if tensor.is_cuda and NARROW_PRODUCTS else tensor.to(wide_dtype(tensor.dtype))


def product(left: Tensor, right: Tensor) -> Tensor:
    """`left @ right` in the wide dtype."""
    if right.is_cuda and right.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(left.to(right.dtype), right, out_dtype=torch.float32)
    return left @ right


def logit_blocks(
    hidden_TH: Tensor, weight_VH: Tensor, bias: Tensor | None, inverse_T: Tensor, block: int
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """(first word, weight block as an operand, logits over the temperature [T, B]) for each block of the vocabulary.

    The logits may be overwritten, and are gone with the next block: on a CPU all blocks share one piece of memory,
    which would otherwise exist twice, and be asked for anew, page by page, each time.
    """
    operand_TH = operand(hidden_TH)
    # Scaling the states costs less than a pass over the logits; narrow states would be rounded once more.
    is_scaled = bias is None and operand_TH.dtype == inverse_T.dtype
    if is_scaled:
        operand_TH = operand_TH * inverse_T[:, None]
    num_tokens, vocabulary = hidden_TH.shape[0], weight_VH.shape[0]
    shared = operand_TH.new_empty(0 if operand_TH.is_cuda else num_tokens * min(block, vocabulary))
    for start in range(0, vocabulary, block):
        weight_BH = operand(weight_VH[start : start + block])
        if operand_TH.is_cuda:
            logits_TB = product(operand_TH, weight_BH.T)
        else:
            logits_TB = shared[: num_tokens * weight_BH.shape[0]].view(num_tokens, weight_BH.shape[0])
            torch.mm(operand_TH, weight_BH.T, out=logits_TB)
        if bias is not None:
            logits_TB += bias[start : start + block]
        yield start, weight_BH, logits_TB if is_scaled else logits_TB.mul_(inverse_T[:, None])
