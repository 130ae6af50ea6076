"""Fold rules by name, and the audit under one: what `--folds` says."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.core.audit.fast import Fits, pair_foldings
from strop.core.audit.folds import NUM_FOLDS, release_folds, stable_folds
from strop.core.errors import UsageError

if TYPE_CHECKING:
    from numpy import ndarray

DEFAULT_FOLDINGS = 100
MAX_FOLDINGS = 10_000


def is_auditable(groups: ndarray) -> bool:
    """Whether pairs in these groups [n] can be audited: with fewer than five some fold would be empty."""
    import numpy as np

    return len(np.unique(groups)) >= NUM_FOLDS


@dataclass(frozen=True, slots=True)
class FoldRule:
    """`stable`, `release` (each one folding, fixed) or `random` (`num_foldings` of them under `seed`; the mean counts).

    Under `release` every pair is a group of its own, as there; otherwise pairs with the same question share a fold.
    """

    kind: str
    num_foldings: int = 1
    seed: int = 0

    @property
    def name(self) -> str:
        """As it is written on the command line."""
        return f"random:{self.num_foldings}" if self.kind == "random" else self.kind

    def foldings(self, groups: ndarray) -> ndarray:
        """Folds of pairs in groups [n], shape [R, n]."""
        import numpy as np

        if self.kind == "release":
            return release_folds(len(groups))[None]
        _, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
        if self.kind == "stable":
            return stable_folds(sizes)[inverse][None]
        return pair_foldings(groups, self.num_foldings, (self.seed, 0))

    def auc(self, rows: ndarray, groups: ndarray) -> float:
        """Mean audit AUC of pairs `rows` [n, 2, d] over the rule's foldings, by the fast probe."""
        return float(Fits(rows).aucs(self.foldings(groups)).mean())


def parse_rule(text: str, seed: int) -> FoldRule:
    """The rule that --folds names. Raises UsageError.

    >>> parse_rule("random:16", 1).num_foldings
    16
    """
    if text in ("stable", "release"):
        return FoldRule(text)
    kind, _, number = text.partition(":")
    if kind == "random" and (not number or number.isdecimal()):
        count = int(number or DEFAULT_FOLDINGS)
        if 1 <= count <= MAX_FOLDINGS:
            return FoldRule("random", count, seed)
    raise UsageError(f"--folds {text}: expected stable, release or random:K with K from 1 to {MAX_FOLDINGS}")
