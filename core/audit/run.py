"""One run of audit-prune in memory: audits of pairs and of flat rows, a pruning by the chosen way, what it leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from strop.core.audit import trees
from strop.core.audit.fast import Fits, pair_foldings
from strop.core.audit.folds import release_folds, stable_folds
from strop.core.audit.leaks import audit_texts, text_model
from strop.core.audit.pairs import Input, Row, is_grouped
from strop.core.audit.probe import audit_pairs, coefficients, out_of_fold, score, stratified_folds
from strop.core.audit.prune import greedy_prune
from strop.core.audit.rules import FoldRule
from strop.core.audit.search import Found, lp_search
from strop.core.audit.significance import (
    ablations,
    bootstrap_interval,
    feature_table,
    is_swappable,
    shuffle_p_value,
    swap_p_value,
)
from strop.core.audit.surface6 import NAMES, feature_rows
from strop.core.errors import UsageError

if TYPE_CHECKING:
    from numpy import ndarray

FRESH_FOLDINGS = 200
TEXT_FOLDINGS = 2


@dataclass(frozen=True, slots=True)
class Choice:
    """What the options ask for. `method` is lp or greedy, `against` linear, trees or both."""

    rule: FoldRule
    threshold: float = 0.53
    method: str = "lp"
    score: str = "imbalance"
    adds_back: bool = True
    against: str = "linear"
    probes: tuple[str, ...] = ("features",)
    evaluations: int = 360
    permutations: int = 1000
    seed: int = 0


@dataclass(slots=True)
class PairSet:
    """Pairs as arrays: `rows` [n, 2, 6] features (right answer first), `groups` [n], and the texts."""

    rows: ndarray
    groups: ndarray
    texts: list[tuple[str, str]] = field(repr=False)

    def __len__(self) -> int:
        return len(self.texts)

    def part(self, keep: ndarray) -> PairSet:
        """The pairs at these indices."""
        return PairSet(self.rows[keep], self.groups[keep], [self.texts[index] for index in keep])


def pair_set(found: Input) -> PairSet:
    """The arrays of what was read."""
    import numpy as np

    texts = [(pair.correct, pair.incorrect) for pair in found.pairs]
    flat = feature_rows([text for pair in texts for text in pair])
    return PairSet(flat.reshape(-1, 2, len(NAMES)), np.array(found.groups()), texts)


def assess(pairs: PairSet, choice: Choice) -> dict[str, Any]:
    """The audit of pairs: AUC with interval and p, accuracies, a table of features, ablations, other probes.

    Under stable and release folds scikit-learn gives the AUC; under random:K it is the mean over K foldings. At least
    five groups are needed (check_pairs).
    """
    import numpy as np

    foldings = choice.rule.foldings(pairs.groups)
    fits = Fits(pairs.rows)
    logits = fits.held_out(foldings)
    right, wrong = logits[:, 0::2], logits[:, 1::2]
    if choice.rule.kind == "random":
        auc = float(fits.aucs(foldings).mean())
        accuracy = float(((right >= 0).mean() + (wrong < 0).mean()) / 2)
        paired = float(((right > wrong) + 0.5 * (right == wrong)).mean())
    else:
        audit = audit_pairs(pairs.rows, foldings[0])
        auc, accuracy, paired = audit.auc, audit.accuracy, audit.paired_accuracy or 0.0
        right, wrong = audit.probability[None, 0::2], audit.probability[None, 1::2]
    low, high = bootstrap_interval(right, wrong)
    result: dict[str, Any] = {
        "pairs": len(pairs), "groups": len(np.unique(pairs.groups)), "folds": choice.rule.name, "auc": auc,
        "low": low, "high": high, "accuracy": accuracy, "paired_accuracy": paired, "p": None,
        "permutations": choice.permutations, "null": "labels swapped within pairs",
    }  # fmt: skip
    if choice.permutations:
        observed = min(auc, float(fits.aucs(foldings[:1]).mean())) if choice.rule.kind != "random" else auc
        result["p"] = swap_p_value(fits, foldings, observed, choice.permutations)
    result["features"] = feature_table(pairs.rows)
    result["without"] = ablations(pairs.rows, foldings)
    result["others"] = others(pairs, choice)
    return result


def others(pairs: PairSet, choice: Choice) -> dict[str, float]:
    """Mean AUC over random foldings of probes beyond the linear one: trees on the same features, words, characters."""
    found = {"trees": trees.mean_auc(trees.tree_audits(pairs.rows, pairs.groups, trees.NUM_FOLDINGS, (choice.seed, 8)))}
    for kind in choice.probes:
        if kind != "features":
            folds = pair_foldings(pairs.groups, TEXT_FOLDINGS, (choice.seed, 8))
            aucs = [audit_texts(pairs.texts, one, partial(text_model, kind)).auc for one in folds]
            found[kind] = sum(aucs) / len(aucs)
    return found


def fresh_aucs(pairs: PairSet, seed: int) -> ndarray:
    """AUCs over 200 foldings that nothing in the run has used: shape [200]."""
    return Fits(pairs.rows).aucs(pair_foldings(pairs.groups, FRESH_FOLDINGS, (seed, 9)))


def prune(pairs: PairSet, choice: Choice, tick: Callable[[], None] = lambda: None) -> Found:
    """The kept pairs by the chosen way; `keep` is None where the threshold cannot be met."""
    if choice.against == "trees":
        return trees.margin_prune(pairs.rows, pairs.groups, choice.threshold, choice.seed, tick)
    if choice.against == "both":
        return trees.prune_both(
            pairs.rows, pairs.groups, choice.threshold, evaluations=choice.evaluations, seed=choice.seed, tick=tick
        )
    if choice.method == "greedy":
        return greedy_prune(
            pairs.rows, pairs.groups, choice.threshold, choice.rule, score=choice.score, adds_back=choice.adds_back,
            tick=tick,
        )  # fmt: skip
    return lp_search(
        pairs.rows, pairs.groups, choice.threshold, num_foldings=choice.rule.num_foldings,
        evaluations=choice.evaluations, seed=choice.seed, tick=tick,
    )  # fmt: skip


def assess_rows(rows: Sequence[Row], choice: Choice) -> dict[str, Any]:
    """The audit of flat rows: grouped folds where rows share groups, else stratified ones (sheet A3, 6).

    With pairs in all groups labels are swapped within them for p, else shuffled. Fold rules other than stable are
    UsageErrors here, but for release on rows without groups, whose stratified folds are the release's.
    """
    import numpy as np

    features = feature_rows([row.text for row in rows])
    labels = np.array([int(row.label) for row in rows])
    keys = [row.group if row.group is not None else f"\0{index}" for index, row in enumerate(rows)]
    grouped = is_grouped(rows)
    if grouped:
        numbers: dict[str, int] = {}
        inverse = np.array([numbers.setdefault(key, len(numbers)) for key in keys])
        sizes = np.bincount(inverse)
        if choice.rule.kind == "release" and len(set(sizes.tolist())) > 1:
            raise UsageError("--folds release: its order is known for groups of one size only; use --folds stable")
        folds = (release_folds(len(sizes)) if choice.rule.kind == "release" else stable_folds(sizes))[inverse]
    else:
        folds = stratified_folds(labels)
    audit = score(out_of_fold(features, labels, folds), labels, paired=False)
    swappable = grouped and is_swappable(keys, [row.label for row in rows])
    p = None
    if choice.permutations:
        p = (
            _grouped_swap_p(features, labels, folds, keys, audit.auc, choice.permutations)
            if swappable
            else shuffle_p_value(features, labels, folds, audit.auc, choice.permutations)
        )
    low, high = _cluster_interval(audit.probability, labels, keys)
    weights = coefficients(features, labels)
    return {
        "rows": len(rows), "groups": len(set(keys)), "folds": "grouped" if grouped else "stratified", "auc": audit.auc,
        "low": low, "high": high, "accuracy": audit.accuracy, "p": p, "permutations": choice.permutations,
        "null": "labels swapped within groups" if swappable else "labels shuffled",
        "features": [
            {"feature": name, "mean_correct": float(features[labels == 1, index].mean()),
             "mean_incorrect": float(features[labels == 0, index].mean()), "coefficient": float(weights[index])}
            for index, name in enumerate(NAMES)
        ],
    }  # fmt: skip


def _grouped_swap_p(
    features: ndarray, labels: ndarray, folds: ndarray, keys: Sequence[str], observed: float, permutations: int
) -> float:
    import numpy as np

    members: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    order = [index for one in members.values() for index in sorted(one, key=lambda row: -labels[row])]
    fits = Fits(features[order].reshape(-1, 2, len(NAMES)))
    pair_folds = folds[order][0::2]
    here = float(fits.aucs(pair_folds[None])[0])
    return swap_p_value(fits, np.array([pair_folds]), min(observed, here), permutations)


def _cluster_interval(probability: ndarray, labels: ndarray, keys: Sequence[str]) -> tuple[float, float]:
    """95 % percentile bootstrap over groups, on fixed out-of-fold probabilities (1000 resamples, seed 42)."""
    import numpy as np

    from strop.core.audit.fast import pooled_auc
    from strop.core.audit.significance import RESAMPLES, SEED

    members: dict[str, list[int]] = {}
    for index, key in enumerate(keys):
        members.setdefault(key, []).append(index)
    clusters = [np.array(one) for one in members.values()]
    random = np.random.default_rng(SEED)
    aucs = []
    for _ in range(RESAMPLES):
        rows = np.concatenate([clusters[index] for index in random.integers(0, len(clusters), len(clusters))])
        right = labels[rows] == 1
        if right.any() and not right.all():
            aucs.append(pooled_auc(probability[rows[right]], probability[rows[~right]]))
    low, high = np.percentile(aucs, [2.5, 97.5])
    return float(low), float(high)
