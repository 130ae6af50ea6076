"""strop audit-prune: pairs of answers in, the pairs whose style does not give the answer away out."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.cli import audit_options as opt
from strop.cli.session import Session, tool
from strop.core.audit import words
from strop.core.audit.baselines import BASELINES, aflite, baseline
from strop.core.audit.leaks import KINDS
from strop.core.audit.pairs import (
    FieldNames,
    Input,
    PairFields,
    check_pairs,
    check_rows,
    field_names,
    names_of,
    read_input,
    refuse_to_prune,
)
from strop.core.audit.rules import parse_rule
from strop.core.errors import DataError, UsageError
from strop.core.records import Metric, Record

if TYPE_CHECKING:
    from numpy import ndarray

    from strop.core.audit.cohorts import Encode
    from strop.core.audit.run import Choice, PairSet
    from strop.core.audit.search import Found


@tool(reads=("example",), writes=("example", "metric"), views={"example": PairFields})
def command(
    io: Session,
    audit_only: opt.AuditOnly = False,
    threshold: opt.Threshold = 0.53,
    folds: opt.Folds = "random:100",
    score: opt.Score = None,
    add_back: opt.AddBack = True,
    against: opt.Against = "linear",
    probe: opt.Probes = "features",
    evaluations: opt.Evaluations = 360,
    permutations: opt.Permutations = 1000,
    baselines: opt.Baselines = None,
    report: opt.ReportDir = None,
    flipped: opt.Flipped = None,
    natural: opt.Natural = None,
    embeddings: opt.Embeddings = None,
    compare: opt.Compare = None,
    check: opt.Check = False,
    seed: opt.Seed = 0,
    question_field: opt.QuestionField = None,
    correct_field: opt.CorrectField = None,
    incorrect_field: opt.IncorrectField = None,
    group_field: opt.GroupField = None,
    text_field: opt.TextField = None,
    label_field: opt.LabelField = None,
    positive: opt.Positive = None,
) -> None:
    """Audit right/wrong answer pairs for surface leaks; prune them.

    A probe that never sees the question reads six counts of each answer (length, negations, token length, repetition,
    a leading negation, hedges). If its AUC under cross-validation is above one half, style gives answers away. The
    audit reports that; pruning deletes as few pairs as possible until the AUC is at most --threshold, and writes the
    others as they came.

    By default the audit is the mean over 100 seeded foldings, and pruning solves a linear program: the most pairs whose
    mean difference in each feature stays within bounds, where a linear probe can see nothing else. The bounds are
    searched, and the choice is made on 200 other foldings. `fresh_auc_mean` is measured on 200 more that nothing in
    the run has used. With --folds stable or release, or with --score, pairs are deleted one at a time as published; one
    fixed folding is then easily over-fitted, which `fresh_auc_mean` shows.

    Linear is not all: trees on the same counts, words and characters still find something. The report says in words
    what was measured and what the audit cannot certify. --against trees or both prunes further.

    Input is CSV with TruthfulQA's columns or JSONL; a line with `text` and `label` is a flat row, for --audit-only.
    Pairs with the same question share a fold (not with --folds release, which has none of that).

    \b
    Examples:
      strop audit-prune --audit-only --folds stable TruthfulQA.csv
      strop audit-prune --threshold 0.53 --report runs/audit TruthfulQA.csv > kept.jsonl
      strop audit-prune --folds release --score imbalance TruthfulQA.csv > greedy.jsonl
      strop audit-prune --against both --probe tfidf,ngrams --only metric pairs.jsonl
      strop audit-prune --audit-only --text-field claim --positive SUPPORTS claims.jsonl

    \b
    Input fields:
      example: question, correct, incorrect (or as --correct-field and its like say); flat: group, text,
      label

    \b
    Output fields:
      example: as it came; from CSV, its columns
      metric: audit_auc, audit_accuracy, paired_accuracy, audit_p, trees_auc and others of all pairs; pairs_kept,
      kept_auc, fresh_auc_mean, with --against trees or both fresh_trees_auc_mean, and others of the kept ones (`of`)

    \b
    Memory:
      needs all input, and 60 bytes a pair and folding of the audit.
    """
    if not (0 < threshold < 1 and math.isfinite(threshold)):
        raise UsageError(f"--threshold {threshold:g}: expected an AUC between 0 and 1")
    rule = parse_rule(folds, seed)
    probes = opt.names_in(probe, KINDS, "--probe")
    rivals = () if baselines is None else opt.names_in(baselines, BASELINES, "--baselines")
    if natural is not None and flipped is None:
        raise UsageError("--natural goes with --flipped")
    if embeddings is not None and flipped is None and "aflite" not in rivals:
        raise UsageError("--embeddings goes with --baselines aflite or --flipped")
    if audit_only and (rivals or flipped or compare or score):
        raise UsageError("--audit-only prunes nothing; leave --baselines, --flipped, --compare and --score out")
    if against != "linear" and score is not None:
        raise UsageError("--score is of the linear probe; leave it out with --against trees or both")
    opt.need_packages(draws=report is not None)
    names = field_names(
        question=question_field, correct=correct_field, incorrect=incorrect_field, group=group_field, text=text_field,
        label=label_field, positive=positive,
    )  # fmt: skip
    found = _read(io, names)
    if not found.pairs and not found.rows and not io.set_aside:
        io.note("no pairs")
        return

    from strop.core.audit.run import Choice

    method = "greedy" if score is not None or rule.kind != "random" else "lp"
    choice = Choice(
        rule=rule, threshold=threshold, method=method, score=score or "imbalance", adds_back=add_back,
        against=against, probes=probes, evaluations=evaluations, permutations=permutations, seed=seed,
    )  # fmt: skip
    if found.rows:
        if not audit_only:
            refuse_to_prune(found.rows)
        check_rows(found)
        _audit_rows(io, found, choice, report)
        return
    check_pairs(found)
    run = _Run(io, found, choice, report)
    run.cohorts = [(name, _cohort(io, path, names)) for name, path in _named(flipped, natural)]
    run.correctness = None if compare is None else _correctness(compare, len(found.pairs))
    run.encode = None if embeddings is None else _encoder(embeddings)
    run.audit()
    if not audit_only:
        run.prune(rivals)
    run.finish(check=check)


def _read(io: Session, names: FieldNames) -> Input:
    if "-" in io.files and sys.stdin.isatty():
        raise UsageError("stdin is a terminal: pipe pairs in or name a FILE (see --help)")

    def set_aside(error: DataError, line: bytes) -> None:
        io.reject(error, Record("example", {}, error.where, line.decode("utf-8", "replace")))

    return read_input(
        io.files, sys.stdin.buffer, names, on_bad=set_aside if io.keep_going else None, on_foreign=io.write
    )


def _named(flipped: Path | None, natural: Path | None) -> list[tuple[str, Path]]:
    return [(name, path) for name, path in (("flipped", flipped), ("natural", natural)) if path is not None]


def _cohort(io: Session, path: Path, names: FieldNames) -> list[tuple[str, str]]:
    cohort = read_input([str(path)], sys.stdin.buffer, names)
    if not cohort.pairs:
        raise DataError(f"{path}: no pairs")
    return [(pair.correct, pair.incorrect) for pair in cohort.pairs]


def _correctness(path: Path, num_items: int) -> ndarray:
    from strop.core.audit.rank import read_correctness

    return read_correctness(path, num_items)


def _encoder(name: str) -> Encode:
    from strop.core.audit.embeddings import Encoder

    return Encoder(name)


def _metric(io: Session, name: str, value: float | int | None, **more: Any) -> None:
    io.emit(Record.make("metric", Metric(name=name, value=value, **more)))


def _audit_rows(io: Session, found: Input, choice: Choice, report: Path | None) -> None:
    from strop.core.audit.report import write_json
    from strop.core.audit.run import assess_rows

    result = assess_rows(found.rows, choice)
    said = words.text_sentences([row.text for row in found.rows]) + words.audit_sentences(result, choice.threshold)
    _metric(io, "audit_auc", result["auc"], low=result["low"], high=result["high"], n=result["rows"], of="all")
    _metric(io, "audit_accuracy", result["accuracy"], n=result["rows"], of="all")
    if result["p"] is not None:
        _metric(io, "audit_p", result["p"], n=choice.permutations, of="all")
    for sentence in said:
        io.note(sentence)
    if report is not None:
        said += words.limits(result, "linear", choice.threshold)
        write_json(report, "audit.json", {"before": result, "words": said})


class _Run:
    """One run over pairs: the audit, the pruning, and what is said and written of both."""

    def __init__(self, io: Session, found: Input, choice: Choice, report: Path | None) -> None:
        from strop.core.audit.run import pair_set

        self.io, self.found, self.choice, self.report = io, found, choice, report
        self.pairs: PairSet = pair_set(found)
        self.said = words.text_sentences([text for pair in self.pairs.texts for text in pair])
        self.before: dict[str, Any] = {}
        self.after: dict[str, Any] | None = None
        self.pruned: Found | None = None
        self.cohorts: list[tuple[str, list[tuple[str, str]]]] = []
        self.correctness: ndarray | None = None
        self.encode: Encode | None = None
        self.measured: list[dict[str, Any]] = []
        self.final: float | None = None
        # What --check judges: the AUC of the probe that was pruned against.
        self.checked = 0.0

    def metric(self, name: str, value: float | int | None, **more: Any) -> None:
        self.measured.append({"name": name, "value": value, **more})

    def audit(self) -> None:
        from strop.core.audit.run import assess

        self.before = assess(self.pairs, self.choice)
        self.final = self.checked = self.before["auc"]
        self.said += words.audit_sentences(self.before, self.choice.threshold)
        self.audit_metrics("audit_auc", self.before, "all")

    def audit_metrics(self, name: str, audit: dict[str, Any], of: str) -> None:
        n = audit["pairs"]
        self.metric(name, audit["auc"], low=audit["low"], high=audit["high"], n=n, of=of)
        self.metric("audit_accuracy", audit["accuracy"], n=n, of=of)
        self.metric("paired_accuracy", audit["paired_accuracy"], n=n, of=of)
        if audit["p"] is not None:
            self.metric("audit_p", audit["p"], n=audit["permutations"], of=of)
        for kind, value in audit["others"].items():
            self.metric(f"{kind}_auc", value, n=n, of=of)

    def prune(self, rivals: tuple[str, ...]) -> None:
        from strop.core.audit.run import assess, fresh_aucs, prune
        from strop.core.audit.trees import NUM_FOLDINGS

        io, choice = self.io, self.choice
        with io.progress("sets tried", choice.evaluations if choice.method == "lp" else None) as bar:
            self.pruned = prune(self.pairs, choice, bar.add)
        keep = self.pruned.keep
        total = len(self.pairs)
        self.said += words.pruning_sentences(
            None if keep is None else len(keep), total, choice.threshold, self.before["auc"]
        )
        self.metric("pairs_kept", 0 if keep is None else len(keep), n=total)
        if keep is None:
            return
        for index in keep:
            io.write(self.found.pairs[index].record)
        kept = self.pairs.part(keep)
        self.after = assess(kept, choice)
        fresh = fresh_aucs(kept, choice.seed)
        self.final = self.checked = float(fresh.mean())
        half = 1.96 * float(fresh.std(ddof=1)) / math.sqrt(len(fresh))
        ends = {"low": self.final - half, "high": self.final + half}
        self.metric("fresh_auc_mean", self.final, n=len(fresh), of="kept", **ends)
        self.audit_metrics("kept_auc", self.after, "kept")
        self.said += words.audit_sentences(self.after, choice.threshold)
        self.said.append(f"AUC over {len(fresh)} fresh foldings: {self.final:.4f}")
        if choice.against != "linear":
            # These foldings of the audit are none that the pruning has seen.
            fresh_trees = self.after["others"]["trees"]
            self.metric("fresh_trees_auc_mean", fresh_trees, n=NUM_FOLDINGS, of="kept")
            self.said.append(f"AUC of trees over {NUM_FOLDINGS} fresh foldings: {fresh_trees:.4f}")
            self.checked = fresh_trees if choice.against == "trees" else max(self.final, fresh_trees)
        self.extras(keep, rivals)

    def extras(self, keep: ndarray, rivals: tuple[str, ...]) -> None:
        """Baselines at equal size, cohorts, rank fidelity: as far as asked for."""
        from strop.core.audit.cohorts import as_metrics, compare_heads
        from strop.core.audit.embeddings import held_out_logits
        from strop.core.audit.run import fresh_aucs

        found = [(name, baseline(name, self.pairs.texts, self.pairs.rows, len(keep), self.choice.seed))
                 for name in rivals]  # fmt: skip
        if "aflite" in rivals and self.encode is not None:
            rows = self.encode([text for pair in self.pairs.texts for text in pair]).reshape(len(self.pairs), 2, -1)
            found.append(("aflite on embeddings", aflite(rows, len(keep), self.choice.seed, held_out_logits)))
        for name, rival in found:
            value = float(fresh_aucs(self.pairs.part(rival), self.choice.seed).mean())
            self.metric("baseline_fresh_auc_mean", value, n=len(rival), of=name)
            self.said.append(f"{name} at {len(rival)} pairs: AUC {value:.4f} over fresh foldings")
        kept_texts = self.pairs.part(keep).texts
        for cohort, texts in self.cohorts:
            self.measured += as_metrics(cohort, compare_heads(self.pairs.texts, kept_texts, texts, self.encode))
        if self.correctness is not None:
            from strop.core.audit.rank import fidelity

            ranks = fidelity(self.correctness, keep)
            for name in ("spearman", "kendall"):
                ends = {end: getattr(ranks, f"{name}_{end}") for end in ("low", "high")}
                self.metric(f"rank_{name}", getattr(ranks, name), n=ranks.num_models, **ends)

    def finish(self, *, check: bool) -> None:
        """The metrics, the sentences, the report; the exit status."""
        io, choice = self.io, self.choice
        for fields in self.measured:
            _metric(io, **{key: _finite(value) for key, value in fields.items()})
        against = choice.against if self.after else "linear"
        limits = words.limits(self.after or self.before, against, choice.threshold)
        for sentence in self.said + limits:
            io.note(sentence)
        if self.report is not None:
            self.write_report(self.report, self.said + limits)
        if self.pruned is not None and self.pruned.keep is None:
            io.say_no(f"--threshold {choice.threshold:g} cannot be met")
        elif check and self.checked > choice.threshold:
            io.say_no(f"AUC {self.checked:.4f} is above --threshold {choice.threshold:g}")

    def write_report(self, folder: Path, said: list[str]) -> None:
        from strop.core.audit.report import draw, manifest, write_bytes, write_json

        write_json(
            folder, "audit.json",
            {"before": self.before, "after": self.after, "metrics": self.measured, "words": said},
        )  # fmt: skip
        trajectory = [] if self.pruned is None else self.pruned.trajectory
        if self.pruned is not None:
            write_json(folder, "trajectory.json", trajectory)
            write_json(folder, "manifest.json", manifest(self.pruned, self.choice, len(self.pairs), self.final,
                                                         names_of(self.io.files)))  # fmt: skip
            if self.found.header is not None and self.pruned.keep is not None:
                rows = [self.found.pairs[index].raw or b"" for index in self.pruned.keep]
                write_bytes(folder, "kept.csv", b"".join([self.found.header, *rows]))
        draw(folder, self.before, self.after, trajectory, self.choice.threshold)


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
