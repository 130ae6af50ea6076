"""The options of `strop audit-prune`."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

import typer

from strop.core.errors import UsageError, missing_extra

AuditOnly = Annotated[bool, typer.Option("--audit-only", help="Measure and report; prune nothing, write no pairs.")]
Threshold = Annotated[
    float, typer.Option("--threshold", metavar="AUC", help="Prune until the audit AUC is at most this.")
]
Folds = Annotated[
    str,
    typer.Option(
        "--folds", metavar="RULE",
        help="stable, release (the published subset's, rebuilt), or random:K: K seeded foldings, whose mean AUC "
        "counts.",
    ),
]  # fmt: skip
Score = Annotated[
    Literal["imbalance", "confidence", "hybrid"] | None,
    typer.Option(
        "--score",
        help="Prune as published, one pair at a time: by its part in the gaps, by the probe's confidence, or by both. "
        "[default: imbalance with --folds stable or release; with random folds the linear program]",
        show_default=False,
    ),
]
AddBack = Annotated[
    bool, typer.Option("--add-back/--no-add-back", help="With --score: re-insert deleted pairs where the audit allows.")
]
Against = Annotated[
    Literal["linear", "trees", "both"],
    typer.Option("--against", help="Which probe must be near chance: the linear one, boosted trees, or both."),
]
Probes = Annotated[
    str,
    typer.Option(
        "--probe", metavar="KIND[,KIND]",
        help="What else to look at: features, tfidf (words), ngrams (characters). Measured and reported, not pruned "
        "against.",
    ),
]  # fmt: skip
Evaluations = Annotated[
    int, typer.Option("--evaluations", metavar="N", min=1, help="Sets that the search for bounds tries.")
]
Permutations = Annotated[
    int,
    typer.Option(
        "--permutations", metavar="B", min=0,
        help="Label permutations behind p; 0: no p. The paper has 10000 for its main rows; fewer is our choice (see "
        "the manual).",
    ),
]  # fmt: skip
Baselines = Annotated[
    str | None,
    typer.Option(
        "--baselines", metavar="NAME[,NAME]",
        help="Measure other ways to as many pairs: prefix, aflite, random.", show_default=False,
    ),
]  # fmt: skip
ReportDir = Annotated[
    Path | None,
    typer.Option(
        "--report", metavar="DIR",
        help="Write audit.json, trajectory.json, manifest.json, audit.png and, from CSV, kept.csv there.",
        show_default=False,
    ),
]  # fmt: skip
Flipped = Annotated[
    Path | None,
    typer.Option(
        "--flipped", metavar="FILE",
        help="Pairs whose right answers wear the style of wrong ones: heads of both sets are scored on them.",
        show_default=False,
    ),
]  # fmt: skip
Natural = Annotated[
    Path | None,
    typer.Option("--natural", metavar="FILE", help="With --flipped: the same on pairs in their natural style.",
                 show_default=False),
]  # fmt: skip
Embeddings = Annotated[
    str | None,
    typer.Option(
        "--embeddings", metavar="FOLDER",
        help="A Hugging Face encoder: --baselines aflite runs on its embeddings of the answers too, and --flipped "
        "scores a head on them.",
        show_default=False,
    ),
]  # fmt: skip
Compare = Annotated[
    Path | None,
    typer.Option(
        "--compare", metavar="FILE",
        help="Per-item correctness of models, JSONL: {model, correct: [0 or 1 for each pair in order]}. Says whether "
        "the kept pairs rank them alike.",
        show_default=False,
    ),
]  # fmt: skip
Check = Annotated[bool, typer.Option("--check", help="Exit 1 if the audit (after pruning: fresh) exceeds --threshold.")]
Seed = Annotated[int, typer.Option("--seed", min=0, help="Of random foldings and of the search.")]


def _field(name: str, what: str) -> typer.models.OptionInfo:
    option: typer.models.OptionInfo = typer.Option(name, metavar="NAME", help=what, show_default=False)
    return option


QuestionField = Annotated[
    str | None, _field("--question-field", "The question's field. [default: question, or Question]")
]
CorrectField = Annotated[
    str | None, _field("--correct-field", "The right answer's field. [default: correct, or Best Answer]")
]
IncorrectField = Annotated[
    str | None, _field("--incorrect-field", "The wrong answer's field. [default: incorrect, or Best Incorrect Answer]")
]
GroupField = Annotated[str | None, _field("--group-field", "The group of a flat row. [default: group]")]
TextField = Annotated[str | None, _field("--text-field", "The text of a flat row. [default: text]")]
LabelField = Annotated[str | None, _field("--label-field", "The label of a flat row. [default: label]")]
Positive = Annotated[
    str | None,
    typer.Option("--positive", metavar="LABEL", help="The label of right texts, where it is neither 1 nor true.",
                 show_default=False),
]  # fmt: skip


def names_in(text: str, known: tuple[str, ...], option: str) -> tuple[str, ...]:
    """The names of a comma-separated list. Raises UsageError for one that is not known."""
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for name in names:
        if name not in known:
            raise UsageError(f"{option} {name}: expected some of {', '.join(known)}")
    return names


def need_packages(*, draws: bool) -> None:
    """Raises Unavailable, before any work, for a package that is missing."""
    for package, module in (("scikit-learn", "sklearn"), ("scipy", "scipy")):
        if find_spec(module) is None:
            raise missing_extra(package, "audit")
    if draws and find_spec("matplotlib") is None:
        raise missing_extra("matplotlib", "plot")
