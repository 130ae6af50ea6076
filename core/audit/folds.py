"""Which fold of cross-validation a group of rows falls into: three rules (method sheet audit-prune, A3 and A4b).

A folding is an array of fold numbers, one for each group; a group (a pair, or the pairs of one question) is not split.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

NUM_FOLDS = 5
# Segments of up to this many entries go to insertion sort, which moves no equal keys.
SMALL_SEGMENT = 17


def stable_folds(sizes: ndarray) -> ndarray:
    """Groups by size, the last of equal ones first, each to the fold with the fewest rows so far: shape [groups].

    For equal sizes that is fold (n - 1 - p) mod 5 for the group at position p; scikit-learn's GroupKFold does the same
    where its sort is stable. [measured]

    >>> import numpy as np
    >>> stable_folds(np.ones(6, dtype=int)).tolist()
    [0, 4, 3, 2, 1, 0]
    """
    import numpy as np

    folds = np.empty(len(sizes), dtype=np.int64)
    filled = np.zeros(NUM_FOLDS, dtype=np.int64)
    for group in np.argsort(sizes, kind="stable")[::-1]:
        folds[group] = filled.argmin()
        filled[folds[group]] += sizes[group]
    return folds


def introsort_order(num_keys: int) -> list[int]:
    """The order in which an introsort (median of three, short segments left alone) leaves equal keys [measured].

    The published subset rests on it: unshuffled grouped folds sort groups by size, and all pairs have the same size, so
    an unstable sort decides the folds. Its plain form is rebuilt here, so that the folds are the same on any machine.
    """
    order = list(range(num_keys))
    left, right = 0, num_keys - 1
    waiting: list[tuple[int, int]] = []
    while True:
        while right - left >= SMALL_SEGMENT:
            middle = left + (right - left) // 2
            pivot = right - 1
            order[middle], order[pivot] = order[pivot], order[middle]
            i, j = left, pivot
            while True:
                # Equal keys stop both scans at once.
                i, j = i + 1, j - 1
                if i >= j:
                    break
                order[i], order[j] = order[j], order[i]
            order[i], order[pivot] = order[pivot], order[i]
            if i - left < right - i:
                waiting.append((i + 1, right))
                right = i - 1
            else:
                waiting.append((left, i - 1))
                left = i + 1
        if not waiting:
            return order
        left, right = waiting.pop()


def release_folds(num_groups: int) -> ndarray:
    """The folds of the authors' machine: the reversed introsort order, dealt to five folds in turn [measured]."""
    import numpy as np

    folds = np.empty(num_groups, dtype=np.int64)
    folds[introsort_order(num_groups)[::-1]] = np.arange(num_groups) % NUM_FOLDS
    return folds


def random_folds(num_groups: int, generator: object) -> ndarray:
    """Equal folds (sizes differ by one at most) in random order, drawn from a numpy Generator."""
    import numpy as np

    assert isinstance(generator, np.random.Generator)
    folds = np.arange(num_groups) % NUM_FOLDS
    generator.shuffle(folds)
    return folds
