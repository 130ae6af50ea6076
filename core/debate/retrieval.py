"""Retrieval of skills: cosine of bags of tokens (equation 2 [paper]; it is not BM25).

The paper leaves open how text is cut and counted. Ours [inferred]: Unicode compatibility forms and case folded; words
are runs of letters and digits ("_" divides); Chinese, Japanese and Korean script, which has no spaces, by pairs of
neighbouring characters; tokens are counted ("counts") or only noted ("binary"); there are no stop words.
"""

from __future__ import annotations

import math
import re
import unicodedata
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

BAGS = ("counts", "binary")
# Kana, CJK ideographs with their extensions and compatibility forms, Hangul.
CJK = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af\U00020000-\U0003134f"
PIECE = re.compile(rf"[{CJK}]+|[^\W_{CJK}]+")
IS_CJK = re.compile(f"[{CJK}]")


@dataclass(frozen=True, slots=True)
class Found:
    """A skill that was retrieved; `similarity` is in [0, 1]."""

    id: str
    similarity: float


def folded(text: str) -> str:
    """Compatibility forms (full-width letters, ligatures) and case made one."""
    return unicodedata.normalize("NFKC", text).casefold()


def tokens(text: str) -> Iterator[str]:
    """The tokens of a text, in order, repeats included.

    >>> list(tokens("Book_a flight 预订航班")), list(tokens("票"))
    (['book', 'a', 'flight', '预订', '订航', '航班'], ['票'])
    """
    for match in PIECE.finditer(folded(text)):
        piece = match.group()
        if len(piece) == 1 or not IS_CJK.match(piece):
            yield piece
        else:
            yield from (piece[i : i + 2] for i in range(len(piece) - 1))


def bag(text: str, how: str = "counts") -> Counter[str]:
    """How often each token occurs; with "binary" 1 for each that does."""
    counted = Counter(tokens(text))
    return Counter(dict.fromkeys(counted, 1)) if how == "binary" else counted


def cosine(left: Mapping[str, int], right: Mapping[str, int]) -> float:
    """sum(l_i r_i) / (|l| |r|), in [0, 1]; 0 where either is empty (equation 2 [paper]).

    >>> round(cosine({"a": 1, "b": 1}, {"a": 1, "c": 1}), 12), cosine({}, {"a": 1})
    (0.5, 0.0)
    """
    shared = sum(count * right[token] for token, count in left.items() if token in right)
    if not shared:
        return 0.0
    norms = sum(n * n for n in left.values()) * sum(n * n for n in right.values())
    return min(1.0, shared / math.sqrt(norms))


def words_of(value: Any) -> Iterator[str]:
    """The text in an agent's profile: strings and numbers wherever they stand, names of fields that are true.

    Names of other fields and ids are no text.
    """
    if isinstance(value, Mapping):
        for name, inner in value.items():
            if inner is True:
                yield str(name)
            elif name != "id":
                yield from words_of(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from words_of(inner)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def example_text(query: str, agent: Mapping[str, Any]) -> str:
    """What of an example is compared with the skills."""
    return "\n".join([query, *words_of(agent)])


def retrieve(
    text: str, skills: Sequence[tuple[str, str, bool]], *, k: int = 3, how: str = "counts"
) -> tuple[list[Found], bool]:
    """The k skills most similar to `text`, and whether the seeds had to stand in.

    `skills`: id, text, whether it is a seed. If every similarity is 0, all seeds are given (k = 3, three fixed seeds
    [paper]). Equal similarities are in the order of their ids [inferred]. With fewer than k skills all of them are.
    """
    asked = bag(text, how)
    scored = [Found(name, cosine(asked, bag(words, how))) for name, words, _ in skills]
    if all(found.similarity == 0 for found in scored):
        return [Found(name, 0.0) for name in sorted(name for name, _, is_seed in skills if is_seed)][:k], True
    return sorted(scored, key=lambda found: (-found.similarity, found.id))[:k], False
