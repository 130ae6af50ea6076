"""The options of `strop train`."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Literal

import typer

from strop.core.errors import UsageError
from strop.core.train.losses import OpsdChoice
from strop.core.train.policy import LoraOptions

DEFAULT_RANK = 16
LORA_RATE, FULL_RATE = 1e-4, 1e-6
# The released code's values (sheet nsd, 1.2).
GUARDS = {"logp-floor": -10.0, "prob-clamp": 1 - 1e-7, "loss-clamp": 0.5, "trust-ratio": 0.2}

Out = Annotated[
    Path,
    typer.Option("--out", metavar="DIR", help="Checkpoints go to DIR/v000001, ...; DIR/latest points to the newest."),
]
From = Annotated[
    Path | None,
    typer.Option(
        "--from", metavar="DIR",
        help="Go on from a checkpoint of `train`: weights, optimiser state, version. It may be --out itself, also "
        "while that is still empty (so that every turn of a loop has the same command).", show_default=False,
    ),
]  # fmt: skip
Resume = Annotated[
    bool,
    typer.Option(
        "--resume", help="Continue an interrupted run: same --out, options and input. Groups it has used are skipped."
    ),
]
Lora = Annotated[
    int | None,
    typer.Option("--lora", metavar="RANK", min=0, show_default=False,
                 help="Train a LoRA adapter of this rank; 0 trains all parameters. [default: 16]"),
]  # fmt: skip
LoraAlpha = Annotated[
    float | None,
    typer.Option("--lora-alpha", min=0, show_default=False,
                 help="The adapter's update is scaled by ALPHA/RANK. [default: twice the rank]"),
]  # fmt: skip
LoraTargets = Annotated[
    str, typer.Option("--lora-targets", metavar="NAMES", help="Layers that get an adapter, between commas.")
]
Loss = Annotated[
    Literal["ppo", "dppo", "reinforce", "nsd", "opsd", "sft"],
    typer.Option(
        "--loss", help="ppo: clipped ratio. dppo: FrogNano's token rule. reinforce: -A log p, no ratio. nsd: away from "
        "a negative self-teacher (`distill --nsd`). opsd: towards the frozen model that knows the solution (`distill "
        "--opsd`), over the whole vocabulary. sft: -log p of the successes among rollouts, and of sft records.",
    ),
]  # fmt: skip
Lr = Annotated[
    float | None,
    typer.Option("--lr", min=0, show_default=False,
                 help="Learning rate of AdamW. [default: 1e-4 with LoRA, 1e-6 for all parameters]"),
]  # fmt: skip
ClipLow = Annotated[float, typer.Option("--clip-low", min=0, max=1, help="ppo: no gradient below ratio 1 - LOW.")]
ClipHigh = Annotated[
    float, typer.Option("--clip-high", min=0, help="ppo: no gradient above ratio 1 + HIGH (DAPO: 0.28).")
]
DppoLow = Annotated[
    float, typer.Option("--dppo-low", min=0, max=1, help="dppo: drop A <= 0 tokens whose probability fell by more.")
]
DppoHigh = Annotated[
    float, typer.Option("--dppo-high", min=0, max=1, help="dppo: drop A > 0 tokens whose probability rose by more.")
]
DppoRatio = Annotated[
    Literal["frognano", "stable-rl"],
    typer.Option("--dppo-ratio", help="dppo: -A rho as in the paper, or the earlier code's detached ratio, at most 10, "
                 "times -A log p."),
]  # fmt: skip
KlCoef = Annotated[
    float,
    typer.Option("--kl-coef", min=0, help="Weight of a KL penalty to the reference: the model without its adapter, or "
                 "--model when all parameters move. 0: none, and no second pass."),
]  # fmt: skip
KlEstimator = Annotated[
    Literal["k1", "k2", "k3"],
    typer.Option("--kl-estimator", help="As a loss k2 has the KL's own gradient, k3 is GRPO's choice, and k1 has none "
                 "in expectation."),
]  # fmt: skip
EntropyCoef = Annotated[float, typer.Option("--entropy-coef", help="Weight of an entropy bonus; 0: none.")]
MismatchCap = Annotated[
    float,
    typer.Option("--mismatch-cap", min=0, help="Leave tokens out whose probability differs from the rollout's by more "
                 "than this factor (in the denominator they stay); 0: none."),
]  # fmt: skip
NsdAlpha = Annotated[
    float, typer.Option("--nsd-alpha", min=0, help="nsd: weight of the anchor, the paper's alpha.")
]
NsdPenalty = Annotated[
    Literal["bounded", "unbounded", "npo"],
    typer.Option("--nsd-penalty", help="nsd: G / (2 - p) as in the paper, plain unlikelihood -G log(1 - p), or NPO's."),
]  # fmt: skip
NsdAnchor = Annotated[
    Literal["paper", "importance", "full", "k1", "none"],
    typer.Option("--anchor", help="nsd: p_ref log(p_ref / p) of the sampled token as in the paper, which pulls towards "
                 "the reference's mode; importance: w log w with w = p_ref / p, unbiased for KL(ref || policy); full: "
                 "that KL over the whole vocabulary; k1: log(p / p_ref); none."),
]  # fmt: skip
NsdGradient = Annotated[
    Literal["supervised", "policy"],
    typer.Option("--nsd-gradient", help="nsd: through p at fixed samples, or -L as the advantage of a policy gradient "
                 "(the paper's Appendix D.3)."),
]  # fmt: skip
NsdGuards = Annotated[
    str,
    typer.Option("--nsd-guards", metavar="NAME=VALUE,...", help="nsd: the released code's guards, all off here: "
                 "logp-floor=-10, prob-clamp=0.9999999, loss-clamp=0.5, trust-ratio=0.2; `code` means these four."),
]  # fmt: skip
OpsdDivergence = Annotated[
    Literal["jsd", "forward", "reverse"],
    typer.Option("--opsd-divergence", help="opsd: the generalised Jensen-Shannon divergence (the released code), "
                 "KL(teacher || policy) or KL(policy || teacher)."),
]  # fmt: skip
OpsdBeta = Annotated[
    float, typer.Option("--opsd-beta", help="opsd: the teacher's share in the mixture of jsd, between 0 and 1.")
]
Denominator = Annotated[
    Literal["token", "sequence", "constant", "sum"] | None,
    typer.Option("--denominator", show_default=False,
                 help="token: sum over tokens divided by all trained tokens of the update; sequence: mean over "
                 "rollouts of each one's mean; constant: by rollouts times --constant-tokens (Dr. GRPO); sum: by "
                 "rollouts. [default: token; with nsd, as in the paper, sum]"),
]  # fmt: skip
ConstantTokens = Annotated[
    int, typer.Option("--constant-tokens", min=0, help="For --denominator constant, e.g. rollout's --max-tokens.")
]
SkipZero = Annotated[
    bool,
    typer.Option("--skip-zero-advantage", help="Leave rollouts with advantage 0 out altogether. Otherwise they count "
                 "in the denominator and get the gradient of a KL or entropy term."),
]  # fmt: skip
AllowTruncated = Annotated[
    bool,
    typer.Option("--allow-truncated-sampling", help="Train on rollouts whose log-probabilities are not those of the "
                 "policy that sampled (top-p, top-k, greedy); the gradient is biased."),
]  # fmt: skip
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Updates made with each batch, one after the other.")]
BatchGroups = Annotated[
    int, typer.Option("--batch-groups", min=0, help="Groups an update; 0: the whole input is one update.")
]
PackTokens = Annotated[int, typer.Option("--pack-tokens", min=1, help="Tokens of a forward pass. Changes speed only.")]
MaxGradNorm = Annotated[float, typer.Option("--max-grad-norm", min=0, help="Clip the gradient's norm; 0: never.")]
WeightDecay = Annotated[float, typer.Option("--weight-decay", min=0, help="AdamW's.")]
Betas = Annotated[str, typer.Option("--betas", metavar="B1,B2", help="AdamW's (FrogNano: 0.9,0.98).")]
Warmup = Annotated[int, typer.Option("--warmup", min=0, help="Updates over which the rate rises; then it is constant.")]
Seed = Annotated[int, typer.Option("--seed", help="For the adapter's first weights; nothing else is random.")]
FreshOptimizer = Annotated[
    bool, typer.Option("--fresh-optimizer", help="With --from: take the weights only (FrogNano does, every round).")
]
SaveEvery = Annotated[
    int, typer.Option("--save-every", min=0, help="A checkpoint after so many batches; 0: only at the end.")
]
Keep = Annotated[int, typer.Option("--keep", min=0, help="Remove all but the newest checkpoints of --out; 0: none.")]
WithCritic = Annotated[
    bool,
    typer.Option("--critic", help="Train a critic beside the policy, first, on `returns` of `advantage --gae`; it "
                 "lives in the checkpoint's folder `critic`."),
]  # fmt: skip
CriticOnly = Annotated[
    bool, typer.Option("--critic-only", help="Train the critic and leave the policy as it is: warm-up, recalibration.")
]
CriticFrom = Annotated[
    Path | None,
    typer.Option("--critic-from", metavar="DIR", show_default=False,
                 help="Take the critic's weights from this checkpoint, and a new optimiser for it."),
]  # fmt: skip
CriticLr = Annotated[
    float | None,
    typer.Option("--critic-lr", min=0, show_default=False,
                 help="Learning rate of the critic. [default: 15 times --lr, T1's ratio]"),
]  # fmt: skip
ValueClip = Annotated[
    float, typer.Option("--value-clip", min=0, help="Hold the critic's values this near to those before; 0: do not.")
]
RoutingReplay = Annotated[
    Literal["auto", "on", "off"],
    typer.Option("--routing-replay", help="Mixture of experts: use the experts that `rollout --routing` recorded. on: "
                 "every rollout has them; auto: all or none, as the first one; off: the model chooses."),
]  # fmt: skip


def rate(given: float | None, rank: int) -> float:
    """The learning rate: as named, else what suits an adapter or all parameters."""
    return (LORA_RATE if rank else FULL_RATE) if given is None else given


def lora_options(rank: int, alpha: float | None, targets: str) -> LoraOptions | None:
    """The adapter to make; None for rank 0, which trains all parameters."""
    return LoraOptions(rank, alpha or 2.0 * rank, tuple(targets.split(","))) if rank else None


def parse_guards(text: str) -> dict[str, float]:
    """NAME=VALUE,... or `code`, as fields of NsdChoice. Raises UsageError."""
    if text == "code":
        return {name.replace("-", "_"): value for name, value in GUARDS.items()}
    found = {}
    for part in text.split(",") if text else ():
        name, _, value = part.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = math.nan
        fits = {"logp-floor": number < 0, "prob-clamp": 0 < number < 1, "loss-clamp": number > 0,
                "trust-ratio": 0 < number < 1}.get(name)  # fmt: skip
        if not fits or not math.isfinite(number):
            known = ",".join(f"{one}={default:g}" for one, default in GUARDS.items())
            raise UsageError(f"--nsd-guards {part!r}: expected some of {known}, or code")
        found[name.replace("-", "_")] = number
    return found


def opsd_choice(divergence: str, beta: float) -> OpsdChoice:
    """OPSD's loss. Raises UsageError for a beta that is none."""
    if not 0 < beta < 1:
        raise UsageError(f"--opsd-beta {beta:g}: expected a number between 0 and 1 (its limits are the two KLs)")
    return OpsdChoice(divergence, beta)


def parse_betas(text: str) -> tuple[float, float]:
    """AdamW's two numbers. Raises UsageError."""
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--betas {text!r}: expected two numbers, e.g. 0.9,0.999") from None
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UsageError(f"--betas {text}: both lie in [0, 1)")
    return first, second
