"""Random choices that are the same on every machine and under every version of Python, and the split by hash."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b
from random import Random
from typing import TypeVar

T = TypeVar("T")


class Draws:
    """A source of choices under one seed (see `derive_seed`).

    Built on `Random.random()` alone: it is the one method whose values Python promises never to change.
    """

    def __init__(self, seed: int) -> None:
        self._random = Random(seed).random  # noqa: S311

    def below(self, count: int) -> int:
        """A number in [0, count), for a count far below 2**53."""
        return int(self._random() * count)

    def between(self, low: int, high: int) -> int:
        """A number in [low, high], both included."""
        return low + self.below(high - low + 1)

    def pick(self, items: Sequence[T]) -> T:
        """One of the items."""
        return items[self.below(len(items))]

    def shuffle(self, items: list[T]) -> None:
        """Puts the items in random order, in place (Fisher-Yates)."""
        for i in range(len(items) - 1, 0, -1):
            j = self.below(i + 1)
            items[i], items[j] = items[j], items[i]


def is_heldout(question: str, share: float) -> bool:
    """Whether a question belongs to the held-out part, a `share` of all questions in [0, 1].

    It depends on nothing but the question: its BLAKE2b hash, read as a number in [0, 1), lies below the share. So no
    question is in both parts, whatever the seed, the family's options or the order.
    """
    digest = blake2b(question.encode("utf-8", "surrogatepass"), digest_size=8, person=b"strop split").digest()
    return int.from_bytes(digest, "big") < share * 2**64
