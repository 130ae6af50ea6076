"""The options of `strop distill`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

Nsd = Annotated[
    bool, typer.Option("--nsd", help="A negative self-teacher: logp_ref, logp_neg and gate for `train --loss nsd`.")
]
Compass = Annotated[
    bool,
    typer.Option("--compass", help="What a strong --teacher says beyond a weak --reference of its family (CompassOPD): "
                 "advantages for `train`."),
]  # fmt: skip
Opd = Annotated[
    bool, typer.Option("--opd", help="On-policy distillation: log p of the --teacher less the policy's own.")
]
Opsd = Annotated[
    bool,
    typer.Option("--opsd", help="On-policy self-distillation: the teacher is --model, told the task's reference."),
]  # fmt: skip
Gopd = Annotated[
    bool,
    typer.Option("--gopd", help="G-OPD: --lambda times what --teacher adds to --model, less what the policy adds."),
]
Sft = Annotated[
    bool,
    typer.Option("--sft", help="The cold start: a teacher's rollouts become sft records of text, for `train --loss "
                 "sft`. No model is asked."),
]  # fmt: skip
OpsdForm = Annotated[
    Literal["vocabulary", "sampled"],
    typer.Option("--opsd-form", help="opsd: the teacher's prompt, for a divergence over the whole vocabulary in `train "
                 "--loss opsd` (the released code); or log p of the sampled tokens, as advantages."),
]  # fmt: skip
StudentAdapter = Annotated[
    str | None,
    typer.Option("--student-adapter", metavar="FOLDER", show_default=False,
                 help="The policy as it is now, a LoRA on --model; it writes conditions. Unset: --adapter, or none."),
]  # fmt: skip
TasksFile = Annotated[
    Path | None,
    typer.Option("--tasks", metavar="FILE", help="Tasks of the rollouts, where they do not come before them in the "
                 "input.", show_default=False),
]  # fmt: skip
Scores = Annotated[
    Path | None,
    typer.Option("--scores", metavar="FILE", help="Keep scores, by content, in FILE: nothing is scored twice.",
                 show_default=False),
]  # fmt: skip
Batch = Annotated[
    int, typer.Option("--batch", min=1, help="Rollouts that are worked on together. Changes the last digits only.")
]
Trace = Annotated[
    bool, typer.Option("--trace", help="Keep the units of each response: their tokens on both sides, shift and offset.")
]
Metrics = Annotated[bool, typer.Option("--metrics", help="End with metric records: gates, coverage, conditions.")]
Seed = Annotated[int, typer.Option("--seed", help="For what the writer of conditions draws, and the articles.")]
ConditionForm = Annotated[
    Literal["solution", "question", "offline", "wiki"],
    typer.Option("--condition", help="nsd: an attack on the solution that is trained on (the paper's); from the "
                 "question alone; on a solution of the frozen model's own, once a task; or an article that has nothing "
                 "to do with it."),
]  # fmt: skip
ConditionModel = Annotated[
    Literal["student", "initial"],
    typer.Option("--condition-model", help="nsd: who writes: the policy as it is now (paper), or the frozen model "
                 "(released code; always so for question and offline)."),
]  # fmt: skip
Conditions = Annotated[
    Path | None,
    typer.Option("--conditions", metavar="FILE", help="nsd: offline conditions are read from FILE, and new ones added.",
                 show_default=False),
]  # fmt: skip
Articles = Annotated[
    Path | None,
    typer.Option("--articles", metavar="FILE", help="nsd: text records for --condition wiki; those under 500 "
                 "characters are left out.", show_default=False),
]  # fmt: skip
PromptsFolder = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="DIR", help="Templates to use in the place of ours (see --copy-prompts).",
                 show_default=False),
]  # fmt: skip
CopyPrompts = Annotated[
    Path | None,
    typer.Option("--copy-prompts", metavar="DIR", help="Write our templates into DIR, to be edited, and end.",
                 show_default=False),
]  # fmt: skip
Gate = Annotated[
    Literal["probability", "log", "none"],
    typer.Option("--gate", help="nsd: max(0, p_neg - p_ref) as in the paper; of log-probabilities; or 1 everywhere."),
]  # fmt: skip
Temperature = Annotated[float, typer.Option("--condition-temperature", min=0, help="nsd: of the writer.")]
TopP = Annotated[float, typer.Option("--condition-top-p", min=0, max=1, help="nsd: of the writer.")]
MaxTokens = Annotated[int, typer.Option("--condition-tokens", min=1, help="nsd: most tokens of a condition.")]
Teacher = Annotated[
    str | None,
    typer.Option("--teacher", metavar="MODEL", help="The strong model, named like --model.", show_default=False),
]
TeacherAdapter = Annotated[
    str | None, typer.Option("--teacher-adapter", metavar="FOLDER", help="A LoRA on the teacher.", show_default=False)
]
TeacherEndpoint = Annotated[
    list[str] | None,
    typer.Option("--teacher-endpoint", metavar="URL", help="A server of the teacher (repeatable).", show_default=False),
]
Reference = Annotated[
    str | None,
    typer.Option("--reference", metavar="MODEL", show_default=False,
                 help="A weak model of the teacher's family; or experts:K, the teacher itself, a mixture, with K "
                 "experts a token."),
]  # fmt: skip
ReferenceAdapter = Annotated[
    str | None,
    typer.Option("--reference-adapter", metavar="FOLDER", help="A LoRA on the reference.", show_default=False),
]
ReferenceEndpoint = Annotated[
    list[str] | None,
    typer.Option("--reference-endpoint", metavar="URL", help="A server of the reference (repeatable).",
                 show_default=False),
]  # fmt: skip
Alpha = Annotated[
    float, typer.Option("--alpha", min=0, help="compass: how strongly the policy is held to --model; 0: not at all.")
]
Beta = Annotated[
    float,
    typer.Option("--beta", help="compass: how much of the offset between the families is put back (an ablation)."),
]
Lambda = Annotated[float, typer.Option("--lambda", min=0, help="gopd: weight of the teacher's side.")]
Units = Annotated[
    Literal["all", "one-to-one"],
    typer.Option("--units", help="Which aligned units count: all, or those of one token on either side."),
]
SpanScore = Annotated[
    Literal["mean", "sum", "split"],
    typer.Option("--span-score", help="A unit of several tokens scores their mean (the paper), their sum (GOLD), or "
                 "the sum split among the policy's tokens (DPCA)."),
]  # fmt: skip
Out = Annotated[
    Path | None,
    typer.Option("--out", metavar="DIR", show_default=False,
                 help="Loop on policy: the input is tasks; sample, score, update, and again. Checkpoints as `train` "
                 "writes them."),
]  # fmt: skip
GoOn = Annotated[
    bool,
    typer.Option("--go-on", help="With --out: continue an interrupted loop; same options and tasks. Groups it has used "
                 "are skipped."),
]  # fmt: skip
TasksPerUpdate = Annotated[int, typer.Option("--tasks-per-update", min=1, help="With --out: tasks an update.")]
Samples = Annotated[
    int, typer.Option("-n", "--samples", min=1, help="With --out: attempts a task (the paper's NSD: one).")
]
Passes = Annotated[int, typer.Option("--passes", min=1, help="With --out: times that the tasks are gone through.")]
Rollouts = Annotated[
    Path | None,
    typer.Option("--rollouts", metavar="FILE", help="With --out: keep the rollouts, with their signals.",
                 show_default=False),
]  # fmt: skip
