"""strop distill: rollouts in, rollouts with a signal on each sampled token out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli import distill_options as opt
from strop.cli import model_options as models
from strop.cli import rollout_options as sampling
from strop.cli import train_options as training
from strop.cli.session import Session, tool
from strop.core.errors import UsageError

if TYPE_CHECKING:
    from strop.cli.distill_run import Models
    from strop.core.engines.open import EngineOptions

METHODS = ("nsd", "compass", "opd", "opsd", "gopd", "sft")
EXPERTS = "experts:"


@tool(
    reads=("task", "rollout"), writes=("rollout", "sft", "metric", "checkpoint"), slow=True
)
def command(
    io: Session,
    nsd: opt.Nsd = False,
    compass: opt.Compass = False,
    opd: opt.Opd = False,
    opsd: opt.Opsd = False,
    gopd: opt.Gopd = False,
    sft: opt.Sft = False,
    model: models.Model = None,
    adapter: models.Adapter = None,
    student_adapter: opt.StudentAdapter = None,
    teacher: opt.Teacher = None,
    teacher_adapter: opt.TeacherAdapter = None,
    teacher_endpoint: opt.TeacherEndpoint = None,
    reference: opt.Reference = None,
    reference_adapter: opt.ReferenceAdapter = None,
    reference_endpoint: opt.ReferenceEndpoint = None,
    alpha: opt.Alpha = 0.5,
    beta: opt.Beta = 0.0,
    lambda_: opt.Lambda = 1.25,
    units: opt.Units = "all",
    span_score: opt.SpanScore = "mean",
    opsd_form: opt.OpsdForm = "vocabulary",
    condition: opt.ConditionForm = "solution",
    condition_model: opt.ConditionModel = "student",
    conditions: opt.Conditions = None,
    articles: opt.Articles = None,
    condition_temperature: opt.Temperature = 0.7,
    condition_top_p: opt.TopP = 0.9,
    condition_tokens: opt.MaxTokens = 400,
    gate: opt.Gate = "probability",
    prompts: opt.PromptsFolder = None,
    copy_prompts: opt.CopyPrompts = None,
    tasks: opt.TasksFile = None,
    scores: opt.Scores = None,
    batch: opt.Batch = 32,
    trace: opt.Trace = False,
    metrics: opt.Metrics = False,
    seed: opt.Seed = 0,
    out: opt.Out = None,
    go_on: opt.GoOn = False,
    tasks_per_update: opt.TasksPerUpdate = 32,
    samples: opt.Samples = 1,
    passes: opt.Passes = 1,
    rollouts: opt.Rollouts = None,
    temperature: sampling.Temperature = None,
    max_tokens: sampling.MaxTokens = None,
    lora: training.Lora = None,
    lora_alpha: training.LoraAlpha = None,
    lora_targets: training.LoraTargets = "all-linear",
    lr: training.Lr = None,
    nsd_alpha: training.NsdAlpha = 0.01,
    nsd_penalty: training.NsdPenalty = "bounded",
    anchor: training.NsdAnchor = "paper",
    nsd_gradient: training.NsdGradient = "supervised",
    nsd_guards: training.NsdGuards = "",
    opsd_divergence: training.OpsdDivergence = "jsd",
    opsd_beta: training.OpsdBeta = 0.5,
    denominator: training.Denominator = None,
    constant_tokens: training.ConstantTokens = 0,
    pack_tokens: training.PackTokens = 2048,
    max_grad_norm: training.MaxGradNorm = 1.0,
    weight_decay: training.WeightDecay = 0.0,
    betas: training.Betas = "0.9,0.999",
    warmup: training.Warmup = 0,
    save_every: training.SaveEvery = 0,
    keep: training.Keep = 0,
    engine: models.EngineName = "auto",
    endpoint: models.Endpoint = None,
    device: models.Device = "auto",
    dtype: models.Dtype = "auto",
    gpu_memory: models.GpuMemory = None,
    max_context: models.MaxContext = None,
    offline: models.Offline = False,
) -> None:
    """Turn models' scores into a signal on each sampled token.

    Rollouts get per-token fields beside their log-probabilities, from frozen models that score the very ids that were
    sampled; `train` makes an update of them. Tasks pass through, and come before their rollouts.

    --nsd (Negative Self-Distillation): the frozen --model reads each response twice, after the plain prompt and after
    one with a condition that makes it solve the problem badly. Where the bad one likes a token better the gate opens,
    and `train --loss nsd` pushes that token down. No labels are needed. A condition that is no attack is neutral: its
    gates are closed, and it is counted.

    --compass (CompassOPD): the response is read by a strong --teacher and a weak --reference of its family, in their
    own tokens, aligned to the policy's on bytes. What the teacher says beyond its small sibling is the advantage, less
    --alpha times what the policy has moved from --model. --opd, --opsd and --gopd are what it is compared with; --opsd
    writes what its teacher, the frozen --model told the solution, reads, and `train --loss opsd` asks it.

    --sft makes examples of a teacher's rollouts, those that ended by themselves and are not empty: what a policy of
    another family starts from.

    With --out the whole loop runs in one process with one model in memory: tasks in; sample, score, update, and again.

    \b
    Examples:
      strop rollout --model M tasks.jsonl | strop distill --nsd --model M \\
        | strop train --model M --loss nsd --out runs/1
      strop rollout --model M --adapter runs/1 tasks.jsonl \\
        | strop distill --nsd --model M --student-adapter runs/1 --scores scores.db \\
        | strop train --model M --from runs/1 --loss nsd --out runs/2
      strop distill --nsd --model M --out runs/nsd --metrics tasks.jsonl
      strop rollout --model T tasks.jsonl | strop distill --sft \
        | strop train --model S --loss sft --out runs/sft
      strop rollout --model S --adapter runs/sft tasks.jsonl \\
        | strop distill --compass --model S --adapter runs/sft --teacher T --reference R \\
        | strop train --model S --from runs/sft --out runs/c
      strop distill --compass --model S --teacher MOE --reference experts:1 rollouts.jsonl
      strop distill --copy-prompts prompts

    \b
    Input fields:
      task: id, prompt, statement_version, sampling, reference (opsd), negative_condition (nsd: one
      that somebody wrote)
      rollout: id, task, statement_version, chunks (token_ids, sampled, logprobs), response,
      sampling, policy, stop, error
      condition (--conditions): task, statement_version, text, form, writer
      text (--articles): text

    \b
    Output fields:
      rollout: chunks (nsd: logp_ref, logp_neg, gate; opsd: teacher_prompt_ids; others:
      advantages, and logp_ref with compass), distill {method, ...; with --trace units}
      metric (--metrics; with --out of each update): nsd: gate_mean, gate_open_share, gate_max,
      condition_ok_share, condition_characters, style_task_ratio, reflections; others: coverage,
      one_to_one, sign_agreement, offset_wins, mean_shift, mean_offset, mean_displacement; both
      distilled_rollouts, distilled_tokens; with --out also pass_rate and what `train` reports
      sft (--sft): id, task, prompt, response, policy
      checkpoint (--out): path, version, base, sha256

    \b
    Memory:
      the frozen models, one batch, the tasks seen; a second --model where --student-adapter writes
      conditions. With --out the policy, its optimiser state and all tasks.
    """
    if copy_prompts is not None:
        _copy_prompts(io, copy_prompts)
        return
    method = _chosen({"nsd": nsd, "compass": compass, "opd": opd, "opsd": opsd, "gopd": gopd, "sft": sft})
    if method == "sft":
        from strop.cli.distill_files import cold_start

        cold_start(io, tasks)
        return
    frozen = models.engine_options(
        model=model, adapter=adapter, engine=engine, endpoint=endpoint, device=device, dtype=dtype,
        gpu_memory=gpu_memory, max_context=max_context, offline=offline, seed=seed,
    )  # fmt: skip
    from strop.cli.distill_run import LoopWish, Models, NsdWish, Run
    from strop.core.distill.conditions import ConditionRule, Prompts
    from strop.core.distill.onpolicy import Plan
    from strop.core.distill.teachers import TeacherRule
    from strop.core.records import Sampling
    from strop.core.rollout.attempts import SamplingChoice
    from strop.core.train.loop import OptimOptions
    from strop.core.train.losses import LossOptions, NsdChoice

    drawn = Sampling(temperature=condition_temperature, top_p=condition_top_p, max_tokens=condition_tokens)
    experts, reference = _experts(reference)
    used = Models(
        frozen=frozen,
        student=frozen if student_adapter is None else replace(frozen, adapter=student_adapter),
        teacher=_other(frozen, teacher, teacher_adapter, teacher_endpoint),
        reference=_other(frozen, reference, reference_adapter, reference_endpoint),
        experts=experts,
        scores=scores,
    )
    _check_models(method, used)
    if method == "compass" and span_score == "split":
        raise UsageError("--span-score split is DPCA's, which goes with --opd")
    run = Run(
        io, method, used, Prompts(prompts),
        NsdWish(ConditionRule(condition, drawn, seed), condition_model, conditions, articles, gate),
        TeacherRule(method, alpha, beta, lambda_, units, span_score, trace, opsd_form), metrics=metrics,
    )  # fmt: skip
    if out is None:
        if go_on or rollouts is not None:
            raise UsageError("--go-on and --rollouts go with --out")
        run.stream(tasks, batch)
        return
    rank = training.DEFAULT_RANK if lora is None else lora
    optim = OptimOptions(
        lr=training.rate(lr, rank), betas=training.parse_betas(betas), weight_decay=weight_decay, warmup=warmup,
        max_grad_norm=max_grad_norm, denominator=denominator or ("sum" if method == "nsd" else "token"),
        constant_tokens=constant_tokens, pack_tokens=pack_tokens,
    )  # fmt: skip
    choice = NsdChoice(nsd_alpha, nsd_penalty, anchor, nsd_gradient, **training.parse_guards(nsd_guards))
    # One update a batch: the ratio is 1, and PPO's loss is -A log p.
    own_loss = method == "nsd" or (method == "opsd" and opsd_form == "vocabulary")
    loss = LossOptions(
        method if own_loss else "ppo", nsd=choice, opsd=training.opsd_choice(opsd_divergence, opsd_beta)
    )
    plan = Plan(tasks_per_update, samples, passes, seed, SamplingChoice(temperature=temperature, max_tokens=max_tokens))
    run.loop(
        LoopWish(out, go_on, plan, loss, optim, training.lora_options(rank, lora_alpha, lora_targets), lora is not None,
                 save_every, keep, rollouts)
    )  # fmt: skip


def _chosen(wanted: dict[str, bool]) -> str:
    named = [name for name, is_wanted in wanted.items() if is_wanted]
    if len(named) != 1:
        raise UsageError(f"name one method: {', '.join(f'--{name}' for name in METHODS)}")
    return named[0]


def _copy_prompts(io: Session, folder: Path) -> None:
    from strop.core.distill.conditions import FIELDS, FOLDER
    from strop.core.templates import copy_templates

    for path in copy_templates(FOLDER, FIELDS, folder):
        io.note(f"wrote {path}")


def _experts(reference: str | None) -> tuple[int | None, str | None]:
    """The K of experts:K, and what is left of --reference."""
    if reference is None or not reference.startswith(EXPERTS):
        return None, reference
    number = reference.removeprefix(EXPERTS)
    if not number.isdecimal() or int(number) < 1:
        raise UsageError(f"--reference {reference}: expected experts:K, with K experts a token")
    return int(number), None


def _other(
    frozen: EngineOptions, model: str | None, adapter: str | None, endpoints: list[str] | None
) -> EngineOptions | None:
    """The options of a teacher or reference: another model, on the same device and in the same dtype."""
    if model is None:
        return None
    # --endpoint is the policy's own; whoever has none is loaded here.
    engine = "auto" if endpoints or frozen.engine == "server" else frozen.engine
    return replace(frozen, model=model, adapter=adapter, endpoints=tuple(endpoints or ()), engine=engine)


def _check_models(method: str, used: Models) -> None:
    needs_teacher = method in ("compass", "opd", "gopd")
    if needs_teacher and used.teacher is None:
        raise UsageError(f"--{method} needs a --teacher")
    if not needs_teacher and used.teacher is not None:
        raise UsageError(f"--teacher goes with --compass, --opd and --gopd, not with --{method}")
    has_reference = used.reference is not None or used.experts is not None
    if method == "compass" and not has_reference:
        raise UsageError("--compass needs a --reference: a weak model of the teacher's family, or experts:K")
    if method != "compass" and has_reference:
        raise UsageError(f"--reference goes with --compass, not with --{method}")
