"""The six surface features of an answer, Surface6 (method sheet audit-prune, A2) [authors' release].

Each is a function of one string and never sees the question. The lexicon is English; in other languages only word_count
and avg_token_len say something, and `num_without_lexicon` counts answers for which that is likely.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from numpy import ndarray

NAMES = ("word_count", "neg_cnt", "avg_token_len", "type_token", "neg_lead", "hedge_rate")
# The groups whose ablation the release reports.
GROUPS = {
    "negation": ("neg_cnt", "neg_lead"),
    "hedging": ("hedge_rate",),
    "length and regularity": ("word_count", "avg_token_len", "type_token"),
}
# isn't, aren't and hasn't are not in the release's list, on purpose. [authors' release]
NEGATIONS = (
    "no", "not", "never", "none", "nothing", "nobody", "cannot", "can't", "don't", "doesn't", "didn't", "won't",
    "wasn't", "weren't",
)  # fmt: skip
LEADS = ("no", "not", "there is no", "there are no", "there's no", "none", "never", "nothing", "nobody")
HEDGES = (
    "might", "could", "may", "generally", "typically", "often", "usually", "sometimes", "likely", "probably",
    "possibly", "appears to", "seems", "suggests", "roughly", "approximately", "are expected to",
)  # fmt: skip

TOKEN = re.compile(r"[A-Za-z0-9]+(?:'[A-Za-z0-9]+)?")
_NEGATION = re.compile(rf"\b(?:{'|'.join(map(re.escape, NEGATIONS))})\b")
_LEAD = re.compile(rf"(?:{'|'.join(map(re.escape, LEADS))})\b")
_HEDGE = re.compile(rf"\b(?:{'|'.join(map(re.escape, HEDGES))})\b")


def surface6(text: str) -> tuple[float, float, float, float, float, float]:
    """The features of one answer, in the order of `NAMES`.

    word_count counts pieces between white space, not tokens; hedge_rate is hedges per such piece. An empty answer has
    zeros. A typographic apostrophe is no apostrophe here: "don\u2019t" is no negation, as in the release.

    >>> surface6("No, it might not")
    (4.0, 2.0, 3.0, 1.0, 1.0, 0.25)
    """
    lower = text.lower()
    num_words = len(text.split())
    tokens = TOKEN.findall(lower)
    return (
        float(num_words),
        float(len(_NEGATION.findall(lower))),
        sum(map(len, tokens)) / len(tokens) if tokens else 0.0,
        len(set(tokens)) / len(tokens) if tokens else 0.0,
        1.0 if _LEAD.match(lower.strip()) else 0.0,
        len(_HEDGE.findall(lower)) / max(1, num_words),
    )


def feature_rows(texts: Sequence[str]) -> ndarray:
    """`surface6` of each text, shape [len(texts), 6], float64."""
    import numpy as np

    return np.array([surface6(text) for text in texts], dtype=np.float64).reshape(-1, len(NAMES))


def num_without_lexicon(texts: Sequence[str]) -> int:
    """How many texts have most of their letters outside of ASCII, so that the English lexicon cannot apply."""

    def is_foreign(text: str) -> bool:
        letters = [char for char in text if char.isalpha()]
        return sum(not char.isascii() for char in letters) * 2 > len(letters)

    return sum(map(is_foreign, texts))


def num_typographic(texts: Sequence[str]) -> int:
    """How many texts hold a typographic apostrophe inside a word, which hides a contraction from the lexicon."""
    return sum(re.search(r"\w\u2019\w", text) is not None for text in texts)
