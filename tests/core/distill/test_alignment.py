"""Units of two tokenizations of a text: against a plain walk, with tokens without bytes, tails and differing texts."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from strop.core.distill.alignment import Alignment, align, chosen_units, common_units, identity
from strop.core.distill.differences import text_differences

TEXTS = st.text("ab \n\r\u00e9\u0301\u65e5\U0001f642\U0001f3fd", max_size=24)


@st.composite
def splits(draw, data):
    """The bytes cut anywhere, also inside characters, with empty tokens between."""
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=len(data))))
    edges = [0, *cuts, len(data)]
    return [data[a:b] for a, b in pairwise(edges)]


@st.composite
def two_splits(draw):
    data = draw(TEXTS).encode()
    return draw(splits(data)), draw(splits(data))


def walk(student, teacher):
    """Two pointers: the side whose token ends first moves on; where both end at one byte, a unit closes."""
    found_student, found_teacher = [-1] * len(student), [-1] * len(teacher)
    i = j = at_student = at_teacher = number = 0
    open_student, open_teacher = [], []
    while i < len(student) or j < len(teacher):
        if j == len(teacher) or (i < len(student) and at_student <= at_teacher):
            if student[i]:
                open_student.append(i)
                at_student += len(student[i])
            i += 1
        else:
            if teacher[j]:
                open_teacher.append(j)
                at_teacher += len(teacher[j])
            j += 1
        if at_student == at_teacher and open_student and open_teacher:
            for one in open_student:
                found_student[one] = number
            for one in open_teacher:
                found_teacher[one] = number
            open_student, open_teacher, number = [], [], number + 1
    return found_student, found_teacher, number


def offsets(pieces):
    return set(np.cumsum([len(piece) for piece in pieces]).tolist()) - {0}


def check(found, student, teacher):
    """What holds of every alignment: units are numbered in order, stand together, and have the same bytes."""
    check_units(found, student, teacher)
    for number, (a, b, c, d) in enumerate(found.spans_U.tolist()):
        assert b"".join(student[a:b]) == b"".join(teacher[c:d])
        for unit, pieces, start, stop in ((found.unit_T, student, a, b), (found.unit_S, teacher, c, d)):
            assert unit[start] == unit[stop - 1] == number
            assert all(unit[k] == number or not pieces[k] for k in range(start, stop))


def check_units(found, student, teacher):
    for unit, pieces in ((found.unit_T, student), (found.unit_S, teacher)):
        assert len(unit) == len(pieces)
        assert sorted(set(unit[unit >= 0].tolist())) == list(range(found.num_units))
        assert (np.diff(unit[unit >= 0]) >= 0).all()
    for number in range(found.num_units):
        sides = ((found.unit_T, student), (found.unit_S, teacher))
        first, second = (b"".join(pieces[k] for k in np.flatnonzero(unit == number)) for unit, pieces in sides)
        assert first == second
    assert found.mask_T.sum() == found.student_tokens_U.sum()
    assert found.mask_T.sum() + (found.unit_T < 0).sum() == len(student)


@given(two_splits())
def test_units_are_those_of_the_plain_walk(pieces):
    student, teacher = pieces
    found = align(student, teacher)
    assert (found.unit_T.tolist(), found.unit_S.tolist(), found.num_units) == walk(student, teacher)
    check(found, student, teacher)
    common = offsets(student) & offsets(teacher)
    ends = [len(b"".join(student[:stop])) for stop in found.spans_U[:, 1].tolist()]
    assert ends == sorted(common)
    # Equal texts leave nothing out but tokens without bytes.
    assert [unit < 0 for unit in found.unit_T] == [not piece for piece in student]


def test_the_sheets_example():
    """compass.md 2.2: {Hel, lo | Hello}, { world | wor, ld}."""
    found = align([b"Hel", b"lo", b" world"], [b"Hello", b" wor", b"ld"])
    assert found.unit_T.tolist() == [0, 0, 1]
    assert found.unit_S.tolist() == [0, 1, 1]
    assert found.spans_U.tolist() == [[0, 2, 0, 1], [2, 3, 1, 3]]
    assert found.one_to_one_U.tolist() == [False, False]


def test_one_to_one_units_alone():
    found = align([b"a", b"bc", b"d", b"e"], [b"a", b"b", b"c", b"de"])
    assert found.one_to_one_U.tolist() == [True, False, False]
    strict = chosen_units(found, "one-to-one")
    assert (strict.unit_T.tolist(), strict.unit_S.tolist()) == ([0, -1, -1, -1], [0, -1, -1, -1])
    assert chosen_units(found, "all") is found
    with pytest.raises(ValueError, match="unknown units 'some'"):
        chosen_units(found, "some")


def test_ends_of_turn_pair_one_to_one():
    found = align([b"a", b"b", b""], [b"ab", b""], ends=True)
    assert (found.unit_T.tolist(), found.unit_S.tolist()) == ([0, 0, 1], [0, 1])
    assert found.one_to_one_U.tolist() == [False, True]
    # Only one side has one (a truncated response, a teacher without): masked.
    assert align([b"ab", b""], [b"ab"]).unit_T.tolist() == [0, -1]
    # A response that is nothing but its end.
    assert align([b""], [b""], ends=True).spans_U.tolist() == [[0, 1, 0, 1]]
    for student, teacher in (([b"a"], [b"a", b""]), ([b""], []), ([b"a", b""], [b"a"])):
        with pytest.raises(ValueError, match="end of turn"):
            align(student, teacher, ends=True)


@pytest.mark.parametrize(
    ("student", "teacher"),
    [([], []), ([b""], []), ([], [b"a"]), ([b"a"], []), ([b"a"], [b"b"]), ([b"\xff"], [b"\xff"])],
)
def test_nothing_in_common_is_no_unit(student, teacher):
    found = align(student, teacher)
    assert found.num_units == 0
    assert found.spans_U.shape == (0, 4)
    assert set(found.unit_T.tolist()) | set(found.unit_S.tolist()) <= {-1}


def test_alignment_does_not_collapse_where_one_side_has_a_start_token_or_half_a_character():
    """Field case TRL #4393: by decoded strings, one BOS or one split character left a single group for the rest."""
    text = "so \U0001f642 it goes"
    smile = "\U0001f642".encode()
    student = [b"", b"so", b" ", smile[:2], smile[2:], b" it", b" goes"]
    teacher = [b"so ", smile[:1], smile[1:2], smile[2:], b" ", b"it", b" goes"]
    assert b"".join(student) == b"".join(teacher) == text.encode()
    found = align(student, teacher)
    assert found.unit_T.tolist() == [-1, 0, 0, 1, 2, 3, 4]
    assert found.unit_S.tolist() == [0, 1, 1, 2, 3, 3, 4]


def test_a_truncated_tail_is_masked_alone():
    """The student stopped inside a character; the teacher read the text without that half."""
    found = align([b"ab", b" c", b"\xf0\x9f"], [b"a", b"b", b" c"])
    assert found.unit_T.tolist() == [0, 1, -1]
    # One token that holds text and half a character: nothing of it is common.
    assert align([b"ab", b"c\xf0\x9f"], [b"ab", b"c"]).unit_T.tolist() == [0, -1]


@pytest.mark.parametrize(
    ("student", "teacher", "unit_T", "unit_S"),
    [
        # Composed by the teacher's tokenizer.
        ([b"caf", "e\u0301".encode(), b" x"], [b"caf", "\u00e9".encode(), b" x"], [0, -1, 1], [0, -1, 1]),
        ([b"ca", "fe\u0301 x".encode(), b" y"], [b"ca", "f\u00e9".encode(), b" x", b" y"], [0, -1, 1], [0, -1, -1, 1]),
        # Dropped, or put in, by it: at a boundary nobody else suffers.
        ([b"a", b"\x01", b"b"], [b"a", b"b"], [0, -1, 1], [0, 1]),
        ([b"a", b"b"], [b"a", b"-", b"b"], [0, 1], [0, -1, 1]),
        ([b"a", b"b"], [b"a-", b"b"], [-1, 0], [-1, 0]),
        ([b"a", b"b"], [b"a", b"-b"], [0, -1], [0, -1]),
        ([b"ab", b"c"], [b"a-b", b"c"], [-1, 0], [-1, 0]),
        ([b"a", b"b"], [b"-", b"a", b"b"], [0, 1], [-1, 0, 1]),
        # Replaced.
        ([b"a", b"\xff\xfe", b"b"], [b"a", "\ufffd".encode(), b"b"], [0, -1, 1], [0, -1, 1]),
    ],
)
def test_only_units_that_touch_a_difference_are_masked(student, teacher, unit_T, unit_S):
    found = align(student, teacher)
    assert (found.unit_T.tolist(), found.unit_S.tolist()) == (unit_T, unit_S)
    check(found, student, teacher)


@given(st.data())
def test_units_of_differing_texts_have_equal_bytes_all_the_same(data):
    first, second = data.draw(TEXTS).encode(), data.draw(TEXTS).encode()
    student, teacher = data.draw(splits(first)), data.draw(splits(second))
    check(align(student, teacher), student, teacher)


@given(TEXTS, TEXTS, TEXTS, TEXTS)
def test_differences_leave_equal_texts(before, first, second, after):
    first, second = (before + first + after).encode(), (before + second + after).encode()
    rows = text_differences(first, second).tolist()
    at_first = at_second = 0
    for a, b, c, d in [*rows, [len(first), len(first), len(second), len(second)]]:
        assert first[at_first:a] == second[at_second:c]
        first[at_first:a].decode()
        at_first, at_second = b, d
    assert (rows == []) == (first == second)
    for a, b, c, d in rows:
        assert first[a:b] != second[c:d]


def test_a_long_difference_ends():
    """Decomposed Korean: hardly a character agrees for hundreds of letters, and then the texts are level again."""
    import unicodedata

    korean = "\ud55c\uad6d\uc5b4" * 300
    decomposed = unicodedata.normalize("NFD", korean)
    rows = text_differences(f"so {decomposed} it".encode(), f"so {korean} it".encode())
    assert rows.tolist() == [[3, 3 + len(decomposed.encode()), 3, 3 + len(korean.encode())]]


def test_identity():
    found = identity(3)
    assert found.unit_T.tolist() == found.unit_S.tolist() == [0, 1, 2]
    assert found.one_to_one_U.all()
    assert identity(0).num_units == 0




@given(st.data())
def test_common_units_are_whole_in_both_and_minimal(data):
    text = data.draw(TEXTS)
    kept = data.draw(TEXTS)
    student = data.draw(splits((text + kept).encode()))
    teacher = data.draw(splits((text + kept).encode()))
    other = data.draw(splits((data.draw(st.sampled_from([text, text + "x", ""])) + kept).encode()))
    first, second = align(student, teacher), align(student, other)
    one, two = common_units(first, second)
    assert one.unit_T.tolist() == two.unit_T.tolist()
    assert one.num_units == two.num_units
    check_units(one, student, teacher)
    check_units(two, student, other)
    for before, after in ((first, one), (second, two)):
        # A unit is whole in the result or not in it at all.
        for number in range(before.num_units):
            inside = set(after.unit_T[before.unit_T == number].tolist())
            assert len(inside) == 1
            assert set(after.unit_S[before.unit_S == number].tolist()) == inside
    for number in range(one.num_units):
        # Minimal: at no place inside do both close a unit.
        tokens = np.flatnonzero(one.unit_T == number)
        labels = zip(first.unit_T[tokens].tolist(), second.unit_T[tokens].tolist(), strict=True)
        assert not any(a[0] != b[0] and a[1] != b[1] for a, b in pairwise(labels))
    # Nothing is lost without a reason: where both know the text to be the student's, every token has a unit.
    if b"".join(other) == b"".join(student):
        assert [unit < 0 for unit in one.unit_T] == [not piece for piece in student]


def test_common_units_by_hand():
    student = [b"a", b"b", b"", b"c", b"d", b"e", b""]
    first = align(student, [b"ab", b"c", b"d", b"e", b""], ends=True)
    second = align(student, [b"a", b"bc", b"d", b"e"])
    one, two = common_units(first, second)
    assert one.unit_T.tolist() == [0, 0, -1, 0, 1, 2, -1]
    assert one.unit_S.tolist() == [0, 0, 1, 2, -1]
    assert two.unit_S.tolist() == [0, 0, 1, 2]
    # A token that the second lacks takes its unit in the first along.
    third = Alignment(np.array([0, 1, -1, -1, 2, 3, -1]), np.arange(4), 4)
    assert common_units(first, third)[0].unit_T.tolist() == [0, 0, -1, -1, 1, 2, -1]
    assert common_units(align([], []), align([], []))[0].num_units == 0


@given(two_splits())
def test_alignment_is_symmetric(pieces):
    student, teacher = pieces
    assume(student and teacher)
    there, back = align(student, teacher), align(teacher, student)
    assert (there.unit_T == back.unit_S).all()
    assert (there.unit_S == back.unit_T).all()
