"""Sequences into packs of about so many tokens, without padding."""

from __future__ import annotations

from collections.abc import Sequence


def pack(lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Indices of the sequences of each pack: first fit, longest first, so that packs are full and few.

    A sequence longer than `budget` gets a pack of its own. Ties are broken by index: the same lengths give the same
    packs. Inside a pack the order is that of the input.

    >>> pack([5, 3, 4, 2], budget=7)
    [[0, 3], [1, 2]]
    """
    packs: list[list[int]] = []
    room: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        place = next((i for i, left in enumerate(room) if left >= lengths[index]), None)
        if place is None:
            packs.append([])
            room.append(budget)
            place = len(packs) - 1
        packs[place].append(index)
        room[place] -= lengths[index]
    return [sorted(one) for one in packs]
