r"""CompassOPD: learn from what a teacher gained over its small sibling (arXiv:2609.10154; sheet compass, section 2.2).

l_M is a model's score of a unit of text, T the strong teacher, R the weak reference of its family, theta the student at
rollout time, ref the student before distillation (all frozen here). Per unit (equations 4-6) and per token (8-12):

    A_M = l_M - l_theta      A_T = O + D_T      O = l_R - l_theta      D_T = l_T - l_R
    D_S,t = log pi_theta(y_t) - log pi_ref(y_t)                 A_t = D_T,t + beta O_t - alpha D_S,t

beta = 0 is the method (equation 9); beta = 1 is OPD with the student's anchor on top. Every student token of a unit
gets the unit's D_T and O whole, D_S is each token's own, and a token without a unit gets exactly 0 (paper, A.4).

The relatives, on the same scores: plain OPD is A_T, both sides scored by one rule (our reading: the paper only says
that the procedure is the same); OPSD is OPD whose teacher is the student's own weights with the gold solution in the
prompt, on the identity alignment; G-OPD/ExOPD (arXiv:2602.12125); GOLD's rule (TRL) is OPD with the score "sum"; DPCA
(arXiv:2606.09456) splits the teacher's sum among the student's tokens.

Scores are natural logarithms of the probabilities of the tokens as sampled, at temperature 1. Suffixes as in
alignment.py: T student tokens, S teacher tokens, U units. Empty responses and masked ones give zeros, never NaN.
"""

# ruff: noqa: N802, N815 (axis suffixes, as in arguments and variables)

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from strop.core.credit.gigpo import Bools, Floats, Ints
    from strop.core.distill.alignment import Alignment

SPAN_SCORES = ("mean", "sum")
ALPHA = 0.5
# The strength of G-OPD's released recipe; 1 is plain OPD.
GOPD_STRENGTH = 1.25


@dataclass(frozen=True, slots=True)
class Signals:
    """What the advantages are mixed from: D_T and O of each unit, D_S of each student token, and whose unit is whose.

    `one_to_one_U`: one token on every side.
    """

    unit_T: Ints
    one_to_one_U: Bools
    shift_U: Floats
    offset_U: Floats
    displacement_T: Floats

    @property
    def mask_T(self) -> Bools:
        """Whether a student token has a unit, and so a signal."""
        return self.unit_T >= 0


def signals(
    student_T: Sequence[float] | Floats,
    teacher_S: Sequence[float] | Floats,
    reference_S: Sequence[float] | Floats,
    alignment: Alignment,
    *,
    student_ref_T: Sequence[float] | Floats | None = None,
    reference_alignment: Alignment | None = None,
    span_score: str = "mean",
) -> Signals:
    """D_T, O and D_S of one response (equations 6 and 8; unit scores by A.4).

    Args:
        student_T: scores of the student's tokens at rollout time.
        teacher_S: scores of the teacher's tokens of the same text.
        reference_S: the reference's, of its own tokens of that text.
        alignment: student with teacher.
        student_ref_T: scores of the student's tokens before distillation; None leaves D_S at 0 (for alpha = 0).
        reference_alignment: student with reference, where its tokenizer is another one; agrees with `alignment` on the
            student's units (`common_units`).
        span_score: "mean" of the token scores in a unit (the paper's), or "sum" (GOLD's).

    Raises ValueError for a score that is NaN or infinite, and for lists that do not fit, naming which.
    """
    import numpy as np

    beside = reference_alignment or alignment
    if not np.array_equal(alignment.unit_T, beside.unit_T):
        raise ValueError("teacher and reference are aligned to different units of the student")
    student = checked("student", student_T, len(alignment.unit_T))
    reference_U = unit_scores(checked("reference", reference_S, len(beside.unit_S)), beside.unit_S, span_score)
    teacher_U = unit_scores(checked("teacher", teacher_S, len(alignment.unit_S)), alignment.unit_S, span_score)
    displacement = np.zeros(len(student))
    if student_ref_T is not None:
        displacement = student - checked("student reference", student_ref_T, len(student))
    return Signals(
        alignment.unit_T,
        alignment.one_to_one_U & beside.one_to_one_U,
        teacher_U - reference_U,
        reference_U - unit_scores(student, alignment.unit_T, span_score),
        displacement,
    )


def compass_advantages(parts: Signals, *, alpha: float = ALPHA, beta: float = 0.0) -> Floats:
    """A_t = D_T,t + beta O_t - alpha D_S,t (equation 9, with `beta` 12) [T]; 0 where there is no unit."""
    import numpy as np

    mixed_T = on_tokens(parts.shift_U + beta * parts.offset_U, parts.unit_T) - alpha * parts.displacement_T
    return np.where(parts.mask_T, mixed_T, 0.0)


def opd_advantages(
    student_T: Sequence[float] | Floats,
    teacher_S: Sequence[float] | Floats,
    alignment: Alignment,
    *,
    span_score: str = "mean",
) -> Floats:
    """Plain on-policy distillation, A = l_T - l_theta (equation 4) [T]; with "sum" GOLD's rule. Raises as `signals`."""
    student = checked("student", student_T, len(alignment.unit_T))
    teacher = checked("teacher", teacher_S, len(alignment.unit_S))
    student_U = unit_scores(student, alignment.unit_T, span_score)
    return on_tokens(unit_scores(teacher, alignment.unit_S, span_score) - student_U, alignment.unit_T)


def gopd_advantages(
    student_T: Sequence[float] | Floats,
    teacher_S: Sequence[float] | Floats,
    base_T: Sequence[float] | Floats,
    alignment: Alignment,
    *,
    strength: float = GOPD_STRENGTH,
    span_score: str = "mean",
) -> Floats:
    """G-OPD/ExOPD: A = lambda (l_T - l_B) - (l_theta - l_B) [T], lambda = `strength`; 1 is plain OPD.

    B is the student before distillation, scored on the student's own tokens. Raises as `signals`.
    """
    student = checked("student", student_T, len(alignment.unit_T))
    base = checked("base", base_T, len(student))
    teacher = checked("teacher", teacher_S, len(alignment.unit_S))
    student_U, base_U = (unit_scores(scores, alignment.unit_T, span_score) for scores in (student, base))
    gain_U = unit_scores(teacher, alignment.unit_S, span_score) - base_U
    return on_tokens(strength * gain_U - (student_U - base_U), alignment.unit_T)


def dpca_advantages(
    student_T: Sequence[float] | Floats, teacher_S: Sequence[float] | Floats, alignment: Alignment
) -> Floats:
    """DPCA's split: A_i = log q_i - log p_i with log q_i = (L_T / L_S) log p_i in a unit of sums L_T and L_S [T].

    The log q_i of a unit sum to L_T. Where the student is certain (L_S = 0, each p_i = 1) they share it evenly (our
    choice: the limit for equal p_i). Raises as `signals`.
    """
    import numpy as np

    unit_T = alignment.unit_T
    student = checked("student", student_T, len(unit_T))
    teacher_U = unit_scores(checked("teacher", teacher_S, len(alignment.unit_S)), alignment.unit_S, "sum")
    # A probability that rounding has lifted over 1 is 1: shares of both signs could grow without bound.
    cost_T = np.minimum(student, 0.0)
    total_T = on_tokens(unit_scores(cost_T, unit_T, "sum"), unit_T)
    even_T = 1 / np.maximum(on_tokens(alignment.student_tokens_U, unit_T), 1)
    share_T = np.where(total_T == 0, even_T, cost_T / np.where(total_T == 0, 1.0, total_T))
    return np.where(unit_T >= 0, on_tokens(teacher_U, unit_T) * share_T - student, 0.0)


def unit_scores(score: Floats, unit: Ints, span_score: str) -> Floats:
    """The score of each unit from those of its tokens, on one side: their "mean" (A.4) or "sum" [U].

    Raises ValueError for any other rule.
    """
    import numpy as np

    if span_score not in SPAN_SCORES:
        raise ValueError(f"unknown span score {span_score!r}, expected one of {', '.join(SPAN_SCORES)}")
    tokens = unit >= 0
    count = np.bincount(unit[tokens])
    return np.bincount(unit[tokens], score[tokens]) / (count if span_score == "mean" else 1.0)


def on_tokens(value_U: Floats | Ints, unit_T: Ints) -> Floats:
    """A unit's value for every student token in it, undivided (A.4), and 0 for tokens without a unit [T]."""
    import numpy as np

    return np.append(value_U, 0.0)[unit_T]


def checked(name: str, score: Sequence[float] | Floats, num_tokens: int) -> Floats:
    """The scores of one model as an array. Raises ValueError where they are not `num_tokens` finite numbers."""
    import numpy as np

    found = np.asarray(score, float)
    if found.shape != (num_tokens,):
        raise ValueError(f"{name}: {found.size} scores for {num_tokens} tokens")
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad):
        raise ValueError(f"{name}: the score of token {bad[0]} is {found[bad[0]]}, expected a finite number")
    return found


@dataclass(frozen=True, slots=True)
class Diagnostics:
    """Counts and sums over any number of responses (`+` adds), and the sheet's shares and means (2.6) of them.

    A share or mean of nothing is 0. Signs are compared as -1, 0, 1.
    """

    num_tokens: int = 0
    num_aligned: int = 0
    num_one_to_one: int = 0
    num_units: int = 0
    num_same_sign: int = 0
    num_offset_wins: int = 0
    sum_shift: float = 0.0
    sum_offset: float = 0.0
    sum_displacement: float = 0.0

    def __add__(self, other: Diagnostics) -> Diagnostics:
        return Diagnostics(*(getattr(self, name) + getattr(other, name) for name in self.__slots__))

    @property
    def coverage(self) -> float:
        """The share of student tokens with a unit."""
        return _share(self.num_aligned, self.num_tokens)

    @property
    def one_to_one(self) -> float:
        """The share of student tokens in one-to-one units."""
        return _share(self.num_one_to_one, self.num_tokens)

    @property
    def sign_agreement(self) -> float:
        """The share of units in which A_R (which is O) and A_T have the same sign (paper, section 1: 70 to 72%)."""
        return _share(self.num_same_sign, self.num_units)

    @property
    def offset_wins(self) -> float:
        """The share of units in which |O| > |D_T| with opposite signs: the family's offset turns the update around."""
        return _share(self.num_offset_wins, self.num_units)

    @property
    def mean_shift(self) -> float:
        """Mean |D_T| over units; 0 says that teacher and reference are the same model."""
        return _share(self.sum_shift, self.num_units)

    @property
    def mean_offset(self) -> float:
        """Mean |O| over units."""
        return _share(self.sum_offset, self.num_units)

    @property
    def mean_displacement(self) -> float:
        """Mean |D_S| over the student tokens with a unit."""
        return _share(self.sum_displacement, self.num_aligned)


def diagnose(parts: Signals) -> Diagnostics:
    """The diagnostics of one response."""
    import numpy as np

    shift_U, offset_U, mask_T = parts.shift_U, parts.offset_U, parts.mask_T
    opposite_U = np.sign(shift_U) * np.sign(offset_U) < 0
    return Diagnostics(
        num_tokens=len(mask_T),
        num_aligned=int(mask_T.sum()),
        num_one_to_one=int(parts.one_to_one_U.sum()),
        num_units=len(shift_U),
        num_same_sign=int((np.sign(offset_U) == np.sign(offset_U + shift_U)).sum()),
        num_offset_wins=int((opposite_U & (np.abs(offset_U) > np.abs(shift_U))).sum()),
        sum_shift=float(np.abs(shift_U).sum()),
        sum_offset=float(np.abs(offset_U).sum()),
        sum_displacement=float(np.abs(parts.displacement_T[mask_T]).sum()),
    )


def _share(part: float, whole: int) -> float:
    return part / whole if whole else 0.0
