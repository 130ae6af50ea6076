"""CompassOPD and its relatives: the sheet's vectors, reductions of one to another, masks, bad scores, diagnostics."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.core.distill.alignment import align, chosen_units, common_units, identity
from strop.core.distill.compass import (
    Diagnostics,
    compass_advantages,
    diagnose,
    dpca_advantages,
    gopd_advantages,
    opd_advantages,
    signals,
)

STUDENT = [b"Hel", b"lo", b" world"]
TEACHER = [b"Hello", b" wor", b"ld"]
SHEET = align(STUDENT, TEACHER)
LOG_T, LOG_R = [-0.2, -0.5, -0.1], [-0.6, -1.0, -0.2]
LOG_THETA = [-1.0, -2.0, -0.5]
LOG_REF = [-1.1, -1.8, -0.5]
SCORES = st.floats(-30, 0)


def scores(size):
    return st.lists(SCORES, min_size=size, max_size=size).map(np.array)


@st.composite
def cases(draw):
    """Student, teacher and reference scores on a random alignment, with tokens that have none."""
    data = draw(st.text("ab\u00e9", max_size=12)).encode()
    sides = []
    for _ in range(2):
        edges = sorted({0, len(data), *draw(st.lists(st.integers(0, len(data)), max_size=12))})
        sides.append([data[a:b] for a, b in pairwise(edges)] + [b""] * draw(st.integers(0, 1)))
    found = align(*sides)
    return found, *(draw(scores(len(sides[k]))) for k in (0, 0, 1, 1))


def test_the_sheets_vector():
    """compass.md 2.2: D_T 0.4 and mean(0.5, 0.1); D_S 0.1, -0.2, 0; alpha 0.5."""
    parts = signals(LOG_THETA, LOG_T, LOG_R, SHEET, student_ref_T=LOG_REF)
    assert parts.shift_U == pytest.approx([0.4, 0.3])
    assert parts.displacement_T == pytest.approx([0.1, -0.2, 0.0])
    assert compass_advantages(parts) == pytest.approx([0.35, 0.50, 0.30])
    # alpha 0 is allowed, and needs no scores of the student before distillation.
    assert compass_advantages(parts, alpha=0) == pytest.approx([0.4, 0.4, 0.3])
    assert compass_advantages(signals(LOG_THETA, LOG_T, LOG_R, SHEET)) == pytest.approx([0.4, 0.4, 0.3])


def test_offset_restoration_by_hand():
    """Equation 12: O = l_R - l_theta is -0.6 + 1.5 and -0.6 + 0.5."""
    parts = signals(LOG_THETA, LOG_T, LOG_R, SHEET, student_ref_T=LOG_REF)
    assert parts.offset_U == pytest.approx([0.9, -0.1])
    assert compass_advantages(parts, beta=1) == pytest.approx([1.25, 1.40, 0.20])
    assert compass_advantages(parts, beta=0.5) == pytest.approx([0.80, 0.95, 0.25])


def test_the_sum_rule_by_hand():
    parts = signals(LOG_THETA, LOG_T, LOG_R, SHEET, span_score="sum")
    assert parts.shift_U == pytest.approx([0.4, 0.6])
    assert parts.offset_U == pytest.approx([2.4, -0.7])
    gold = opd_advantages(LOG_THETA, LOG_T, SHEET, span_score="sum")
    assert gold == pytest.approx([2.8, 2.8, -0.1])
    with pytest.raises(ValueError, match="unknown span score 'max'"):
        signals(LOG_THETA, LOG_T, LOG_R, SHEET, span_score="max")


def test_the_maximiser_of_a_fixed_context():
    """Equations 10 and 11 on the sheet's numbers: J(pi) = alpha log Z - alpha KL(pi || pi*), so pi* is the best."""
    reference, shift, alpha = np.array([0.5, 0.3, 0.2]), np.array([0.4, -0.2, 0.0]), 0.5
    weight = reference * np.exp(shift / alpha)
    total, best = weight.sum(), weight / weight.sum()
    assert best == pytest.approx([0.73505, 0.13284, 0.13211], abs=5e-6)

    def objective(policy):
        return (policy * shift).sum() - alpha * (policy * np.log(policy / reference)).sum()

    assert objective(best) == pytest.approx(alpha * np.log(total))
    # The gradient of J at a policy is the mean of A grad log pi, with A = D_T - alpha D_S as the code has it: at pi* A
    # is the same for every token, and nothing is left to gain.
    choice = identity(3)
    parts = signals(np.log(best), shift, np.zeros(3), choice, student_ref_T=np.log(reference))
    advantages = compass_advantages(parts, alpha=alpha)
    assert advantages == pytest.approx([alpha * np.log(total)] * 3)
    for policy in (reference, np.array([0.2, 0.3, 0.5])):
        gap = alpha * (policy * np.log(policy / best)).sum()
        assert objective(policy) == pytest.approx(alpha * np.log(total) - gap)
        parts = signals(np.log(policy), shift, np.zeros(3), choice, student_ref_T=np.log(reference))
        ascent = policy * (compass_advantages(parts, alpha=alpha) - objective(policy))
        step = 1e-6
        for token in range(3):
            moved = policy * np.exp(step * (np.arange(3) == token))
            slope = (objective(moved / moved.sum()) - objective(policy)) / step
            assert slope == pytest.approx(ascent[token], abs=1e-5)


@given(cases(), st.floats(0, 2), st.floats(0, 2))
def test_one_method_in_terms_of_another(case, alpha, beta):
    found, theta, ref, teacher, reference = case
    parts = signals(theta, teacher, reference, found, student_ref_T=ref)
    mask = found.mask_T
    close = {"rtol": 1e-9, "atol": 1e-9}
    # The split A_T = O + D_T (equation 6): all of the offset and no anchor is plain OPD.
    opd = opd_advantages(theta, teacher, found)
    np.testing.assert_allclose(compass_advantages(parts, alpha=0, beta=1), opd, **close)
    # At the first step the student is its own reference: the shift alone.
    first = signals(theta, teacher, reference, found, student_ref_T=theta)
    np.testing.assert_array_equal(compass_advantages(first, alpha=alpha), compass_advantages(parts, alpha=0))
    # G-OPD: strength 1 is OPD, and the base drops out.
    np.testing.assert_allclose(gopd_advantages(theta, teacher, ref, found, strength=1), opd, **close)
    # Linear in alpha and beta.
    mixed = compass_advantages(parts, alpha=alpha, beta=beta)
    spread = compass_advantages(parts, alpha=0, beta=1) - compass_advantages(parts, alpha=0)
    expected = compass_advantages(parts, alpha=0) + beta * spread - alpha * (theta - ref) * mask
    np.testing.assert_allclose(mixed, expected, rtol=1e-7, atol=1e-7)
    # Every token of a unit has the same share of shift and offset; the others have nothing.
    for number in range(found.num_units):
        assert len(set(opd[found.unit_T == number].tolist())) == 1
    for values in (opd, mixed, dpca_advantages(theta, teacher, found)):
        assert np.isfinite(values).all()
        assert (values[~mask] == 0).all()
    # DPCA divides the teacher's sum: with the student's own log-probabilities it adds up to it in each unit.
    split = dpca_advantages(theta, teacher, found) + theta
    for number in range(found.num_units):
        budget = teacher[found.unit_S == number].sum()
        assert split[found.unit_T == number].sum() == pytest.approx(budget, rel=1e-6, abs=1e-6)
    # Units of one token leave nothing to average or to divide: all rules agree.
    strict = chosen_units(found, "one-to-one")
    plain = opd_advantages(theta, teacher, strict)
    np.testing.assert_array_equal(opd_advantages(theta, teacher, strict, span_score="sum"), plain)
    np.testing.assert_allclose(dpca_advantages(theta, teacher, strict), plain, **close)


@given(st.integers(0, 6).flatmap(lambda size: st.tuples(*[scores(size)] * 4)), st.floats(0.1, 2))
def test_compass_is_g_opd_with_a_base_of_its_own_on_each_side(numbers, alpha):
    """compass.md 2.3: alpha (lambda (log T - log B) - (log theta - log B)), lambda = 1/alpha; B is R, then pi_ref."""
    theta, ref, teacher, reference = numbers
    parts = signals(theta, teacher, reference, identity(len(theta)), student_ref_T=ref)
    relative = alpha * ((teacher - reference) / alpha - (theta - ref))
    np.testing.assert_allclose(compass_advantages(parts, alpha=alpha), relative, rtol=1e-9, atol=1e-9)
    # Same base on both sides: G-OPD itself.
    same = signals(theta, teacher, ref, identity(len(theta)), student_ref_T=ref)
    gopd = gopd_advantages(theta, teacher, ref, identity(len(theta)), strength=1 / alpha)
    np.testing.assert_allclose(compass_advantages(same, alpha=alpha), alpha * gopd, rtol=1e-7, atol=1e-7)


def test_g_opd_by_hand():
    """1.25 (-0.2 + 1) - (-0.5 + 1)."""
    assert gopd_advantages([-0.5], [-0.2], [-1.0], identity(1)) == pytest.approx([0.5])


def test_the_own_weights_with_the_solution_in_the_prompt():
    """OPSD: the same tokens scored under another prompt, so every token is its own unit."""
    assert opd_advantages([-1.0, -0.5], [-0.25, -0.75], identity(2)).tolist() == [0.75, -0.25]


def test_dpca_by_hand():
    """A unit of L_T = -0.2 and L_S = -1 - 3: q = (-0.05, -0.15); then one where the student is certain."""
    found = align([b"a", b"b", b"c", b"d"], [b"ab", b"c", b"d"])
    split = dpca_advantages([-1.0, -3.0, -0.5, 0.0], [-0.2, -1.5, -0.7], found)
    assert split == pytest.approx([0.95, 2.85, -1.0, -0.7])
    found = align([b"a", b"b"], [b"ab"])
    assert dpca_advantages([0.0, 0.0], [-0.4], found) == pytest.approx([-0.2, -0.2])
    # What rounding put above 1 costs nothing.
    assert dpca_advantages([1e-7, -1e-7], [-0.4], found) == pytest.approx([0.0, -0.4], abs=1e-6)


def test_teacher_and_reference_of_different_tokenizers():
    teacher = align(STUDENT, TEACHER)
    reference = align(STUDENT, [b"Hel", b"lo wor", b"ld"])
    with pytest.raises(ValueError, match="different units of the student"):
        signals(LOG_THETA, LOG_T, LOG_R, teacher, reference_alignment=reference)
    teacher, reference = common_units(teacher, reference)
    parts = signals(LOG_THETA, LOG_T, LOG_R, teacher, reference_alignment=reference)
    # One unit is left: the whole text, (-0.2 - 0.5 - 0.1) / 3 against (-0.6 - 1 - 0.2) / 3.
    assert parts.shift_U == pytest.approx([1 / 3])
    assert compass_advantages(parts) == pytest.approx([1 / 3] * 3)


def test_one_to_one_is_so_on_every_side():
    teacher, reference = common_units(align([b"a", b"b"], [b"a", b"b"]), align([b"a", b"b"], [b"a", b"b"]))
    assert signals([-1, -1], [-1, -1], [-1, -1], teacher, reference_alignment=reference).one_to_one_U.all()
    split = align([b"a", b"bc"], [b"a", b"b", b"c"])
    teacher, reference = common_units(align([b"a", b"bc"], [b"a", b"bc"]), split)
    parts = signals([-1, -1], [-1, -1], [-1, -1, -1], teacher, reference_alignment=reference)
    assert parts.one_to_one_U.tolist() == [True, False]
    both = teacher.one_to_one_U & reference.one_to_one_U
    strict = signals([-1, -1], [-2, -1], [-1, -1, -1], teacher.keep(both), reference_alignment=reference.keep(both))
    assert compass_advantages(strict).tolist() == [-1, 0]


@pytest.mark.parametrize(("bad", "shown"), [(np.nan, "nan"), (-np.inf, "-inf"), (np.inf, "inf")])
@pytest.mark.parametrize("name", ["student", "teacher", "reference", "student reference"])
def test_a_score_that_is_no_number_is_named(name, bad, shown):
    given_scores = {"student": LOG_THETA, "teacher": LOG_T, "reference": LOG_R, "student reference": LOG_REF}
    given_scores[name] = [-1.0, bad, -1.0]
    with pytest.raises(ValueError, match=f"^{name}: the score of token 1 is {shown}, expected a finite number"):
        signals(
            given_scores["student"], given_scores["teacher"], given_scores["reference"], SHEET,
            student_ref_T=given_scores["student reference"],
        )  # fmt: skip
    with pytest.raises(ValueError, match="base: the score of token 0"):
        gopd_advantages([-1.0], [-1.0], [bad], identity(1))


def test_completions_of_other_lengths_are_no_nan():
    """Field case TRL #5594: on the teacher's path a list of another length was padded, and the loss became NaN."""
    found = align([b"a", b"b", b"c"], [b"abc"])
    assert np.isfinite(opd_advantages([-1.0, -1.0, -1.0], [-0.5], found)).all()
    with pytest.raises(ValueError, match="teacher: 3 scores for 1 tokens"):
        opd_advantages([-1.0, -1.0, -1.0], [-0.5, 0.0, 0.0], found)
    with pytest.raises(ValueError, match="student: 2 scores for 3 tokens"):
        dpca_advantages([-1.0, -1.0], [-0.5], found)


@pytest.mark.parametrize("student", [[], [b"a", b"b"]])
def test_empty_and_masked_responses_are_zeros(student):
    found = align(student, [b"x"])
    theta = [-1.0] * len(student)
    parts = signals(theta, [-1.0], [-2.0], found, student_ref_T=[-3.0] * len(student))
    nothing = [0.0] * len(student)
    assert compass_advantages(parts, beta=1).tolist() == nothing
    assert opd_advantages(theta, [-1.0], found).tolist() == nothing
    assert gopd_advantages(theta, [-1.0], theta, found).tolist() == nothing
    assert dpca_advantages(theta, [-1.0], found).tolist() == nothing
    found = diagnose(parts)
    assert (found.num_tokens, found.num_units) == (len(student), 0)
    assert found.coverage == found.one_to_one == found.sign_agreement == found.offset_wins == 0
    assert found.mean_shift == found.mean_offset == found.mean_displacement == 0


def test_diagnostics_by_hand():
    found = align([b"a", b"b", b"cd", b"e", b""], [b"ab", b"cd", b"e"])
    # O = l_R - l_theta: 1, -2, 0.5.  D_T: -3, 1, 0.25.  A_T = -2, -1, 0.75.
    theta, reference = [-4.0, -4.0, -1.0, -1.0, -9.0], [-3.0, -3.0, -0.5]
    parts = signals(theta, [-6.0, -2.0, -0.25], reference, found, student_ref_T=[-4.0, -4.5, -1.0, -1.5, 0.0])
    one = diagnose(parts)
    assert one.coverage == 0.8
    assert one.one_to_one == 0.4
    assert one.sign_agreement == pytest.approx(2 / 3)
    assert one.offset_wins == pytest.approx(1 / 3)
    assert one.mean_shift == pytest.approx(4.25 / 3)
    assert one.mean_offset == pytest.approx(3.5 / 3)
    assert one.mean_displacement == pytest.approx(1 / 4)
    both = one + diagnose(signals([-1.0], [-1.0], [-1.0], identity(1)))
    assert both.coverage == pytest.approx(5 / 6)
    # Teacher equal to reference and student: all zero, and zero agrees with zero.
    assert both.sign_agreement == pytest.approx(3 / 4)
    assert both.mean_shift == pytest.approx(4.25 / 4)
    assert one + Diagnostics() == one
