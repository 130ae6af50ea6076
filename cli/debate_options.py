"""The options of `strop debate-label`, and what they mean together."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from strop.core.errors import UsageError

if TYPE_CHECKING:
    from strop.core.debate.roles import Backend
    from strop.core.engines.open import EngineOptions
    from strop.core.records import Sampling

MAX_TOKENS = 192
TEMPERATURE = 0.7

SkillsFile = Annotated[
    Path | None,
    typer.Option("--skills", metavar="FILE", help="The bank of skills. [default: three seeds]", show_default=False),
]
SkillsOut = Annotated[
    Path | None,
    typer.Option("--skills-out", metavar="FILE", help="Where the bank goes at the end.", show_default=False),
]
BufferFile = Annotated[
    Path | None,
    typer.Option(
        "--buffer", metavar="FILE",
        help="Keeps disagreements from run to run; it need not exist yet. At the end it holds those of this run, too.",
        show_default=False,
    ),
]  # fmt: skip
Roles = Annotated[
    list[str] | None,
    typer.Option(
        "--role", metavar="[ROLE=]SPEC",
        help="Who speaks (repeatable): model (as --model says), command:PROG, or replay:FILE; for all roles, or for "
        "support, objection, judge or router. [default: model]",
        show_default=False,
    ),
]  # fmt: skip
RepliesFile = Annotated[
    Path | None,
    typer.Option(
        "--replies", metavar="FILE",
        help="Appends each raw reply, and asks nobody again what FILE answers: the same prompt, seed, sampling and "
        "back-end. Weights that changed under the same name are asked again; a program is known by its command line "
        "alone, and wants a new FILE when it changes.",
        show_default=False,
    ),
]  # fmt: skip
PromptsFolder = Annotated[
    Path | None,
    typer.Option("--prompts", metavar="DIR", help="Templates that replace ours, by file name.", show_default=False),
]
CopyPrompts = Annotated[
    Path | None,
    typer.Option(
        "--copy-prompts", metavar="DIR", help="Write our templates into DIR, to be edited, and exit.",
        show_default=False,
    ),
]  # fmt: skip
RoundsNumber = Annotated[int, typer.Option("--rounds", metavar="T", min=1, help="Rounds of a debate.")]
Rechecks = Annotated[
    int, typer.Option("--rechecks", metavar="N", min=0, help="Ask so often again where no verdict can be read.")
]
TopSkills = Annotated[int, typer.Option("--k", metavar="K", min=1, help="Skills that are retrieved.")]
BagHow = Annotated[
    str, typer.Option("--bag", metavar="HOW", help="Tokens of the cosine: counts, or binary (whether one occurs).")
]
NoDebate = Annotated[bool, typer.Option("--no-debate", help="One pass by the role router instead of a debate.")]
NoJudge = Annotated[
    bool, typer.Option("--no-judge", help="No guidance and no verdict of a judge: the vote spoken last decides.")
]
FixedSkills = Annotated[bool, typer.Option("--fixed-skills", help="The bank stays as it is.")]
NoSwap = Annotated[
    bool, typer.Option("--no-swap", help="Support always stands first; else the seed decides in each round.")
]
Every = Annotated[
    int, typer.Option("--every", metavar="N", min=1, help="Examples debated side by side, after which skills change.")
]
Alpha = Annotated[float, typer.Option("--alpha", min=0, help="Priority: weight of a human who disagrees.")]
Beta = Annotated[float, typer.Option("--beta", min=0, help="Priority: weight of a case that no skill covers.")]
Tau = Annotated[float, typer.Option("--tau", min=0, help="Priority from which a case goes into the buffer.")]
TauP = Annotated[float, typer.Option("--tau-p", min=0, help="Gate: least mean priority of a pattern.")]
TauF = Annotated[int, typer.Option("--tau-f", min=1, help="Gate: least number of distinct queries of a pattern.")]
VoteScale = Annotated[
    str, typer.Option("--vote-scale", metavar="SCALE", help="Votes in the priority: binary (can or cannot), or raw.")
]
Sections = Annotated[
    str | None,
    typer.Option(
        "--sections", metavar="NAME,...",
        help="Sections that a trace must have. [default: support,objection,judgement,verdict; with --no-judge all but "
        "judgement]",
        show_default=False,
    ),
]  # fmt: skip
Compare = Annotated[
    str, typer.Option("--compare", metavar="HOW", help="Reward of a right verdict: binary (can or cannot), or raw.")
]
Uncited = Annotated[
    int, typer.Option("--uncited", min=0, max=1, help="Skill part of the reward of a trace that cites no skill.")
]
Eval = Annotated[
    Path | None,
    typer.Option(
        "--eval", metavar="FILE",
        help="Human labels {id, y_human}: audits the debate, adds metric records; what they label is not exported.",
        show_default=False,
    ),
]  # fmt: skip
Metrics = Annotated[
    bool, typer.Option("--metrics", help="Metric records also by the labels that the examples themselves hold.")
]
Export = Annotated[
    list[str] | None,
    typer.Option(
        "--export", metavar="KIND",
        help="Also write sft (records for `train --loss sft`) or grpo (tasks whose verifier computes the reward), of "
        "labels made here and of those that come in.",
        show_default=False,
    ),
]  # fmt: skip
TraceKind = Annotated[
    str, typer.Option("--trace", metavar="WHAT", help="--export: the full trace, reasoning (and verdict), or label.")
]
Seed = Annotated[int, typer.Option("--seed", help="Of replies, of the order of the sides, and of the bootstrap.")]
Temperature = Annotated[
    float | None,
    typer.Option("--temperature", min=0, help=f"0 is greedy. [default: {TEMPERATURE}]", show_default=False),
]
TopP = Annotated[
    float | None, typer.Option("--top-p", min=0.01, max=1, help="Mass of tokens kept. [default: 1]", show_default=False)
]
MaxTokens = Annotated[
    int | None,
    typer.Option("--max-tokens", min=1, help=f"Most tokens of a reply. [default: {MAX_TOKENS}]", show_default=False),
]


def one_of(option: str, value: str, known: tuple[str, ...]) -> str:
    """The value. Raises UsageError for one that is not known."""
    if value not in known:
        raise UsageError(f"{option} {value}: expected {', '.join(known)}")
    return value


def open_backends(
    specs: list[str], engine: EngineOptions | None, sampling: Sampling, needed: tuple[str, ...]
) -> dict[str, Backend]:
    """The back-end of each role that is needed; roles with the same SPEC share one. Raises UsageError."""
    from strop.core.debate.roles import SIDES, ModelRole, ProgramRole, ReplayRole

    chosen = dict.fromkeys(SIDES, "model")
    named: dict[str, str] = {}
    for text in specs:
        role, equals, spec = text.partition("=")
        if equals and role in SIDES:
            named[role] = spec
        else:
            chosen = dict.fromkeys(SIDES, text)
    chosen |= named
    opened: dict[str, Backend] = {}
    for spec in dict.fromkeys(chosen[side] for side in needed):
        kind, colon, rest = spec.partition(":")
        if spec == "model":
            if engine is None:
                raise UsageError("no role: give --model (or --endpoint), --role command:PROG or --role replay:FILE")
            opened[spec] = ModelRole(engine, sampling)
        elif colon and kind == "command":
            opened[spec] = ProgramRole(rest)
        elif colon and kind == "replay":
            opened[spec] = ReplayRole(rest)
        else:
            raise UsageError(
                f"--role {spec}: expected model, command:PROG or replay:FILE, before it {', '.join(SIDES)} and '='"
            )
    return {side: opened[chosen[side]] for side in needed}
