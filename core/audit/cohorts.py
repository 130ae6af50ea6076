"""Heads trained on the full and on the pruned set, scored on cohorts they have not seen, with exact McNemar (sheet A7).

A head is the six-feature probe, the n-gram probe or a logistic regression on embeddings, fitted to all pairs of a set;
a cohort's pair counts as won if the right answer scores higher. On a surface-flipped cohort the right answers wear the
style of wrong ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from strop.core.audit.embeddings import embedding_head
from strop.core.audit.leaks import fit_texts, text_model
from strop.core.audit.probe import logistic, pair_labels
from strop.core.audit.surface6 import feature_rows

if TYPE_CHECKING:
    from numpy import ndarray

Texts = Sequence[tuple[str, str]]
# What embeds texts [n] as [n, width].
Encode = Callable[[Sequence[str]], "ndarray"]
HEADS = ("features", "tfidf")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Accuracy of the heads of the full and of the pruned set on one cohort; `p` is exact McNemar, two-sided."""

    head: str
    full: float
    pruned: float
    only_full: int
    only_pruned: int
    p: float
    n: int


def mcnemar(only_first: int, only_second: int) -> float:
    """Exact two-sided McNemar: the chance of a split at least as uneven, were each discordant pair a fair coin.

    >>> mcnemar(0, 5), mcnemar(3, 3)
    (0.0625, 1.0)
    """
    total, fewer = only_first + only_second, min(only_first, only_second)
    if total == 0:
        return 1.0
    tail = sum(math.comb(total, count) for count in range(fewer + 1))
    return float(min(1.0, 2 * tail / 2**total))


def wins(head: str, train: Texts, cohort: Texts, encode: Encode | None = None) -> list[bool]:
    """For each pair of the cohort: whether the head fitted to `train` scores the right answer higher.

    A head on words whose training answers have none wins nowhere. The head `embeddings` needs `encode`.
    """
    labels = pair_labels(len(train))
    seen, unseen = [text for pair in train for text in pair], [text for pair in cohort for text in pair]
    if head == "features":
        scores = logistic().fit(feature_rows(seen), labels).decision_function(feature_rows(unseen))
    elif head == "embeddings":
        assert encode is not None
        scores = embedding_head().fit(encode(seen), labels).decision_function(encode(unseen))
    else:
        model = fit_texts(text_model("tfidf"), seen, labels)
        if model is None:
            return [False] * len(cohort)
        scores = model.decision_function(unseen)
    return [bool(right > wrong) for right, wrong in zip(scores[0::2], scores[1::2], strict=True)]


def compare_heads(full: Texts, pruned: Texts, cohort: Texts, encode: Encode | None = None) -> list[Comparison]:
    """Every head of `HEADS` on one cohort, and with `encode` one on embeddings."""
    found = []
    for head in HEADS if encode is None else (*HEADS, "embeddings"):
        first, second = wins(head, full, cohort, encode), wins(head, pruned, cohort, encode)
        only_full = sum(a and not b for a, b in zip(first, second, strict=True))
        only_pruned = sum(b and not a for a, b in zip(first, second, strict=True))
        found.append(
            Comparison(
                head, sum(first) / len(first), sum(second) / len(second), only_full, only_pruned,
                mcnemar(only_full, only_pruned), len(cohort),
            )
        )  # fmt: skip
    return found


def as_metrics(cohort: str, found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """Metric fields of the comparisons: accuracy of each set's head, and the p of their difference."""
    return [
        {"name": name, "value": value, "n": one.n, "of": f"{cohort}, head on {one.head}"}
        for one in found
        for name, value in (("head_full", one.full), ("head_pruned", one.pruned), ("mcnemar_p", one.p))
    ]
