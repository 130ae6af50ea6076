"""strop distill: rollouts in, rollouts with a signal on each sampled token out."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli import distill_options as opt
from strop.cli import model_options as models
from strop.cli.session import Session, tool
from strop.core.distill.attempts import DistillRollout, DistillTask, Stream
from strop.core.errors import DataError, UsageError
from strop.core.records import Record
from strop.core.streams import Output, read_records

if TYPE_CHECKING:
    from strop.core.distill.conditions import StoredCondition
    from strop.core.distill.negative import NegativeTeacher
    from strop.core.engines.open import EngineOptions
    from strop.core.engines.scorers import Scorer

METHODS = ("nsd", "compass", "opd", "opsd", "gopd")


@tool(
    reads=("task", "rollout"), writes=("rollout", "metric", "condition"), slow=True,
    views={"task": DistillTask, "rollout": DistillRollout},
)  # fmt: skip
def command(
    io: Session,
    nsd: opt.Nsd = False,
    compass: opt.Compass = False,
    opd: opt.Opd = False,
    opsd: opt.Opsd = False,
    gopd: opt.Gopd = False,
    model: models.Model = None,
    adapter: models.Adapter = None,
    student_adapter: opt.StudentAdapter = None,
    tasks: opt.TasksFile = None,
    scores: opt.Scores = None,
    batch: opt.Batch = 32,
    metrics: opt.Metrics = False,
    seed: opt.Seed = 0,
    condition: opt.ConditionForm = "solution",
    condition_model: opt.ConditionModel = "student",
    conditions: opt.Conditions = None,
    articles: opt.Articles = None,
    prompts: opt.PromptsFolder = None,
    copy_prompts: opt.CopyPrompts = None,
    gate: opt.Gate = "probability",
    condition_temperature: opt.Temperature = 0.7,
    condition_top_p: opt.TopP = 0.9,
    condition_tokens: opt.MaxTokens = 400,
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

    \b
    Examples:
      strop rollout --model M tasks.jsonl | strop distill --nsd --model M \\
        | strop train --model M --loss nsd --out runs/1
      strop rollout --model M --adapter runs/1 tasks.jsonl \\
        | strop distill --nsd --model M --student-adapter runs/1 --scores s.db \\
        | strop train --model M --from runs/1 --loss nsd --out runs/2
      strop distill --copy-prompts prompts

    \b
    Input fields:
      task: id, prompt, statement_version, sampling, negative_condition (one that somebody wrote)
      rollout: id, task, statement_version, chunks (token_ids, sampled, logprobs), response,
      sampling, error
      condition (--conditions): task, statement_version, text, form, writer
      text (--articles): text

    \b
    Output fields:
      rollout: chunks (nsd: logp_ref, logp_neg, gate), distill {method, ...}
      metric (--metrics): gate_mean, gate_open_share, gate_max, condition_ok_share,
      condition_characters, style_task_ratio, reflections, distilled_rollouts, distilled_tokens

    \b
    Memory:
      the frozen model (with --student-adapter a second one, which writes), one batch, the tasks seen.
    """
    if copy_prompts is not None:
        _copy_prompts(io, copy_prompts)
        return
    method = _chosen({"nsd": nsd, "compass": compass, "opd": opd, "opsd": opsd, "gopd": gopd})
    frozen = models.engine_options(
        model=model, adapter=adapter, engine=engine, endpoint=endpoint, device=device, dtype=dtype,
        gpu_memory=gpu_memory, max_context=max_context, offline=offline, seed=seed,
    )  # fmt: skip
    assert method == "nsd"
    from strop.core.distill.conditions import ConditionRule, Prompts
    from strop.core.records import Sampling

    sampling = Sampling(temperature=condition_temperature, top_p=condition_top_p, max_tokens=condition_tokens)
    rule = ConditionRule(condition, sampling, seed)
    templates = Prompts(prompts)
    with ExitStack() as stack:
        scorer = stack.enter_context(_scorer(frozen, scores))
        from dataclasses import replace

        from strop.core.distill.negative import NegativeTeacher
        from strop.core.distill.writing import Writer
        from strop.core.engines.open import open_engine, open_tokenizer

        tokenizer = open_tokenizer(frozen)
        plays = "initial" if condition in ("question", "offline") else condition_model
        student = frozen if plays == "initial" or student_adapter is None else replace(frozen, adapter=student_adapter)
        writer = Writer(
            rule, templates, tokenizer, lambda: stack.enter_context(open_engine(student)), writer=plays,
            articles=_articles(articles) if condition == "wiki" else (),
            stored=_stored(conditions), on_written=_keeper(stack, conditions),
        )  # fmt: skip
        teacher = NegativeTeacher(writer, scorer, tokenizer, templates, gate=gate)
        stream = Stream(
            teacher, size=batch, vocabulary=tokenizer.vocab_size,
            done=lambda name: io.resumed is not None and ("rollout", name) in io.resumed.ids, on_bad=io.reject,
        )  # fmt: skip
        for record in read_records([str(tasks)], sys.stdin.buffer) if tasks else ():
            if record.kind == "task":
                stream.add_task(record)
        with io.progress("rollouts") as progress:
            for record in stream.run(io.records()):
                io.write(record)
                progress.add(record.kind == "rollout")
    _say_nsd(io, stream, teacher, metrics=metrics)


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


@contextmanager
def _scorer(options: EngineOptions, cache: Path | None, experts: int | None = None) -> Iterator[Scorer]:
    """A scorer that is closed at the end; with `cache` it remembers."""
    from strop.core.engines.scorers import open_scorer

    with open_scorer(options, experts=experts) as scorer:
        yield scorer


def _articles(file: Path | None) -> list[str]:
    """The articles of --condition wiki that are long enough. Raises UsageError, DataError."""
    from strop.core.distill.conditions import MIN_ARTICLE

    if file is None:
        raise UsageError("--condition wiki needs --articles FILE with text records")
    found = [record.get("text", str) for record in read_records([str(file)], sys.stdin.buffer) if record.kind == "text"]
    long = [text for text in found if text is not None and len(text) >= MIN_ARTICLE]
    if not long:
        raise DataError(f"{file}: none of {len(found)} texts has {MIN_ARTICLE} characters")
    return long


def _stored(file: Path | None) -> list[StoredCondition]:
    from strop.core.distill.writing import read_conditions

    if file is None or not file.exists():
        return []
    return read_conditions(read_records([str(file)], sys.stdin.buffer))


def _keeper(stack: ExitStack, file: Path | None) -> Any:
    """Takes conditions that were written, and appends them to the file, if there is one."""
    output: list[Output] = []

    def keep(condition: StoredCondition) -> None:
        if file is None:
            return
        if not output:
            output.append(stack.enter_context(Output(path=file, append=True, flush_each=True)))
        output[0].write(Record.make("condition", condition))

    return keep


def _say_nsd(io: Session, stream: Stream, teacher: NegativeTeacher, *, metrics: bool) -> None:
    counts, tally = stream.counts, teacher.tally
    mean = tally.total / tally.tokens if tally.tokens else None
    io.note(
        f"{tally.rollouts} rollouts, {tally.tokens} tokens, {tally.open} with an open gate"
        + ("" if mean is None else f" (mean {mean:.3g})")
        + f"; {tally.neutral} conditions neutral"
    )
    _say_left(io, stream)
    for reason, number in teacher.reasons.items():
        io.note(f"neutral: {number} {reason}")
    if tally.rollouts and tally.neutral == tally.rollouts:
        io.warn("every condition was neutral: there is nothing to learn but the anchor")
    if not metrics:
        return
    values: dict[str, float | int | None] = {
        "distilled_rollouts": tally.rollouts, "distilled_tokens": tally.tokens, "gate_mean": mean,
        "gate_open_share": tally.open / tally.tokens if tally.tokens else None, "gate_max": tally.highest,
        "condition_ok_share": 1 - tally.neutral / tally.rollouts if tally.rollouts else None,
        "condition_characters": tally.condition_characters / tally.rollouts if tally.rollouts else None,
        "style_task_ratio": tally.style_task_ratio, "reflections": teacher.reflections,
        "failed_rollouts": counts.failed, "empty_rollouts": counts.empty,
    }  # fmt: skip
    for name, value in values.items():
        io.emit(Record.make("metric", {"id": f"distill/{name}", "name": name, "value": value, "of": "distill"}))


def _say_left(io: Session, stream: Stream) -> None:
    counts = stream.counts
    reasons = {"failed by the machine": counts.failed, "empty": counts.empty, "written before": counts.resumed}
    if some := [f"{number} {why}" for why, number in reasons.items() if number]:
        io.note(f"left as they were: {', '.join(some)}")
