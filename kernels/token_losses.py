"""The token losses of NSD and the pair loss of RTO, with their gradients in closed form.

Both read scalars only (log-probabilities of sampled tokens, or of whole branches), so value and slope are a few
element-wise products: the slope is saved instead of a graph, and stays finite where autograd through exp and log would
give inf * 0.

Axes: T tokens, in any order; P pairs of branches; K successful branches of one state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid, softplus

PENALTIES = ("bounded", "unbounded", "npo")
ANCHORS = ("paper", "importance", "k1", "none")
# A log-probability below this counts as this, so that -inf stays out of the arithmetic: exp(-80) is normal in float32.
MIN_LOGPROB = -80.0
# The importance weight of a token that the student all but excludes must not become infinite.
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class NsdOptions:
    """Which form of NSD's loss; the defaults are the paper's (NSD, Eq. 3-5), and the guards are off.

    `penalty`: "bounded" is G / (2 - p), "unbounded" is -G log(1 - p), "npo" is G (2 / b) softplus(b log(p / p_ref))
    with b = `npo_beta` (the earlier work's is per sequence, ours per token). `anchor`: "paper" is
    p_ref log(p_ref / p), "importance" is w log w with w = p_ref / p, "k1" is log(p / p_ref), "none" leaves it out;
    `alpha` multiplies it.

    Only "importance" has the expectation KL(p_ref || p) over tokens of the student. With the tokens held fixed its
    gradient is zero on average where student and reference agree; the paper's pulls towards the reference's mode there.

    The guards of the released code, None for off: `logp_floor` (-10 there) holds the log-probabilities above it,
    `prob_clamp` (1 - 1e-7) the student's p in the penalty below it, `loss_clamp` (0.5) the token's loss within +-; what
    a clamp holds has no gradient. `trust_ratio` (0.2) takes a token out once p / p_old < 1 - trust_ratio. Raises
    ValueError for a name or a number that makes no sense.
    """

    penalty: str = "bounded"
    anchor: str = "paper"
    alpha: float = 0.01
    npo_beta: float = 0.1
    logp_floor: float | None = None
    prob_clamp: float | None = None
    loss_clamp: float | None = None
    trust_ratio: float | None = None

    def __post_init__(self) -> None:
        if self.penalty not in PENALTIES:
            raise ValueError(f"penalty {self.penalty!r} is none of {', '.join(PENALTIES)}")
        if self.anchor not in ANCHORS:
            raise ValueError(f"anchor {self.anchor!r} is none of {', '.join(ANCHORS)}")
        if not 0 <= self.alpha < math.inf:
            raise ValueError(f"alpha {self.alpha} must be finite and not negative")
        if not 0 < self.npo_beta < math.inf:
            raise ValueError(f"npo_beta {self.npo_beta} must be finite and positive")
        if self.logp_floor is not None and not MIN_LOGPROB <= self.logp_floor < 0:
            raise ValueError(f"logp_floor {self.logp_floor} must be negative, and at least {MIN_LOGPROB:g}")
        if self.loss_clamp is not None and not self.loss_clamp > 0:
            raise ValueError(f"loss_clamp {self.loss_clamp} must be positive")
        for name in ("prob_clamp", "trust_ratio"):
            number = getattr(self, name)
            if number is not None and not 0 < number < 1:
                raise ValueError(f"{name} {number} must lie between 0 and 1")


class NsdLoss(NamedTuple):
    """Per token, each [T]: `loss` carries the gradient, the rest is for the log.

    `push` is the gated penalty and `anchor` the anchor before alpha, both before clamp and mask; `clipped` marks losses
    that `loss_clamp` holds, `masked` tokens that `trust_ratio` takes out (their loss is 0).
    """

    loss: Tensor
    push: Tensor
    anchor: Tensor
    clipped: Tensor
    masked: Tensor


def nsd_gate(
    logp_ref_T: Tensor,
    logp_neg_T: Tensor,
    *,
    form: Literal["probability", "log"] = "probability",
    logp_floor: float | None = None,
) -> Tensor:
    """How much likelier a token is under the negative condition: max(0, p_neg - p_ref), in [0, 1] (NSD, Eq. 2).

    `form` "log" is the released code's max(0, log p_neg - log p_ref), in nats. `logp_floor` is that of NsdOptions. No
    gradient. Raises ValueError for another form.

    >>> nsd_gate(torch.tensor([0.2]).log(), torch.tensor([0.5]).log())
    tensor([0.3000])
    """
    if form not in ("probability", "log"):
        raise ValueError(f"gate {form!r} is neither probability nor log")
    ref_T, neg_T = (_held(one.detach(), logp_floor) for one in (logp_ref_T, logp_neg_T))
    if form == "log":
        return (neg_T - ref_T).clamp(min=0)
    return (neg_T.exp() - ref_T.exp()).clamp(min=0)


def nsd_losses(
    logprobs_T: Tensor,
    logp_ref_T: Tensor,
    gate_T: Tensor | None,
    old_T: Tensor | None,
    options: NsdOptions,
) -> NsdLoss:
    """NSD's token loss: gated penalty + alpha * anchor (NSD, Eq. 5), without a denominator.

    `logprobs_T` are the student's log-probabilities in nats, the only input with a gradient; `logp_ref_T` the frozen
    reference's; `gate_T` is nsd_gate's, or None for 1 everywhere (the ablation without a gate). `old_T`, the
    log-probabilities of the rollout, is read for `trust_ratio` only, and where it is NaN a token stays in. Results are
    float32 (float64 for float64 input) and finite at p = 0, at p = 1, and where the reference excludes a token (our
    choice: log-probabilities count as at least -80, and 1 - p in the unbounded penalty as at least one rounding error;
    its slope is held there, too, so that the push remains).

    >>> log = torch.tensor([0.3, 0.2, 0.5]).log()
    >>> gate = nsd_gate(log[1:2], log[2:])
    >>> nsd_losses(log[:1], log[1:2], gate, None, NsdOptions()).loss
    tensor([0.1757])
    """
    raw_T = logprobs_T.detach()
    logp_T, ref_T = _held(raw_T, options.logp_floor), _held(logp_ref_T.detach(), options.logp_floor)
    penalty_T, penalty_slope_T = _penalty(logp_T, ref_T, options)
    gate_T = torch.ones_like(penalty_T) if gate_T is None else gate_T.detach().to(penalty_T.dtype)
    push_T = gate_T * penalty_T
    anchor_T, anchor_slope_T = _anchor(logp_T, ref_T, options.anchor)
    loss_T = push_T + options.alpha * anchor_T
    slope_T = gate_T * penalty_slope_T + options.alpha * anchor_slope_T
    still_T = raw_T < (MIN_LOGPROB if options.logp_floor is None else options.logp_floor)
    masked_T = clipped_T = torch.zeros_like(still_T)
    if options.trust_ratio is not None:
        if old_T is None:
            raise ValueError("trust_ratio compares with the rollout's log-probabilities, and there are none")
        masked_T = raw_T - old_T < math.log1p(-options.trust_ratio)
    if options.loss_clamp is not None:
        clipped_T = (loss_T.abs() > options.loss_clamp) & ~masked_T
        loss_T = loss_T.clamp(-options.loss_clamp, options.loss_clamp)
    slope_T = slope_T.masked_fill(still_T | clipped_T | masked_T, 0)
    loss_T = _Closed.apply(logprobs_T, loss_T.masked_fill(masked_T, 0), slope_T)  # type: ignore[no-untyped-call]
    return NsdLoss(loss_T, push_T, anchor_T, clipped_T, masked_T)


def _held(logprobs_T: Tensor, floor: float | None) -> Tensor:
    """In the wide dtype, within [floor, 0]: rounding may have left a log-probability just above 0."""
    wide = torch.float64 if logprobs_T.dtype == torch.float64 else torch.float32
    return logprobs_T.to(wide).clamp(MIN_LOGPROB if floor is None else floor, 0)


def _penalty(logp_T: Tensor, ref_T: Tensor, options: NsdOptions) -> tuple[Tensor, Tensor]:
    """The penalty before the gate, and its slope in log p."""
    if options.penalty == "npo":
        scaled_T = options.npo_beta * (logp_T - ref_T)
        return softplus(scaled_T) * (2 / options.npo_beta), 2 * torch.sigmoid(scaled_T)
    cap = 0.0 if options.prob_clamp is None else math.log(options.prob_clamp)
    held_T = logp_T.clamp(max=cap)
    if options.penalty == "bounded":
        # sigmoid(-log(1 - p)) = 1 / (2 - p).
        p_T = held_T.exp()
        value_T = (2 - p_T).reciprocal()
        slope_T = p_T * value_T.square()
    else:
        held_T = held_T.clamp(max=-torch.finfo(held_T.dtype).eps)
        value_T = -torch.log(-torch.expm1(held_T))
        slope_T = torch.expm1(-held_T).reciprocal()
    return value_T, slope_T.masked_fill(logp_T > cap, 0)


def _anchor(logp_T: Tensor, ref_T: Tensor, anchor: str) -> tuple[Tensor, Tensor]:
    """The anchor before alpha, and its slope in log p."""
    if anchor == "none":
        return torch.zeros_like(logp_T), torch.zeros_like(logp_T)
    log_ratio_T = ref_T - logp_T
    if anchor == "k1":
        return -log_ratio_T, torch.ones_like(logp_T)
    if anchor == "paper":
        p_ref_T = ref_T.exp()
        return p_ref_T * log_ratio_T, -p_ref_T
    held_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    weight_T = held_T.exp()
    slope_T = -weight_T * (held_T + 1)
    return weight_T * held_T, slope_T.masked_fill(held_T != log_ratio_T, 0)


class RtoLoss(NamedTuple):
    """Per pair, each [P]: `loss` carries the gradient; the model's `margin` m and `probability` sigmoid(b m)."""

    loss: Tensor
    margin: Tensor
    probability: Tensor


def rto_target_distribution(logp_ref_K: Tensor, *, alpha: float = 0.5) -> Tensor:
    """The target q over the successes of one state, proportional to q_ref to the power `alpha` [K] (DDO, Eq. 2-3).

    `logp_ref_K` are summed log-probabilities, in nats; `alpha` 0 is uniform, 1 keeps the reference's odds. Raises
    ValueError where a log-probability is not finite, or an odds ratio too wild for q to be positive.
    """
    q_K = torch.softmax(alpha * logp_ref_K.detach(), 0)
    if not bool((q_K > 0).all()):
        raise ValueError("the target of a success is not positive: a log-probability is not finite, or too small")
    return q_K


def rto_target_probability(
    logp_ref_u_P: Tensor, logp_ref_v_P: Tensor, *, alpha: float = 0.5, beta: float = 0.1
) -> Tensor:
    """p* = sigmoid(beta m*) of pairs of successes, with m* = (alpha - 1) (L_u - L_v) (DDO, Eq. 4 in closed form) [P].

    L are the reference's summed log-probabilities of the branches; the less likely one of a pair is raised. The target
    of a success over a failure is 1, whatever the reference says.

    >>> rto_target_probability(torch.tensor([-1.0]), torch.tensor([-3.0]))
    tensor([0.4750])
    """
    return torch.sigmoid(beta * (alpha - 1) * (logp_ref_u_P - logp_ref_v_P).detach())


def rto_losses(
    logp_u_P: Tensor,
    logp_v_P: Tensor,
    logp_ref_u_P: Tensor,
    logp_ref_v_P: Tensor,
    target_P: Tensor,
    *,
    beta: float = 0.1,
) -> RtoLoss:
    """KL(Bern(p*) || Bern(p)) with p = sigmoid(beta m), m = log(pi_u / pi_v) - log(pi_ref_u / pi_ref_v) (DDO, Eq. 5-6).

    All in nats, summed over a branch's tokens; the gradient is beta (p - p*) to `logp_u_P` and its opposite to
    `logp_v_P`. `target_P` is p* in [0, 1]; at 1 the loss is DPO's, -log sigmoid(beta m). No weights, no denominator.
    """
    margin_P = (logp_u_P - logp_v_P) - (logp_ref_u_P - logp_ref_v_P).detach()
    scaled_P = beta * margin_P.detach()
    probability_P, target_P = torch.sigmoid(scaled_P), target_P.detach().to(scaled_P.dtype)
    entropy_P = -(torch.xlogy(target_P, target_P) + torch.xlogy(1 - target_P, 1 - target_P))
    cross_P = -(target_P * logsigmoid(scaled_P) + (1 - target_P) * logsigmoid(-scaled_P))
    # clamp: rounding may leave a difference of equals below 0.
    loss_P = (cross_P - entropy_P).clamp(min=0)
    loss_P = _Closed.apply(margin_P, loss_P, beta * (probability_P - target_P))  # type: ignore[no-untyped-call]
    return RtoLoss(loss_P, margin_P.detach(), probability_P)


class _Closed(torch.autograd.Function):
    """An element-wise function whose value and slope are known already."""

    @staticmethod
    def forward(ctx: Any, argument: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        ctx.dtype = argument.dtype
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return (grad * slope).to(ctx.dtype), None, None
