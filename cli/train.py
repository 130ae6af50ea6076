"""strop train: rollouts with advantages in, a better model out."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from strop import __version__
from strop.cli import model_options as models
from strop.cli import train_options as opt
from strop.cli.session import Session, tool
from strop.cli.updates import emit_update, update_line
from strop.core.errors import UsageError
from strop.core.records import Record
from strop.core.train.batches import BatchReader, Counts
from strop.core.train.critic import RATE_RATIO, VALUE_CLIP, CriticOptions
from strop.core.train.critic_setup import find_critic
from strop.core.train.examples import Reading
from strop.core.train.loop import OptimOptions, Trainer
from strop.core.train.losses import LossOptions, NsdChoice
from strop.core.train.routing import RoutingReading
from strop.core.train.run import Run, RunOptions, Start, Update, find_start
from strop.core.train.setup import CriticWish, Opener, SetupOptions


@tool(reads=("rollout", "sft"), writes=("metric", "checkpoint"), slow=True)
def command(
    io: Session,
    out: opt.Out,
    model: models.Model = None,
    adapter: models.Adapter = None,
    from_: opt.From = None,
    resume: opt.Resume = False,
    lora: opt.Lora = None,
    lora_alpha: opt.LoraAlpha = None,
    lora_targets: opt.LoraTargets = "all-linear",
    loss: opt.Loss = "ppo",
    lr: opt.Lr = None,
    clip_low: opt.ClipLow = 0.2,
    clip_high: opt.ClipHigh = 0.2,
    dppo_low: opt.DppoLow = 0.2,
    dppo_high: opt.DppoHigh = 0.2,
    dppo_ratio: opt.DppoRatio = "frognano",
    kl_coef: opt.KlCoef = 0.0,
    kl_estimator: opt.KlEstimator = "k3",
    entropy_coef: opt.EntropyCoef = 0.0,
    mismatch_cap: opt.MismatchCap = 0.0,
    nsd_alpha: opt.NsdAlpha = 0.01,
    nsd_penalty: opt.NsdPenalty = "bounded",
    anchor: opt.NsdAnchor = "paper",
    nsd_gradient: opt.NsdGradient = "supervised",
    nsd_guards: opt.NsdGuards = "",
    opsd_divergence: opt.OpsdDivergence = "jsd",
    opsd_beta: opt.OpsdBeta = 0.5,
    denominator: opt.Denominator = None,
    constant_tokens: opt.ConstantTokens = 0,
    skip_zero_advantage: opt.SkipZero = False,
    allow_truncated_sampling: opt.AllowTruncated = False,
    epochs: opt.Epochs = 1,
    batch_groups: opt.BatchGroups = 0,
    pack_tokens: opt.PackTokens = 2048,
    max_grad_norm: opt.MaxGradNorm = 1.0,
    weight_decay: opt.WeightDecay = 0.0,
    betas: opt.Betas = "0.9,0.999",
    warmup: opt.Warmup = 0,
    seed: opt.Seed = 0,
    fresh_optimizer: opt.FreshOptimizer = False,
    save_every: opt.SaveEvery = 0,
    keep: opt.Keep = 0,
    critic: opt.WithCritic = False,
    critic_only: opt.CriticOnly = False,
    critic_from: opt.CriticFrom = None,
    critic_lr: opt.CriticLr = None,
    value_clip: opt.ValueClip = VALUE_CLIP,
    routing_replay: opt.RoutingReplay = "auto",
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
      strop advantage --gae --critic runs/1 rollouts.jsonl \\
        | strop train --model M --from runs/1 --critic --out runs/2

    --loss nsd learns from the gates that `strop distill --nsd` writes, and from no advantage; --loss opsd from the
    prompts that `strop distill --opsd` writes for a frozen teacher: the model without its adapter, or --model when all
    parameters move.

    With --critic a second model learns what reward a state still promises (T1): `advantage --gae --critic` writes its
    values into the rollouts, and here it is updated first, on the returns beside them, before the policy is.

    Where rollouts say which experts of a mixture were used (`rollout --routing`), the update uses the same ones: their
    gates are the live router's, which goes on learning. The reference and the critic choose freely. Routing that is
    missing or bad ends the run, with --keep-going too: leaving a rollout out for it would bias the batch.

    \b
    Input fields:
      rollout: id, group, group_size, chunks (token_ids, sampled, logprobs, advantages, routing; with
      --loss nsd logp_ref and gate, with --loss opsd teacher_prompt_ids),
      steps (span, chunk, advantage), advantage, sampling, error; with --loss sft also success; with
      --critic values and returns of the chunks
      sft: id, prompt, response; or token_ids and trained (the spans)

    \b
    Output fields:
      metric (of an update): loss, lr, grad_norm, clip_share, mask_share, entropy, kl_reference,
      kl_rollout, logprob_gap_mean, logprob_gap_max, groups_without_signal_share, trained_tokens,
      tokens, tokens_per_s, rollouts, seconds; with --critic critic_loss, explained_variance,
      value_mean, value_clip_share, critic_grad_norm, critic_seconds; with --loss nsd push, anchor,
      gate, gate_open_share
      checkpoint: path, version, base, sha256

    \b
    Memory:
      the model, its optimiser state, one batch, and the activations of --pack-tokens tokens; with
      --critic a second model of that size and its optimiser state.
    """
    nsd = NsdChoice(nsd_alpha, nsd_penalty, anchor, nsd_gradient, **opt.parse_guards(nsd_guards))
    loss_options = LossOptions(
        loss, clip_low, clip_high, dppo_low, dppo_high, dppo_ratio, kl_coef, kl_estimator, entropy_coef, mismatch_cap,
        nsd, opt.opsd_choice(opsd_divergence, opsd_beta),
    )  # fmt: skip
    rank = opt.DEFAULT_RANK if lora is None else lora
    optim = OptimOptions(
        lr=opt.rate(lr, rank),
        betas=opt.parse_betas(betas),
        weight_decay=weight_decay,
        warmup=warmup,
        max_grad_norm=max_grad_norm,
        denominator=denominator or ("sum" if loss == "nsd" else "token"),
        constant_tokens=constant_tokens,
        pack_tokens=pack_tokens,
    )
    _check(loss_options, optim)
    critic_options = None
    if critic or critic_only or critic_from is not None:
        if loss in ("sft", "nsd", "opsd"):
            raise UsageError(f"a critic goes with a policy gradient, not with --loss {loss}")
        rate = RATE_RATIO * optim.lr if critic_lr is None else critic_lr
        critic_options = CriticOptions(rate, value_clip=value_clip, pack_tokens=pack_tokens)
    elif critic_lr is not None:
        raise UsageError("--critic-lr goes with --critic")
    same = {**asdict(loss_options), **asdict(optim), "betas": list(optim.betas), "epochs": epochs,
            "batch_groups": batch_groups, "skip_zero_advantage": skip_zero_advantage,
            "routing_replay": routing_replay}  # fmt: skip
    del same["pack_tokens"]
    if critic_options is not None:
        same |= {"critic_lr": critic_options.lr, "value_clip": value_clip, "critic_only": critic_only}
    start = find_start(out, go_on_from=from_, resume=resume, options=same)
    name = _model_name(model, start)
    setup_options = SetupOptions(
        model=name,
        lora=opt.lora_options(rank, lora_alpha, lora_targets),
        start=start.checkpoint,
        adapter=adapter if start.checkpoint is None else None,
        lora_given=lora is not None,
        needs_reference=loss_options.needs_reference,
        device=device,
        dtype=dtype,
        offline=offline,
        seed=seed,
        critic=None if critic_options is None else CriticWish(_critic_start(start, critic_from)),
    )
    opener = Opener(setup_options)
    reading = Reading(
        loss, loss_options.needs_old, opener.vocabulary, allow_truncated_sampling,
        needs_returns=critic_options is not None, routing=_routing_reading(routing_replay, loss, opener),
    )  # fmt: skip
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
    run_options = RunOptions(
        out, name, epochs, save_every, keep, fresh_optimizer, same, __version__, critic=critic_options,
        critic_only=critic_only, fresh_critic_optimizer=fresh_optimizer or critic_from is not None,
    )  # fmt: skip
    run = Run(start, run_options, opener.setup, lambda setup: Trainer(setup.policy, loss_options, optim))
    _train(io, run, reader)
    return None


def _routing_reading(mode: str, loss: str, opener: Opener) -> RoutingReading | None:
    """Examples were sampled by nobody, and their log-probabilities are compared with none: they are trained freely."""
    if loss == "sft" and mode == "on":
        raise UsageError("--routing-replay goes with a policy gradient, not with --loss sft")
    return None if loss == "sft" else RoutingReading(mode, opener.routing_shape)


def _train(io: Session, run: Run, reader: BatchReader) -> None:
    """Makes the run and writes its records."""
    options = {"loss": run.options.options["loss"], "lr": run.options.options["lr"]}
    updates, last = 0, None
    with io.progress("tokens") as progress:
        for event in run.run(reader.run(io.records()), progress.add):
            if isinstance(event, Update):
                updates += 1
                emit_update(io, event, updates if event.report is None else event.report.update, options)
                io.detail(update_line(event))
                last = event
            else:
                io.emit(Record.make("checkpoint", event.info), options, updates=updates)
    _summary(io, reader.counts, updates, run)
    if last is not None:
        _warn_of_critic(io, last)


def _warn_of_critic(io: Session, update: Update) -> None:
    explained = None if update.critic is None else update.critic.explained_variance
    if explained is not None and explained < 0:
        io.warn(
            f"the critic's values explain {explained:.3g} of the variance of the returns: below 0 they add noise to "
            "the advantages (--critic-only trains it alone)"
        )


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
    if counts.groups_of_mixed_caps:
        io.warn(
            f"{counts.groups_of_mixed_caps} groups hold rollouts under different caps on their turns (`horizon`); a "
            "smaller cap makes failures of what a larger one lets succeed"
        )


def _check(loss: LossOptions, optim: OptimOptions) -> None:
    if (optim.denominator == "constant") != (optim.constant_tokens > 0):
        raise UsageError("--denominator constant and --constant-tokens N go together")
    if 0 < loss.mismatch_cap <= 1:
        raise UsageError("--mismatch-cap is a factor above 1, or 0 for none")
    if loss.mismatch_cap and loss.loss in ("nsd", "opsd"):
        raise UsageError(f"--mismatch-cap goes with a policy gradient, not with --loss {loss.loss}")


def _critic_start(start: Start, given: Path | None) -> Path | None:
    """Where the critic comes from: as named, else from the checkpoint that the policy goes on from, else nowhere."""
    folder = given if given is not None else start.checkpoint.path if start.checkpoint is not None else None
    if folder is None:
        return None
    found = find_critic(folder)
    if found is None and given is not None:
        raise UsageError(f"--critic-from {given}: no critic there")
    return found


def _model_name(model: str | None, start: Start) -> str:
    """The base model: as named, else as the checkpoint says."""
    if model is not None:
        return model
    if start.checkpoint is None:
        raise UsageError("--model is needed (only a checkpoint brings its own)")
    return start.checkpoint.about.base
