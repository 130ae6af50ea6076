"""Other ways to a smaller set, at equal size: a fixed prefix, AFLite, chance (sheet A4 and A7) [authors' release]."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from strop.core.audit.fast import Fits
from strop.core.audit.surface6 import NAMES

if TYPE_CHECKING:
    from numpy import ndarray

Logits = Callable[["ndarray", "ndarray"], "ndarray"]
BASELINES = ("prefix", "aflite", "random")
BINS = 4
AFLITE_MODELS = 64
AFLITE_DROP = 10


def prefix_order(texts: Sequence[tuple[str, str]], rows: ndarray, seed: int = 42) -> ndarray:
    """The order of which the fixed prefix is a prefix: pairs without negation first, small length gaps first.

    Quartile bins of |len difference| / longer (characters) are shuffled with seed + bin; then sorted by (any negation
    in the pair, length gap, id), which leaves the shuffle no say but where all three agree, so none.
    """
    import numpy as np

    gaps = np.array([abs(len(a) - len(b)) / max(len(a), len(b), 1) for a, b in texts])
    negated = np.asarray((rows[:, :, NAMES.index("neg_cnt")] > 0).any(axis=1))
    edges = np.quantile(gaps, np.arange(1, BINS) / BINS)
    bins = np.searchsorted(edges, gaps, "right")
    shuffled: list[int] = []
    for number in range(BINS):
        members = np.flatnonzero(bins == number)
        np.random.default_rng(seed + number).shuffle(members)
        shuffled += members.tolist()
    return np.array(sorted(shuffled, key=lambda pair: (negated[pair], gaps[pair], pair)), dtype=np.int64)


def probe_logits(rows: ndarray, seen: ndarray) -> ndarray:
    """Logits [B, 2 n] of all rows by one six-feature probe for each row of `seen` [B, n] (1 where a pair is fitted)."""
    import numpy as np

    fits = Fits(rows)
    return np.asarray(fits.weights(np.repeat(seen, 2, axis=1)) @ fits.augmented.T)


def aflite(rows: ndarray, size: int, seed: int, logits_of: Logits = probe_logits) -> ndarray:
    """AFLite: each round 64 probes on random halves, then the 10 most predictable pairs leave.

    Predictability of a pair is how often probes that did not see it label its answers rightly, each on its own, as the
    release's AUCs at five sizes show (which answer scores higher gives other ones). [measured] `rows` [n, 2, d] are
    features, or whatever `logits_of` fits its models to. Raises ValueError unless 0 < size <= n.
    """
    import numpy as np

    if not 0 < size <= len(rows):
        raise ValueError(f"{size} of {len(rows)} pairs")
    random = np.random.default_rng((seed, 6))
    left = np.arange(len(rows))
    while len(left) > size:
        seen = np.zeros((AFLITE_MODELS, len(left)))
        for row in seen:
            row[random.permutation(len(left))[: len(left) // 2]] = 1
        logits = logits_of(rows[left], seen)
        right = ((logits[:, 0::2] >= 0) + 1.0 * (logits[:, 1::2] < 0)) / 2
        unseen = 1 - seen
        predictable = (right * unseen).sum(axis=0) / np.maximum(1, unseen.sum(axis=0))
        drop = min(AFLITE_DROP, len(left) - size)
        left = np.delete(left, np.argsort(-predictable, kind="stable")[:drop])
    return left


def random_subset(num_pairs: int, size: int, seed: int) -> ndarray:
    """`size` of the pairs by chance, in order: default_rng(seed).choice, as the release draws its controls."""
    import numpy as np

    return np.sort(np.random.default_rng(seed).choice(num_pairs, size, replace=False))


def baseline(name: str, texts: Sequence[tuple[str, str]], rows: ndarray, size: int, seed: int) -> ndarray:
    """Indices of the `size` pairs that a baseline of `BASELINES` keeps."""
    import numpy as np

    if name == "prefix":
        return np.sort(prefix_order(texts, rows)[:size])
    return aflite(rows, size, seed) if name == "aflite" else random_subset(len(rows), size, seed)
