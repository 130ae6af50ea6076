"""strop debate-label: examples in, labels with their traces out."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from strop.cli import debate_options as opt
from strop.cli import model_options as models
from strop.cli.debate_run import Run
from strop.cli.session import Session, tool
from strop.core.errors import DataError, UsageError
from strop.core.records import Sampling
from strop.core.streams import read_records

if TYPE_CHECKING:
    from strop.core.debate.skills import Bank


@tool(
    reads=("example", "label"), writes=("example", "label", "skill", "sft", "task", "metric"), slow=True,
    kind_if_none="example",
)  # fmt: skip
def command(
    io: Session,
    skills: opt.SkillsFile = None,
    skills_out: opt.SkillsOut = None,
    buffer: opt.BufferFile = None,
    role: opt.Roles = None,
    model: models.Model = None,
    replies: opt.RepliesFile = None,
    prompts: opt.PromptsFolder = None,
    copy_prompts: opt.CopyPrompts = None,
    rounds: opt.RoundsNumber = 2,
    rechecks: opt.Rechecks = 1,
    every: opt.Every = 32,
    seed: opt.Seed = 0,
    k: opt.TopSkills = 3,
    bag: opt.BagHow = "counts",
    no_debate: opt.NoDebate = False,
    no_judge: opt.NoJudge = False,
    fixed_skills: opt.FixedSkills = False,
    no_swap: opt.NoSwap = False,
    alpha: opt.Alpha = 1.0,
    beta: opt.Beta = 0.5,
    tau: opt.Tau = 1.0,
    tau_p: opt.TauP = 1.0,
    tau_f: opt.TauF = 3,
    vote_scale: opt.VoteScale = "binary",
    sections: opt.Sections = None,
    compare: opt.Compare = "binary",
    uncited: opt.Uncited = 0,
    eval_: opt.Eval = None,
    metrics: opt.Metrics = False,
    export: opt.Export = None,
    trace: opt.TraceKind = "full",
    temperature: opt.Temperature = None,
    top_p: opt.TopP = None,
    max_tokens: opt.MaxTokens = None,
    adapter: models.Adapter = None,
    engine: models.EngineName = "auto",
    endpoint: models.Endpoint = None,
    device: models.Device = "auto",
    dtype: models.Dtype = "auto",
    gpu_memory: models.GpuMemory = None,
    max_context: models.MaxContext = None,
    offline: models.Offline = False,
) -> None:
    """Label by debate what an agent can do; learn skills from it.

    Each example, a request and an agent, is debated: with the skills that fit it one role supports the agent, one
    objects, a judge guides both from round to round and gives the verdict: 2, the agent can do it; 1, on topic, but it
    lacks tools, authority, live data or scope; 0, off topic. The example passes through and is followed by its label
    with the whole trace, raw replies included.

    Disagreements wait in the buffer. A pattern of them that is frequent and urgent enough adds a skill or refines one,
    by rules; no text of a debate is kept in it. Skills that change leave as records, the bank by --skills-out.

    A role is an engine, any program, or replies that were recorded. What is read out of replies can be read anew:
    --role replay:FILE takes them from labels or from the file of --replies, and no model is asked.

    Where the machine failed and not a role, `error` says so and there is no verdict. Where no verdict can be read it is
    null, and `trace.fault` says why. Gold labels (y_raw, y_human) reach no role.

    \b
    Examples:
      strop debate-label --model M --skills-out bank.jsonl examples.jsonl > labels.jsonl
      strop debate-label --role command:./rules.py --buffer b.jsonl --skills bank.jsonl \\
        --skills-out bank.jsonl examples.jsonl > labels.jsonl
      strop debate-label --role replay:labels.jsonl examples.jsonl > again.jsonl
      strop debate-label --model M --export sft --only sft examples.jsonl \\
        | strop train --model M --loss sft --out runs/1
      strop debate-label --skills bank.jsonl --export grpo --only task labels.jsonl \\
        | strop rollout --model M -n 8 | strop advantage --grpo | strop train --model M --out runs/2
      strop debate-label --no-debate --model M --adapter runs/2 --eval human.jsonl --only metric test.jsonl

    \b
    Input fields:
      example: id, query, agent (an object); y_raw, y_human (0, 1, 2), split; `kind` may be missing
      label: as it is written here, for --export, --eval and --metrics

    \b
    Output fields:
      label: id, query, agent, trace {variant, retrieved, fallback, first, replies, text, cited, gap,
      y_sem, y_crit, y_judge, y_human, valid_sections, fault, pattern, triggers}, verdict, priority,
      reward {cls, sec, skill, total}, split, y_raw, error
      skill: id, title, principle, when_to_apply, tags, origin, version, support_count, update {pattern,
      freq, mean_priority, covered, action, before}
      sft: id, prompt, response
      task: id, prompt, verifier, reference, sampling
      metric: accuracy, binary_f1, macro_f1, grey_f1, over_accept, positive_miss,
      structured_validity, skill_grounding, conflict_resolution

    \b
    Memory:
      the model, --every examples and their debates, the bank, the buffer, a hash of each query; with
      --replies or replay:FILE the replies in FILE.
    """
    from strop.core.debate.buffer import SCALES, Thresholds
    from strop.core.debate.export import EXPORTS, TRACES
    from strop.core.debate.intake import Humans, read_sections_option
    from strop.core.debate.labels import Grading
    from strop.core.debate.prompts import FIELDS, FOLDER, Prompts
    from strop.core.debate.retrieval import BAGS
    from strop.core.debate.reward import COMPARISONS
    from strop.core.debate.rounds import Rules
    from strop.core.debate.verdict import SECTIONS
    from strop.core.templates import copy_templates

    if copy_prompts is not None:
        for path in copy_templates(FOLDER, FIELDS, copy_prompts):
            io.note(f"wrote {path}")
        return
    if no_debate and no_judge:
        raise UsageError("--no-debate has no rounds whose last vote could stand for a judge; leave --no-judge out")
    variant = "no-debate" if no_debate else "no-judge" if no_judge else "full"
    wanted = tuple(name for name in SECTIONS if variant != "no-judge" or name != "judgement")
    if sections is not None:
        try:
            wanted = read_sections_option(sections, SECTIONS)
        except DataError as error:
            raise UsageError(f"--sections: {error}") from None
    for kind in export or ():
        opt.one_of("--export", kind, EXPORTS)
    opt.one_of("--trace", trace, tuple(TRACES))
    grading = Grading(
        Thresholds(alpha, beta, tau, tau_p, tau_f), opt.one_of("--vote-scale", vote_scale, SCALES),
        opt.one_of("--compare", compare, COMPARISONS), uncited, wanted,
    )  # fmt: skip
    rules = Rules(
        variant, rounds, rechecks, k, opt.one_of("--bag", bag, BAGS), seed, swap=not no_swap, sections=wanted
    )
    policy = None
    if model is not None or endpoint:
        policy = models.engine_options(
            model=model, adapter=adapter, engine=engine, endpoint=endpoint, device=device, dtype=dtype,
            gpu_memory=gpu_memory, max_context=max_context, offline=offline, seed=seed,
        )  # fmt: skip
    sampling = Sampling(
        temperature=opt.TEMPERATURE if temperature is None else temperature, top_p=1.0 if top_p is None else top_p,
        max_tokens=max_tokens or opt.MAX_TOKENS,
    )  # fmt: skip
    templates = Prompts(prompts)
    bank = _open_bank(skills)
    humans = Humans() if eval_ is None else Humans(read_records([str(eval_)], sys.stdin.buffer, None, "example"))
    run = Run(io, rules, grading, templates, bank, humans, every=every, seed=seed)
    run.exports, run.trace, run.measures = tuple(dict.fromkeys(export or ())), trace, metrics or eval_ is not None
    if io.dry_run:
        run.plan(policy, sampling)
        return
    run.label(
        role or [], policy, sampling, replies=replies, buffer=buffer, skills_out=skills_out,
        is_dynamic=not fixed_skills,
    )  # fmt: skip
    run.report()


def _open_bank(path: Path | None) -> Bank:
    from strop.core.debate.skills import Bank, read_bank

    return Bank() if path is None else read_bank(read_records([str(path)], sys.stdin.buffer))
