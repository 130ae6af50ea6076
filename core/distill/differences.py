"""Where two texts differ, for a tokenizer that does not give back the bytes it was given.

Normalisation (NFC), a dropped control character, bytes that are no UTF-8: such changes are local, and the text on
either side is still the same text. The comparison is by characters, so that a difference never starts inside one. A
byte that belongs to no character equals nothing, not even the same byte of the other text.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.core.credit.gigpo import Ints

# Three codes of 21 bits fit one integer: what follows a difference is found by comparing such triples.
BITS = 21
NO_CHARACTER = (0x110000, 0x110001)
END = (0x110002, 0x110003, 0x110004)
FIRST_WINDOW_CHARACTERS = 16


def text_differences(first: bytes, second: bytes) -> Ints:
    """The stretches in which the texts differ: [D, 4] rows of first start, first end, second start, second end (bytes).

    Rows are in order and between two of them lies at least one equal character; one side of a row may be empty. After a
    difference the texts are taken to be level again where three characters (or all up to the end) agree, nearest first:
    what is masked may be a little more than an exact comparison would find, never less.

    >>> text_differences(b"a caf\\xc3\\xa9 x", b"a cafe\\xcc\\x81 x").tolist()
    [[5, 7, 5, 8]]
    """
    import numpy as np

    if first == second and _is_text(first):
        return np.zeros((0, 4), np.int64)
    codes_1, offsets_1 = _characters(first, NO_CHARACTER[0])
    codes_2, offsets_2 = _characters(second, NO_CHARACTER[1])
    triples_1, triples_2 = _triples(codes_1), _triples(codes_2)
    rows: list[tuple[int, int, int, int]] = []
    i = j = 0
    while True:
        equal = _equal_run(codes_1[i:], codes_2[j:])
        i, j = i + equal, j + equal
        if i == len(codes_1):
            break
        ahead_1, ahead_2 = _level_again(triples_1[i:], triples_2[j:])
        rows.append((i, i + ahead_1, j, j + ahead_2))
        i, j = i + ahead_1, j + ahead_2
    found = np.array(rows, np.int64).reshape(-1, 4)
    return np.concatenate([offsets_1[found[:, :2]], offsets_2[found[:, 2:]]], axis=1)


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _characters(data: bytes, no_character: int) -> tuple[Ints, Ints]:
    """The code of each character, then three ends of text; and the byte at which each starts."""
    import numpy as np

    text = data.decode("utf-8", "surrogateescape").encode("utf-32-le", "surrogatepass")
    codes = np.frombuffer(text, "<u4").astype(np.int64)
    escaped = (codes >= 0xDC80) & (codes <= 0xDCFF)
    widths = 1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000)
    widths[escaped] = 1
    codes[escaped] = no_character
    return np.append(codes, END), np.concatenate([[0], np.cumsum(widths)])


def _triples(codes: Ints) -> Ints:
    return (codes[:-2] << 2 * BITS) | (codes[1:-1] << BITS) | codes[2:]


def _equal_run(codes_1: Ints, codes_2: Ints) -> int:
    """How many characters agree from here on."""
    size, done, most = 64, 0, min(len(codes_1), len(codes_2))
    while done < most:
        stop = min(done + size, most)
        unequal = codes_1[done:stop] != codes_2[done:stop]
        if unequal.any():
            return done + int(unequal.argmax())
        done, size = stop, size * 2
    return done


def _level_again(triples_1: Ints, triples_2: Ints) -> tuple[int, int]:
    """How far ahead each text next agrees with the other; the ends of both always do."""
    import numpy as np

    window = FIRST_WINDOW_CHARACTERS
    while True:
        # The first place of each triple that both windows hold.
        _, at_1, at_2 = np.intersect1d(triples_1[:window], triples_2[:window], return_indices=True)
        if len(at_1):
            nearest = int((at_1 + at_2).argmin())
            return int(at_1[nearest]), int(at_2[nearest])
        window *= 4
