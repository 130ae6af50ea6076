"""Whether a smaller set ranks models as the whole does: Spearman, Kendall's tau-b, item bootstrap (sheet A6, A7)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from strop.core.errors import DataError, InputMissing, Where

if TYPE_CHECKING:
    from pathlib import Path

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
    known = np.array([draw for draw in draws if draw[0] == draw[0]])
    ends = np.percentile(known, [2.5, 97.5], axis=0) if len(known) else np.full((2, 2), float("nan"))
    return Fidelity(
        spearman(whole, part), float(ends[0, 0]), float(ends[1, 0]),
        kendall(whole, part), float(ends[0, 1]), float(ends[1, 1]), len(correct),
    )  # fmt: skip


class _Answers(Struct):
    model: str
    correct: list[float]


def read_correctness(path: Path, num_items: int) -> ndarray:
    """The file of --compare: one line a model, {model, correct: [...]}; shape [models, items].

    Raises InputMissing, or DataError with the place.
    """
    import numpy as np

    rows: list[list[float]] = []
    try:
        lines = path.read_bytes().split(b"\n")
    except OSError as error:
        raise InputMissing(f"{path}: {error.strerror}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = Where(str(path), number)
        try:
            answers = msgspec.json.decode(line, type=_Answers)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise DataError(str(error), where=where) from None
        if len(answers.correct) != num_items:
            raise DataError(f"{len(answers.correct)} values for {num_items} pairs", where=where, field="correct")
        if not all(0 <= value <= 1 for value in answers.correct):
            raise DataError("a value outside of 0 to 1", where=where, field="correct")
        rows.append(answers.correct)
    if len(rows) < 3:
        raise DataError(f"{path}: {len(rows)} models; ranks need at least three")
    return np.array(rows, dtype=np.float64)
