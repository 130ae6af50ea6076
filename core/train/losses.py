"""The losses, a number per token: pure functions of tensors, to be read beside their papers.

Whoever sums must do so exactly whatever the split: the weight of each token is fixed over the whole optimiser batch
(`token_weights`), and micro-batches only add up `weight * loss`. Masked and clipped tokens stay in the denominator.

Axes: T trained tokens, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

LOSSES = ("ppo", "dppo", "reinforce", "nsd", "opsd", "sft")
KL_ESTIMATORS = ("k1", "k2", "k3")
DENOMINATORS = ("token", "sequence", "constant", "sum")
NSD_PENALTIES = ("bounded", "unbounded", "npo")
NSD_ANCHORS = ("paper", "importance", "full", "k1", "none")
NSD_GRADIENTS = ("supervised", "policy")
DPPO_RATIOS = ("frognano", "stable-rl")
# exp() of a wild log-ratio must not become infinite: inf * 0 would poison the sum of the batch.
MAX_LOG_RATIO = 20.0
STABLE_RL_MAX_RATIO = 10.0


@dataclass(frozen=True, slots=True)
class NsdChoice:
    """NSD's loss: which penalty and anchor, and the released code's guards, all off unless named (sheet nsd, 1.2).

    `anchor` "full" is KL(pi_ref || pi) over the whole vocabulary. `gradient` "policy" is Appendix D.3: -L, detached, as
    the advantage of a policy gradient. Guards, 0 for none: a floor under all log-probabilities, the largest p, a bound
    on each token's loss, and the fall of p / p_old from which on a token counts no more.
    """

    alpha: float = 0.01
    penalty: str = "bounded"
    anchor: str = "paper"
    gradient: str = "supervised"
    logp_floor: float = 0.0
    prob_clamp: float = 0.0
    loss_clamp: float = 0.0
    trust_ratio: float = 0.0


@dataclass(frozen=True, slots=True)
class OpsdChoice:
    """OPSD's loss: the divergence from the frozen model that knows the solution, over the whole vocabulary.

    "jsd" is the generalised Jensen-Shannon divergence with `beta` (the released code: 0.5; sheet
    distillation-relatives), "forward" KL(teacher || policy), "reverse" KL(policy || teacher).
    """

    divergence: str = "jsd"
    beta: float = 0.5


@dataclass(frozen=True, slots=True)
class LossOptions:
    """Which loss, and its constants.

    `dppo_ratio`: "frognano" lets the gradient through the ratio as the sheet writes it, "stable-rl" is the released
    code of the earlier work: ratio detached, at most 10, times the log-probability. `mismatch_cap` C > 1 masks tokens
    whose probability differs from the rollout's by more than the factor C; 0 masks none.
    """

    loss: str = "ppo"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dppo_low: float = 0.2
    dppo_high: float = 0.2
    dppo_ratio: str = "frognano"
    kl_coef: float = 0.0
    kl_estimator: str = "k3"
    entropy_coef: float = 0.0
    mismatch_cap: float = 0.0
    nsd: NsdChoice = NsdChoice()
    opsd: OpsdChoice = OpsdChoice()

    @property
    def needs_old(self) -> bool:
        """Whether the loss compares with the log-probabilities of the rollout."""
        trusts = self.loss == "nsd" and self.nsd.trust_ratio > 0
        return self.loss in ("ppo", "dppo") or self.mismatch_cap > 0 or trusts

    @property
    def divergence(self) -> tuple[str, float] | None:
        """The divergence from the frozen model that the loss asks for, and its beta (read for "jsd"); None for none."""
        if self.loss == "opsd":
            return self.opsd.divergence, self.opsd.beta
        return ("forward", 0.0) if self.loss == "nsd" and self.nsd.anchor == "full" else None

    @property
    def needs_reference(self) -> bool:
        """Whether the loss asks for the frozen model's distributions."""
        return self.kl_coef > 0 or self.divergence is not None


@dataclass(slots=True)
class TokenLoss:
    """Per token: the loss, whether clipping stops its gradient, and whether a mask leaves it out of the numerator.

    `parts` are terms of the loss by name, for the log.
    """

    loss: Tensor
    clipped: Tensor
    masked: Tensor
    parts: dict[str, Tensor] = field(default_factory=dict)


def ratios(logprobs_T: Tensor, old_T: Tensor) -> Tensor:
    """Importance ratios p_t / q_t of the policy to the rollout; log-ratios are held within +-20."""
    return (logprobs_T - old_T).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def token_losses(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, options: LossOptions) -> TokenLoss:
    """The policy's part of the loss (nats times advantage), without penalties and without a denominator.

    `old_T` is read only where `options.needs_old`. The mismatch mask applies to every loss but sft.
    """
    import torch

    none_T = torch.zeros_like(logprobs_T, dtype=torch.bool)
    if options.loss == "sft":
        return TokenLoss(-logprobs_T, none_T, none_T)
    if options.loss == "reinforce":
        result = TokenLoss(-advantages_T * logprobs_T, none_T, none_T)
    elif options.loss == "ppo":
        result = ppo(logprobs_T, old_T, advantages_T, options.clip_low, options.clip_high)
    else:
        result = dppo(
            logprobs_T, old_T, advantages_T, low=options.dppo_low, high=options.dppo_high, ratio=options.dppo_ratio
        )
    if options.mismatch_cap:
        result.masked = result.masked | mismatch_mask(logprobs_T, old_T, options.mismatch_cap)
        result.loss = result.loss.masked_fill(result.masked, 0)
    return result


def nsd(
    logprobs_T: Tensor, logp_ref_T: Tensor, gate_T: Tensor, old_T: Tensor, choice: NsdChoice,
    divergence_T: Tensor | None = None,
) -> TokenLoss:  # fmt: skip
    """Gated unlikelihood plus alpha times the anchor (NSD, Eqs. 3 to 5), in nats; kernels/token_losses.py says how.

    `divergence_T` is KL(pi_ref || pi) in full, for that anchor; `old_T` is read for the trust mask alone.
    """
    from strop.kernels.token_losses import NsdOptions, nsd_losses

    options = NsdOptions(
        alpha=choice.alpha, penalty=choice.penalty, anchor="none" if choice.anchor == "full" else choice.anchor,
        logp_floor=choice.logp_floor or None, prob_clamp=choice.prob_clamp or None,
        loss_clamp=choice.loss_clamp or None, trust_ratio=choice.trust_ratio or None,
    )  # fmt: skip
    made = nsd_losses(logprobs_T, logp_ref_T, gate_T, old_T, options)
    loss_T, anchor_T = made.loss, made.anchor
    if divergence_T is not None:
        loss_T, anchor_T = loss_T + choice.alpha * divergence_T, divergence_T.detach()
    if choice.gradient == "policy":
        loss_T = loss_T.detach() * logprobs_T
    return TokenLoss(loss_T, made.clipped, made.masked, {"push": made.push, "anchor": anchor_T, "gate": gate_T})


def opsd(divergence_T: Tensor) -> TokenLoss:
    """The divergence from the teacher is the loss itself, in nats."""
    import torch

    none_T = torch.zeros_like(divergence_T, dtype=torch.bool)
    return TokenLoss(divergence_T, none_T, none_T)


def ppo(logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, low: float, high: float) -> TokenLoss:
    """-min(rho A, clip(rho, 1 - low, 1 + high) A): PPO (arXiv:1707.06347, equation 7), with two bounds as in DAPO.

    `clipped` marks the tokens without gradient: A > 0 and rho above, or A < 0 and rho below.
    """
    import torch

    ratio_T = ratios(logprobs_T, old_T)
    bounded_T = ratio_T.clamp(1 - low, 1 + high)
    loss_T = -torch.minimum(ratio_T * advantages_T, bounded_T * advantages_T)
    above_T = (advantages_T > 0) & (ratio_T > 1 + high)
    below_T = (advantages_T < 0) & (ratio_T < 1 - low)
    return TokenLoss(loss_T, above_T | below_T, torch.zeros_like(above_T))


def dppo(
    logprobs_T: Tensor, old_T: Tensor, advantages_T: Tensor, *, low: float, high: float, ratio: str = "frognano"
) -> TokenLoss:
    """-A rho on the tokens kept; dropped are A > 0 with p - q > high, and A <= 0 with p - q < -low (probabilities).

    Sheet frognano, section 1.5 (the paper's section 4.1; earlier work: DPPO, arXiv:2602.04879, binary TV). The
    denominator stays all trainable tokens. With `ratio` "stable-rl": -A min(rho, 10) log p, the ratio detached.
    """
    drop_T = dppo_drops(logprobs_T.detach().exp(), old_T.exp(), advantages_T, low, high)
    ratio_T = ratios(logprobs_T, old_T)
    if ratio == "stable-rl":
        loss_T = -advantages_T * ratio_T.detach().clamp(max=STABLE_RL_MAX_RATIO) * logprobs_T
    else:
        loss_T = -advantages_T * ratio_T
    return TokenLoss(loss_T.masked_fill(drop_T, 0), drop_T.new_zeros(drop_T.shape), drop_T)


def dppo_drops(p_T: Tensor, q_T: Tensor, advantages_T: Tensor, low: float, high: float) -> Tensor:
    """The rule itself, on probabilities: p of the policy in training, q of the rollout."""
    difference_T = p_T - q_T
    return ((advantages_T > 0) & (difference_T > high)) | ((advantages_T <= 0) & (difference_T < -low))


def mismatch_mask(logprobs_T: Tensor, old_T: Tensor, cap: float) -> Tensor:
    """True where p/q > cap or p/q < 1/cap.

    Our choice: as in IcePop (Ring-1T, arXiv:2510.18855) but on the current policy, so that it needs no second pass; at
    the first step after a rollout both are the same.
    """
    import math

    return (logprobs_T.detach() - old_T).abs() > math.log(cap)


def kl_estimates(logprobs_T: Tensor, reference_T: Tensor, estimator: str) -> Tensor:
    """KL(policy || reference) of sampled tokens, with d = log p - log r: k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d.

    Source: Schulman, "Approximating KL divergence" (2020). As a loss, k2 has the gradient of the KL on policy; the
    gradient of k1 is zero in expectation, and that of k3 (GRPO's choice) is the forward KL's.
    """
    import torch

    difference_T = logprobs_T - reference_T
    if estimator == "k1":
        return difference_T
    if estimator == "k2":
        return difference_T.square() / 2
    return torch.expm1((-difference_T).clamp(max=MAX_LOG_RATIO)) + difference_T


def token_weights(num_trained: Sequence[int], denominator: str, constant: int = 0) -> list[float]:
    """The weight of each token of each rollout, for an optimiser batch of rollouts with so many trained tokens.

    "token": 1 / all tokens. "sequence": 1 / (rollouts x the rollout's tokens), every rollout counts the same.
    "constant": 1 / (rollouts x constant), Dr. GRPO's (arXiv:2503.20783), no bias towards short failures.
    "sum": 1 / rollouts, the sum over a rollout's tokens (NSD, Eq. 6).
    """
    total, rollouts = sum(num_trained), len(num_trained)
    if denominator == "token":
        return [1 / total] * rollouts
    if denominator == "sequence":
        return [1 / (rollouts * count) for count in num_trained]
    return [1 / (rollouts * (1 if denominator == "sum" else constant))] * rollouts
