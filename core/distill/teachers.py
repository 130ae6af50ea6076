"""CompassOPD and its relatives at work: teachers read responses in their own tokens (sheet compass, section 2.2).

A teacher of the policy's own tokenizer scores the very ids that were sampled. Another one gets its own chat template
and reads the response as text; what both sides' tokens share is found on bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from msgspec import UNSET

from strop.core.distill import compass
from strop.core.distill.alignment import Alignment, align, chosen_units, common_units, identity
from strop.core.distill.attempts import Attempt, AttemptError, score_all, spans_of, tail_of
from strop.core.distill.compass import Diagnostics
from strop.core.distill.retokenize import Retokenizer, same_tokens
from strop.core.engines.scorers import find_sequence_fault
from strop.core.models.score import TokenSequence
from strop.core.records import Sampling

if TYPE_CHECKING:
    from strop.core.distill.conditions import Prompts
    from strop.core.engines.scorers import Scorer
    from strop.core.models.tokens import Tokenizer

METHODS = ("compass", "opd", "opsd", "gopd")
# --span-score: the mean of A.4, GOLD's sum, DPCA's split of the sum.
SPAN_SCORES = (*compass.SPAN_SCORES, "split")
# A mean |D_T| below this (nats) is rounding: bfloat16 scores of one model differ by more between two packs.
NO_SHIFT = 1e-6


@dataclass(frozen=True, slots=True)
class TeacherRule:
    """Which method, and its constants; `strength` is G-OPD's lambda, `trace` keeps the units in the record.

    `opsd_form` "vocabulary" is the released OPSD: the teacher's prompt goes out, and the loss asks the teacher itself.
    """

    method: str
    alpha: float = compass.ALPHA
    beta: float = 0.0
    strength: float = compass.GOPD_STRENGTH
    units: str = "all"
    span_score: str = "mean"
    trace: bool = False
    opsd_form: str = "vocabulary"

    @property
    def writes_prompts(self) -> bool:
        """Whether a teacher's prompt is written in the place of advantages."""
        return self.method == "opsd" and self.opsd_form == "vocabulary"

    @property
    def needs_start(self) -> bool:
        """Whether the policy's frozen start is asked for anything."""
        return self.method in ("opsd", "gopd") or (self.method == "compass" and self.alpha > 0)


@dataclass(slots=True)
class Reader:
    """A teacher or reference: what scores, and its tokenizer."""

    scorer: Scorer
    tokenizer: Tokenizer


@dataclass(slots=True)
class _Seen:
    """How one reader sees one response: its sequence to score, and the alignment of the policy's tokens with it."""

    sequence: TokenSequence
    alignment: Alignment


class Teachers:
    """Writes `advantages` for each sampled token, 0 where it has no unit, and with compass `logp_ref`.

    OPSD in its own form writes the teacher's prompt instead, and asks no model.

    `start` is the policy before distillation (None where the rule does not ask it), `tokenizer` the policy's.
    """

    def __init__(
        self, rule: TeacherRule, tokenizer: Tokenizer, prompts: Prompts, *, start: Scorer | None,
        teacher: Reader | None = None, reference: Reader | None = None,
    ) -> None:  # fmt: skip
        """Raises Unavailable for a teacher or reference whose tokenizer does not keep texts as they are."""
        self._rule = rule
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._start = start
        self._teacher = teacher
        self._reference = reference
        self._retokenizers: dict[int, Retokenizer | None] = {}
        for reader in (teacher, reference):
            if reader is not None and id(reader.tokenizer) not in self._retokenizers:
                is_own = same_tokens(tokenizer, reader.tokenizer)
                self._retokenizers[id(reader.tokenizer)] = None if is_own else Retokenizer(tokenizer, reader.tokenizer)
        self._all, self._recent = Diagnostics(), Diagnostics()
        self._num = self._num_recent = 0

    def check(self, attempt: Attempt) -> None:
        """Raises DataError without a task, log-probabilities of temperature 1, or one turn; with opsd a solution.

        No log-probabilities are needed where a prompt is all that is written.
        """
        task = attempt.need_task()
        _, logprobs = attempt.response()
        if self._rule.method == "opsd" and _solution(task.reference) is None:
            raise attempt.record.bad(f"the task {task.id!r} has no reference in words or numbers", "task")
        if self._rule.writes_prompts:
            return
        if not logprobs or attempt.chunk.logprobs is UNSET:
            message = "missing; the policy's own log-probabilities are one side of every comparison"
            raise attempt.record.bad(message, "chunks[0].logprobs")
        sampling = attempt.rollout.sampling or Sampling()
        is_cut = sampling.logprobs == "processed" and (sampling.top_p < 1 or sampling.top_k > 0)
        if is_cut or (sampling.logprobs != "raw" and sampling.temperature != 1):
            message = "the log-probabilities are not those of temperature 1 over the whole vocabulary, as teachers' are"
            raise attempt.record.bad(message, "sampling")

    def apply(self, attempts: Sequence[Attempt]) -> None:
        """Sets the signals of a batch."""
        if self._rule.writes_prompts:
            self._write_prompts(attempts)
            return
        start = self._start_scores(attempts)
        if self._rule.method == "opsd":
            assert self._start is not None
            taught = score_all(self._start, [(one, self._privileged(one)) for one in attempts])
            for attempt, told, before in zip(attempts, taught, start, strict=True):
                self._set(attempt, identity(len(told)), None, told, [], before)
            return
        assert self._teacher is not None
        seen = [self._see(attempt, self._teacher) for attempt in attempts]
        scores = self._scored(self._teacher, attempts, seen)
        others: list[_Seen | None] = [None] * len(attempts)
        other_scores: list[list[float]] = [[] for _ in attempts]
        if self._reference is not None:
            shares = self._reference.tokenizer is self._teacher.tokenizer
            found = seen if shares else [self._see(attempt, self._reference) for attempt in attempts]
            other_scores, others = self._scored(self._reference, attempts, found), list(found)
        for i, attempt in enumerate(attempts):
            other = others[i]
            beside = None if other is None or other is seen[i] else other.alignment
            self._set(attempt, seen[i].alignment, beside, scores[i], other_scores[i], start[i])

    def _write_prompts(self, attempts: Sequence[Attempt]) -> None:
        assert self._start is not None
        start = self._start
        taught = [(one, self._privileged(one)) for one in attempts]
        for attempt, sequence in taught:
            fault = find_sequence_fault(sequence, vocab_size=start.vocab_size, context_length=start.context_length)
            if fault is not None:
                raise AttemptError(attempt, fault)
        for attempt, sequence in taught:
            num = attempt.num_sampled
            self._saw(Diagnostics(num, num, num, num))
            about = {"method": "opsd", "form": "vocabulary", "teacher": start.info}
            attempt.set_teacher_prompt(sequence.token_ids[: sequence.spans[0][0]], about)

    def _saw(self, found: Diagnostics) -> None:
        self._all, self._recent = self._all + found, self._recent + found
        self._num, self._num_recent = self._num + 1, self._num_recent + 1

    def _start_scores(self, attempts: Sequence[Attempt]) -> list[list[float]]:
        """What the start says of the policy's own tokens; [] where the rule does not ask."""
        if self._start is None or self._rule.method == "opsd":
            return [[] for _ in attempts]
        own = [(one, TokenSequence(one.chunk.token_ids, spans_of(one.chunk))) for one in attempts]
        return score_all(self._start, own)

    def _privileged(self, attempt: Attempt) -> TokenSequence:
        """The response behind a prompt that tells the solution."""
        task = attempt.need_task()
        solution = _solution(task.reference)
        assert task.prompt is not None
        assert solution is not None
        prompt_ids = self._tokenizer.encode_prompt(self._prompts.privileged(task.prompt, solution))
        start, tail = tail_of(attempt.chunk)
        return TokenSequence(prompt_ids + tail, spans_of(attempt.chunk, len(prompt_ids) - start))

    def _see(self, attempt: Attempt, reader: Reader) -> _Seen:
        ids, _ = attempt.response()
        retokenizer = self._retokenizers[id(reader.tokenizer)]
        prompt = attempt.need_task().prompt
        assert prompt is not None
        if retokenizer is None:
            sequence = TokenSequence(attempt.chunk.token_ids, spans_of(attempt.chunk))
            return _Seen(sequence, chosen_units(identity(len(ids)), self._rule.units))
        prompt_ids = reader.tokenizer.encode_prompt(prompt)
        made = retokenizer(ids)
        end = len(prompt_ids) + len(made.teacher_ids)
        units = chosen_units(align(made.student_T, made.teacher_S, ends=made.ends), self._rule.units)
        return _Seen(TokenSequence(prompt_ids + made.teacher_ids, [(len(prompt_ids), end)]), units)

    def _scored(self, reader: Reader, attempts: Sequence[Attempt], seen: Sequence[_Seen]) -> list[list[float]]:
        return score_all(reader.scorer, [(one, how.sequence) for one, how in zip(attempts, seen, strict=True)])

    def _set(
        self, attempt: Attempt, alignment: Alignment, beside: Alignment | None, teacher: list[float],
        reference: list[float], start: list[float],
    ) -> None:  # fmt: skip
        rule = self._rule
        _, student = attempt.response()
        about: dict[str, Any] = {"method": rule.method}
        signals = {}
        if rule.method == "compass":
            if beside is not None:
                alignment, beside = common_units(alignment, beside)
            parts = compass.signals(
                student, teacher, reference, alignment, student_ref_T=start or None, reference_alignment=beside,
                span_score=rule.span_score,
            )  # fmt: skip
            advantages = compass.compass_advantages(parts, alpha=rule.alpha, beta=rule.beta)
            found = compass.diagnose(parts)
            about |= {"alpha": rule.alpha, "beta": rule.beta}
            columns = [parts.shift_U, parts.offset_U]
            if start:
                signals["logp_ref"] = start
        else:
            if rule.method == "gopd":
                advantages = compass.gopd_advantages(
                    student, teacher, start, alignment, strength=rule.strength, span_score=rule.span_score
                )
                about["lambda"] = rule.strength
            elif rule.span_score == "split":
                advantages = compass.dpca_advantages(student, teacher, alignment)
            else:
                advantages = compass.opd_advantages(student, teacher, alignment, span_score=rule.span_score)
            num_one_to_one = int(alignment.one_to_one_U.sum())
            found = Diagnostics(len(student), int(alignment.mask_T.sum()), num_one_to_one, alignment.num_units)
            columns = []
        self._saw(found)
        about |= {"units": rule.units, "span_score": rule.span_score, "coverage": round(found.coverage, 7)}
        about |= {"teacher": (self._teacher.scorer if self._teacher else self._start).info}  # type: ignore[union-attr]
        if self._reference is not None:
            about |= {"reference": self._reference.scorer.info, "experts": self._reference.scorer.experts}
        if rule.trace:
            values = [[round(float(value), 7) for value in row] for row in zip(*columns, strict=True)]
            spans = alignment.spans_U.tolist()
            rows = values or [[]] * len(spans)
            about["units_traced"] = [[*span, *row] for span, row in zip(spans, rows, strict=True)]
        attempt.set_signals([{"advantages": advantages.tolist(), **signals}], about)

    def lines(self) -> list[str]:
        """See Method."""
        found = self._all
        told = [f"{self._num} rollouts: {found.coverage:.1%} of {found.num_tokens} tokens have a unit"]
        told.append(f"{found.one_to_one:.1%} are one to one")
        if self._rule.method == "compass":
            told.append(
                f"mean |shift| {found.mean_shift:.3g}, |offset| {found.mean_offset:.3g}, |displacement| "
                f"{found.mean_displacement:.3g} nats; teacher and reference pull the same way in "
                f"{found.sign_agreement:.1%} of {found.num_units} units"
            )
        return ["; ".join(told)]

    def warnings(self) -> list[str]:
        """See Method."""
        found, told = self._all, []
        if self._num and not found.num_units:
            told.append("no token has a unit: teacher and policy share no boundary, and there is nothing to learn")
        elif self._num and self._rule.method == "compass" and found.mean_shift < NO_SHIFT:
            told.append("teacher and reference say the same: there is no signal but the hold on the policy")
        return told

    def take_metrics(self) -> dict[str, float | int | None]:
        """See Method."""
        found, num = self._recent, self._num_recent
        self._recent, self._num_recent = Diagnostics(), 0
        values: dict[str, float | int | None] = {
            "distilled_rollouts": num, "distilled_tokens": found.num_tokens, "coverage": found.coverage,
            "one_to_one": found.one_to_one,
        }  # fmt: skip
        if self._rule.method == "compass":
            values |= {
                "sign_agreement": found.sign_agreement, "offset_wins": found.offset_wins,
                "mean_shift": found.mean_shift, "mean_offset": found.mean_offset,
                "mean_displacement": found.mean_displacement,
            }  # fmt: skip
        return values


def _solution(reference: Any) -> str | None:
    """A task's reference as a prompt can tell it."""
    if isinstance(reference, bool) or not isinstance(reference, str | int | float):
        return None
    return str(reference)
