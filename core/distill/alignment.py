"""The units of text that two tokenizers share: where a student's and a teacher's tokens end at the same byte.

Sheet compass, section 2.3 (the paper names SimCT, arXiv:2605.07711, and 2606.09456 for it): walk over the end offsets
of both lists of tokens; wherever both end, a unit closes. These are all common boundaries, so units are minimal. Widths
are those of the tokens' own bytes, never of decoded strings: half a character counts, and a start token is nothing.

No unit, hence masked: tokens without bytes; a tail that closes on neither side; tokens that touch bytes which the
other side lacks or spells otherwise (`text_differences`), bytes that are no UTF-8 among them.

Suffixes: T student tokens, S teacher tokens, U units. numpy over whole texts, no loop over tokens.
"""

# ruff: noqa: N802, N815 (axis suffixes, as in arguments and variables)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from strop.core.distill.differences import text_differences

if TYPE_CHECKING:
    from strop.core.credit.gigpo import Bools, Ints

UNITS = ("all", "one-to-one")
NO_UNIT = -1


@dataclass(frozen=True, slots=True)
class Alignment:
    """Which unit each token belongs to: 0 ... num_units - 1 in order of the text, or -1 for none.

    The tokens of a unit stand together on each side, but for tokens without a unit between them: tokens without bytes,
    and in units that `common_units` joined also what only that side's text holds.
    """

    unit_T: Ints
    unit_S: Ints
    num_units: int

    @property
    def mask_T(self) -> Bools:
        """Whether a student token has a unit."""
        return self.unit_T >= 0

    @property
    def student_tokens_U(self) -> Ints:
        """Student tokens in each unit."""
        return _counts(self.unit_T, self.num_units)

    @property
    def teacher_tokens_U(self) -> Ints:
        """Teacher tokens in each unit."""
        return _counts(self.unit_S, self.num_units)

    @property
    def one_to_one_U(self) -> Bools:
        """Whether a unit is one token on both sides; all others are spans."""
        single: Bools = (self.student_tokens_U == 1) & (self.teacher_tokens_U == 1)
        return single

    @property
    def spans_U(self) -> Ints:
        """[U, 4]: first and one past the last token of each unit, the student's, then the teacher's."""
        import numpy as np

        columns: list[Ints] = []
        for unit in (self.unit_T, self.unit_S):
            tokens = np.flatnonzero(unit >= 0)
            last = np.cumsum(_counts(unit, self.num_units)) - 1
            first = np.concatenate([[0], last[:-1] + 1])[: self.num_units]
            columns += [tokens[first], tokens[last] + 1]
        return np.stack(columns, axis=1)

    def keep(self, keep_U: Bools) -> Alignment:
        """The same without the units that are false in `keep_U`; their tokens have none."""
        import numpy as np

        number = np.append(np.where(keep_U, np.cumsum(keep_U) - 1, NO_UNIT), NO_UNIT)
        return Alignment(number[self.unit_T], number[self.unit_S], int(keep_U.sum()))


def align(student_T: Sequence[bytes], teacher_S: Sequence[bytes], *, ends: bool = False) -> Alignment:
    """The minimal units of two lists of tokens, given as the bytes of each, over the same text.

    A token that is no text (special, end of turn) comes as b"". With `ends` the last token of both sides is the end of
    the turn: the two make a unit, one to one. Either list may be empty. Where the texts differ, units that touch a
    difference are left out. Raises ValueError for an end of turn that is missing or has bytes.

    >>> found = align([b"Hel", b"lo", b" world"], [b"Hello", b" wor", b"ld"])
    >>> found.unit_T.tolist(), found.unit_S.tolist(), found.spans_U.tolist()
    ([0, 0, 1], [0, 1, 1], [[0, 2, 0, 1], [2, 3, 1, 3]])
    """
    import numpy as np

    width_T = np.fromiter(map(len, student_T), np.int64, len(student_T))
    width_S = np.fromiter(map(len, teacher_S), np.int64, len(teacher_S))
    if ends and not (len(width_T) and len(width_S) and width_T[-1] == width_S[-1] == 0):
        raise ValueError("an end of turn on both sides must be their last token, without bytes")
    found = _units(width_T, width_S, text_differences(b"".join(student_T), b"".join(teacher_S)))
    if ends:
        found.unit_T[-1] = found.unit_S[-1] = found.num_units
        found = Alignment(found.unit_T, found.unit_S, found.num_units + 1)
    return found


def identity(num_tokens: int) -> Alignment:
    """The alignment of a list of tokens with itself: student and teacher of one tokenizer (OPD, OPSD, G-OPD)."""
    import numpy as np

    return Alignment(np.arange(num_tokens), np.arange(num_tokens), num_tokens)


def chosen_units(alignment: Alignment, units: str) -> Alignment:
    """`--units`: "all", or "one-to-one" units alone. Raises ValueError for any other word."""
    if units not in UNITS:
        raise ValueError(f"unknown units {units!r}, expected one of {', '.join(UNITS)}")
    return alignment if units == "all" else alignment.keep(alignment.one_to_one_U)


def common_units(first: Alignment, second: Alignment) -> tuple[Alignment, Alignment]:
    """Both alignments of one student on the finest units that are whole units of each (sheet, 2.3, last item but one).

    For a teacher and a reference of different tokenizers, each aligned to the student: the results agree in unit_T. A
    student token without a unit in one of them takes the units it stands in with it. Units that are one to one on both
    sides are left by `keep` with both `one_to_one_U`, on each result.
    """
    import numpy as np

    # Tokens without a unit in either stay without; left out, they cannot part the tokens on both sides of them.
    tokens = np.flatnonzero((first.unit_T >= 0) | (second.unit_T >= 0))
    one, other = first.unit_T[tokens], second.unit_T[tokens]
    closes = (one[1:] != one[:-1]) & (other[1:] != other[:-1])
    group = np.concatenate([[0], np.cumsum(closes)])[: len(tokens)]
    whole = np.ones(int(group[-1]) + 1 if len(group) else 0, bool)
    whole[group[(one < 0) | (other < 0)]] = False
    number = np.where(whole, np.cumsum(whole) - 1, NO_UNIT)
    unit_T = np.full(len(first.unit_T), NO_UNIT)
    unit_T[tokens] = number[group]

    def moved(alignment: Alignment) -> Alignment:
        unit_U = np.full(alignment.num_units + 1, NO_UNIT)
        unit_U[alignment.unit_T] = unit_T
        unit_U[NO_UNIT] = NO_UNIT
        return Alignment(unit_T, unit_U[alignment.unit_S], int(whole.sum()))

    return moved(first), moved(second)


def _units(width_T: Ints, width_S: Ints, differences: Ints) -> Alignment:
    """Units by widths (bytes). A scale is laid under both texts on which a difference takes the room of both sides.

    On it the inside of a difference belongs to one text alone, so no boundary in there is common.
    """
    import numpy as np

    start_1, end_1, start_2, end_2 = differences.T
    size_1, size_2 = end_1 - start_1, end_2 - start_2
    length = int(width_T.sum() + size_2.sum())
    # A side that is empty in a difference has one offset for the difference's start and end: both are its boundaries.
    place_T, bound_T = _on_scale(width_T, np.maximum(end_1, start_1 + 1), end_1, size_2, length)
    place_S, bound_S = _on_scale(width_S, start_2 + 1, np.minimum(end_2, start_2 + 1), size_1, length)
    common = np.flatnonzero(bound_T & bound_S)
    unit_T, unit_S = np.full(len(width_T), NO_UNIT), np.full(len(width_S), NO_UNIT)
    unit_T[width_T > 0] = np.searchsorted(common, place_T)
    unit_S[width_S > 0] = np.searchsorted(common, place_S)
    # Beyond the last common boundary is the tail.
    clean = np.ones(len(common) + 1, bool)
    clean[-1] = False
    clean[np.searchsorted(common, start_1 + np.cumsum(size_2) - size_2, side="right")] = False
    return Alignment(unit_T, unit_S, len(clean)).keep(clean)


def _on_scale(width: Ints, early: Ints, late: Ints, size: Ints, length: int) -> tuple[Ints, Bools]:
    """Where each token with bytes ends on the scale, and which of its places are boundaries.

    The other side's share `size` of a difference is added from offset `early` on, for boundaries also from `late` on.
    """
    import numpy as np

    end = np.cumsum(width[width > 0])
    if not len(size):
        is_bound = np.zeros(length + 1, bool)
        is_bound[end] = True
        return end, is_bound
    added = np.concatenate([[0], np.cumsum(size)])
    place = end + added[np.searchsorted(early, end, side="right")]
    is_bound = np.zeros(length + 1, bool)
    is_bound[place] = True
    # The start of the text is a boundary too, but closes no unit.
    from_start = np.concatenate([[0], end])
    is_bound[from_start + added[np.searchsorted(late, from_start, side="right")]] = True
    is_bound[0] = False
    return place, is_bound


def _counts(unit: Ints, num_units: int) -> Ints:
    import numpy as np

    return np.bincount(unit[unit >= 0], minlength=num_units)
