"""Whether a smaller set ranks models as the whole does: Spearman, Kendall's tau-b, item bootstrap (sheet A6, A7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

RESAMPLES = 1000


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Rank agreement of models on the whole set and on its kept part; intervals are 95 % over items."""

    spearman: float
    spearman_low: float
    spearman_high: float
    kendall: float
    kendall_low: float
    kendall_high: float
    num_models: int


def _ranks(values: ndarray) -> ndarray:
    """Average ranks; ties share one."""
    import numpy as np

    less = (values[None, :] < values[:, None]).sum(axis=1)
    same = (values[None, :] == values[:, None]).sum(axis=1)
    return np.asarray(less + (same + 1) / 2)


def spearman(first: ndarray, second: ndarray) -> float:
    """Correlation of average ranks; nan where one side is constant."""
    import numpy as np

    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a * a).sum() * (b * b).sum()))
    return float((a * b).sum() / norm) if norm > 0 else float("nan")


def kendall(first: ndarray, second: ndarray) -> float:
    """Kendall's tau-b; nan where one side is constant.

    >>> import numpy as np
    >>> round(kendall(np.array([1, 2, 3, 4]), np.array([1, 3, 2, 4])), 4)
    0.6667
    """
    import numpy as np

    upper = np.triu_indices(len(first), 1)
    a = np.sign(first[:, None] - first[None, :])[upper]
    b = np.sign(second[:, None] - second[None, :])[upper]
    norm = float(np.sqrt((a != 0).sum() * (b != 0).sum()))
    return float((a * b).sum() / norm) if norm > 0 else float("nan")


def fidelity(correct: ndarray, kept: ndarray, seed: int = 42) -> Fidelity:
    """Rank agreement for `correct` [models, items] (0 to 1) and indices `kept` of items.

    The bootstrap resamples items; what is kept of a resample is its kept part, so both sides move together. Draws in
    which a side is constant are left out. Raises ValueError for fewer than three models.
    """
    import numpy as np

    if len(correct) < 3:
        raise ValueError(f"{len(correct)} models; ranks need at least three")
    inside = np.zeros(correct.shape[1], dtype=bool)
    inside[kept] = True
    random = np.random.default_rng(seed)
    draws: list[tuple[float, float]] = []
    for _ in range(RESAMPLES):
        some = random.integers(0, len(inside), len(inside))
        chosen = some[inside[some]]
        if len(chosen):
            whole, part = correct[:, some].mean(axis=1), correct[:, chosen].mean(axis=1)
            draws.append((spearman(whole, part), kendall(whole, part)))
    whole, part = correct.mean(axis=1), correct[:, kept].mean(axis=1)
    ends = np.nanpercentile(np.array(draws), [2.5, 97.5], axis=0)
    return Fidelity(
        spearman(whole, part), float(ends[0, 0]), float(ends[1, 0]),
        kendall(whole, part), float(ends[0, 1]), float(ends[1, 1]), len(correct),
    )  # fmt: skip
