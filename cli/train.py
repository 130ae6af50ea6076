"""strop train: rollouts with advantages in, a better model out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from strop import __version__
from strop.cli import model_options as models
from strop.cli.session import Session, tool
from strop.core.errors import UsageError
from strop.core.records import Record
from strop.core.train.batches import BatchReader, Counts
from strop.core.train.examples import Reading
from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions
from strop.core.train.policy import LoraOptions
from strop.core.train.run import Run, RunOptions, Start, Update, find_start
from strop.core.train.setup import Opener, SetupOptions

DEFAULT_RANK = 16
LORA_RATE, FULL_RATE = 1e-4, 1e-6

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
    Literal["ppo", "dppo", "reinforce", "sft"],
    typer.Option(
        "--loss", help="ppo: clipped ratio. dppo: FrogNano's token rule. reinforce: -A log p, no ratio. sft: -log p of "
        "the successes among rollouts, and of sft records.",
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
Denominator = Annotated[
    Literal["token", "sequence", "constant"],
    typer.Option("--denominator", help="Sum over tokens divided by all trained tokens of the update; mean over "
                 "rollouts of each one's mean; or by rollouts times --constant-tokens (Dr. GRPO)."),
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


@tool(reads=("rollout", "sft"), writes=("metric", "checkpoint"), slow=True)
def command(
    io: Session,
    out: Out,
    model: models.Model = None,
    adapter: models.Adapter = None,
    from_: From = None,
    resume: Resume = False,
    lora: Lora = None,
    lora_alpha: LoraAlpha = None,
    lora_targets: LoraTargets = "all-linear",
    loss: Loss = "ppo",
    lr: Lr = None,
    clip_low: ClipLow = 0.2,
    clip_high: ClipHigh = 0.2,
    dppo_low: DppoLow = 0.2,
    dppo_high: DppoHigh = 0.2,
    dppo_ratio: DppoRatio = "frognano",
    kl_coef: KlCoef = 0.0,
    kl_estimator: KlEstimator = "k3",
    entropy_coef: EntropyCoef = 0.0,
    mismatch_cap: MismatchCap = 0.0,
    denominator: Denominator = "token",
    constant_tokens: ConstantTokens = 0,
    skip_zero_advantage: SkipZero = False,
    allow_truncated_sampling: AllowTruncated = False,
    epochs: Epochs = 1,
    batch_groups: BatchGroups = 0,
    pack_tokens: PackTokens = 2048,
    max_grad_norm: MaxGradNorm = 1.0,
    weight_decay: WeightDecay = 0.0,
    betas: Betas = "0.9,0.999",
    warmup: Warmup = 0,
    seed: Seed = 0,
    fresh_optimizer: FreshOptimizer = False,
    save_every: SaveEvery = 0,
    keep: Keep = 0,
    device: models.Device = "auto",
    dtype: models.Dtype = "auto",
    offline: models.Offline = False,
) -> None:
    """Update a model from rollouts with advantages, or from examples.

    Rollouts (with --loss sft also sft records) are used up: what comes out are metric records of each update and a
    checkpoint record for each checkpoint, and whatever else was in the stream. A batch is so many complete groups; its
    gradient is the same however the tokens are packed.

    \b
    Examples:
      strop advantage --grpo rollouts.jsonl | strop train --model M --lora 16 --out runs/1
      strop train --model M --from runs/1 --out runs/2 --loss dppo --batch-groups 32 credited.jsonl
      strop train --model M --lora 0 --loss sft --epochs 2 --out runs/sft examples.jsonl
      strop rollout --model M --adapter runs/1 -n 8 tasks.jsonl

    \b
    Input fields:
      rollout: id, group, group_size, chunks (token_ids, sampled, logprobs, advantages), steps (span,
      chunk, advantage), advantage, sampling, error; with --loss sft also success
      sft: id, prompt, response; or token_ids and trained (the spans)

    \b
    Output fields:
      metric (of an update): loss, lr, grad_norm, clip_share, mask_share, entropy, kl_reference,
      kl_rollout, logprob_gap_mean, logprob_gap_max, groups_without_signal_share, trained_tokens,
      tokens, tokens_per_s, rollouts, seconds
      checkpoint: path, version, base, sha256

    \b
    Memory:
      the model, its optimiser state, one batch, and the activations of --pack-tokens tokens.
    """
    loss_options = LossOptions(
        loss, clip_low, clip_high, dppo_low, dppo_high, dppo_ratio, kl_coef, kl_estimator, entropy_coef, mismatch_cap
    )
    rank = DEFAULT_RANK if lora is None else lora
    optim = OptimOptions(
        lr=(LORA_RATE if rank else FULL_RATE) if lr is None else lr,
        betas=_betas(betas),
        weight_decay=weight_decay,
        warmup=warmup,
        max_grad_norm=max_grad_norm,
        denominator=denominator,
        constant_tokens=constant_tokens,
        pack_tokens=pack_tokens,
    )
    _check(loss_options, optim)
    same = {**asdict(loss_options), **asdict(optim), "betas": list(optim.betas), "epochs": epochs,
            "batch_groups": batch_groups, "skip_zero_advantage": skip_zero_advantage}  # fmt: skip
    del same["pack_tokens"]
    start = find_start(out, go_on_from=from_, resume=resume, options=same)
    name = _model_name(model, start)
    setup_options = SetupOptions(
        model=name,
        lora=LoraOptions(rank, lora_alpha or 2.0 * rank, tuple(lora_targets.split(","))) if rank else None,
        start=start.checkpoint,
        adapter=adapter if start.checkpoint is None else None,
        lora_given=lora is not None,
        needs_reference=kl_coef > 0,
        device=device,
        dtype=dtype,
        offline=offline,
        seed=seed,
    )
    opener = Opener(setup_options)
    reading = Reading(loss, loss_options.needs_old, opener.vocabulary, allow_truncated_sampling)
    reader = BatchReader(
        reading,
        groups_per_batch=batch_groups,
        consumed=start.consumed,
        skip_zero=skip_zero_advantage,
        tokenizer=opener.tokenizer,
        on_bad=io.reject,
        on_other=(lambda _: None) if io.dry_run else io.write,
    )
    if io.dry_run:
        return _say_plan(io, reader, epochs)
    run_options = RunOptions(out, name, epochs, save_every, keep, fresh_optimizer, same, __version__)
    run = Run(start, run_options, opener.setup, lambda setup: Trainer(setup.policy, loss_options, optim))
    _train(io, run, reader)
    return None


def _train(io: Session, run: Run, reader: BatchReader) -> None:
    """Makes the run and writes its records."""
    options = {"loss": run.options.options["loss"], "lr": run.options.options["lr"]}
    updates = 0
    with io.progress("tokens") as progress:
        for event in run.run(reader.run(io.records()), progress.add):
            if isinstance(event, Update):
                updates += 1
                _emit_metrics(io, event, options)
                io.detail(_line(event))
            else:
                io.emit(Record.make("checkpoint", event.info), options, updates=updates)
    _summary(io, reader.counts, updates, run)


def _emit_metrics(io: Session, update: Update, options: dict[str, Any]) -> None:
    report, batch = update.report, update.batch
    share = batch.groups_without_signal / len(batch.groups)
    values = {
        **report.metrics, "groups_without_signal_share": share, "trained_tokens": report.trained,
        "tokens": report.tokens, "rollouts": len(batch.examples), "seconds": round(report.seconds, 3),
    }  # fmt: skip
    for name, value in values.items():
        fields = {"id": f"train/v{report.update:06d}/{name}", "name": name, "value": value, "of": "train",
                  "update": report.update}  # fmt: skip
        io.emit(Record.make("metric", fields), options)


def _line(update: Update) -> str:
    metrics = update.report.metrics
    shown = [name for name in ("loss", "grad_norm", "entropy", "kl_rollout") if name in metrics]
    parts = [f"{name} {metrics[name]:.4g}" for name in shown]
    return f"update {update.report.update}: {', '.join(parts)}, {metrics['tokens_per_s']:.0f} tokens/s"


def _summary(io: Session, counts: Counts, updates: int, run: Run) -> None:
    io.note(f"{updates} updates on {_used(counts)}, {counts.trained} trained tokens in {_groups(counts)}")
    _say_left_out(io, counts)
    if not updates and not counts.skipped_groups:
        assert run.last is not None
        io.warn(f"there was nothing to train on; {run.last.path} holds the weights unchanged")


def _say_plan(io: Session, reader: BatchReader, epochs: int) -> None:
    updates = sum(epochs for batch in reader.run(io.records()) if batch.examples)
    counts = reader.counts
    io.note(
        f"would make {updates} updates on {_used(counts)}, {counts.trained} trained tokens in {_groups(counts)}; "
        f"{counts.tokens * epochs} tokens through the model"
    )
    _say_left_out(io, counts)


def _used(counts: Counts) -> str:
    left_out = counts.errors + counts.no_advantage + counts.no_success + counts.skipped
    return f"{counts.rollouts + counts.sft - left_out} rollouts and examples"


def _groups(counts: Counts) -> str:
    return f"{counts.groups} groups ({counts.groups_without_signal} without signal)"


def _say_left_out(io: Session, counts: Counts) -> None:
    reasons = {
        "failed by the machine": counts.errors,
        "without an advantage": counts.no_advantage,
        "no success": counts.no_success,
        "in groups used before": counts.skipped,
    }
    if some := [f"{number} {why}" for why, number in reasons.items() if number]:
        io.note(f"left out: {', '.join(some)}")
    if counts.incomplete_groups:
        io.warn(f"{counts.incomplete_groups} groups had fewer members than their group_size says")


def _betas(text: str) -> tuple[float, float]:
    try:
        first, second = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--betas {text!r}: expected two numbers, e.g. 0.9,0.999") from None
    if not (0 <= first < 1 and 0 <= second < 1):
        raise UsageError(f"--betas {text}: both lie in [0, 1)")
    return first, second


def _check(loss: LossOptions, optim: OptimOptions) -> None:
    if (optim.denominator == "constant") != (optim.constant_tokens > 0):
        raise UsageError("--denominator constant and --constant-tokens N go together")
    if 0 < loss.mismatch_cap <= 1:
        raise UsageError("--mismatch-cap is a factor above 1, or 0 for none")


def _model_name(model: str | None, start: Start) -> str:
    """The base model: as named, else as the checkpoint says."""
    if model is not None:
        return model
    if start.checkpoint is None:
        raise UsageError("--model is needed (only a checkpoint brings its own)")
    return start.checkpoint.about.base
