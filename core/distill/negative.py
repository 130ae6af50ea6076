"""The negative self-teacher at work: conditions, two frozen passes over the same ids, gates (NSD, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from strop.core.distill.attempts import Attempt, score_all, spans_of, tail_of
from strop.core.distill.conditions import shown
from strop.core.distill.nsd import GateTally, gates
from strop.core.distill.token_classes import token_class
from strop.core.models.score import TokenSequence
from strop.core.models.token_bytes import TokenBytes

if TYPE_CHECKING:
    from strop.core.distill.conditions import Condition, Prompts
    from strop.core.distill.writing import Writer
    from strop.core.engines.scorers import Scorer
    from strop.core.models.tokens import Tokenizer


class NegativeTeacher:
    """Writes `logp_ref`, `logp_neg` and `gate` for each sampled token.

    `scorer` is the frozen model. The negative prompt takes the place of the chunk's own; every id behind it stays as it
    was. A condition that is not valid, or does not fit the context with the response, is neutral: both
    log-probabilities are the plain one, the gate is closed, and it is counted [derived].
    """

    def __init__(
        self, writer: Writer, scorer: Scorer, tokenizer: Tokenizer, prompts: Prompts, *, gate: str = "probability"
    ) -> None:
        self._all, self._recent = GateTally(), GateTally()
        self._reasons: dict[str, int] = {}
        self._writer = writer
        self._scorer = scorer
        self._tokenizer = tokenizer
        self._bytes = TokenBytes(tokenizer)
        self._prompts = prompts
        self._gate = gate

    def check(self, attempt: Attempt) -> None:
        """Raises DataError without a task, and for an attempt in several chunks: their prompts are no task's."""
        attempt.need_task()
        if sum(chunk.num_sampled > 0 for chunk in attempt.rollout.chunks) > 1:
            raise attempt.record.bad("sampled tokens in several chunks; a condition goes before one", "chunks")

    def apply(self, attempts: Sequence[Attempt]) -> None:
        """Sets the signals of a batch."""
        conditions = self._writer.write(attempts)
        sequences: list[tuple[Attempt, TokenSequence]] = []
        for attempt, condition in zip(attempts, conditions, strict=True):
            pair = [TokenSequence(attempt.chunk.token_ids, spans_of(attempt.chunk)), self._negative(attempt, condition)]
            sequences += [(attempt, sequence) for sequence in pair if sequence is not None]
        scores = score_all(self._scorer, sequences)
        for attempt, condition in zip(attempts, conditions, strict=True):
            own = [score for (owner, _), score in zip(sequences, scores, strict=True) if owner is attempt]
            self._set(attempt, condition, own[0], own[-1], is_neutral=len(own) == 1)

    def _negative(self, attempt: Attempt, condition: Condition) -> TokenSequence | None:
        """The response behind the negative prompt; None where the condition is neutral."""
        if not condition.ok:
            reason = "the writer failed" if condition.error is not None else "no attack"
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
            return None
        prompt = attempt.need_task().prompt
        assert prompt is not None
        prompt_ids = self._tokenizer.encode_prompt(self._prompts.negative(prompt, condition))
        start, tail = tail_of(attempt.chunk)
        if len(prompt_ids) + len(tail) > self._scorer.context_length:
            self._reasons["too long for the context"] = self._reasons.get("too long for the context", 0) + 1
            return None
        return TokenSequence(prompt_ids + tail, spans_of(attempt.chunk, len(prompt_ids) - start))

    def _set(
        self, attempt: Attempt, condition: Condition, logp_ref: list[float], logp_neg: list[float], *, is_neutral: bool
    ) -> None:
        gate = [0.0] * len(logp_ref) if is_neutral else gates(logp_ref, logp_neg, self._gate)
        about: dict[str, Any] = {
            "method": "nsd", "gate": self._gate, "neutral": is_neutral, "condition": shown(condition),
            "reference": self._scorer.info,
        }  # fmt: skip
        attempt.set_signals([{"logp_ref": logp_ref, "logp_neg": logp_neg, "gate": gate}], about)
        classes = [token_class(self._bytes(id_).decode("utf-8", "replace")) for id_ in attempt.sampled_ids]
        text = attempt.rollout.response or ""
        for tally in (self._all, self._recent):
            tally.add(gate, classes, condition=condition.text, is_neutral=is_neutral, text=text)

    def lines(self) -> list[str]:
        """See Method."""
        tally = self._all
        mean = "" if tally.mean is None else f" (mean {tally.mean:.3g})"
        opened = f"{tally.open} of {tally.tokens} tokens have an open gate{mean}"
        neutral = f"; {tally.neutral} conditions neutral" if tally.neutral else ""
        why = ", ".join(f"{number} {reason}" for reason, number in self._reasons.items())
        return [f"{tally.rollouts} rollouts: {opened}{neutral}{why and f' ({why})'}"]

    def warnings(self) -> list[str]:
        """See Method."""
        if self._all.rollouts and self._all.neutral == self._all.rollouts:
            return ["every condition was neutral: there is nothing to learn but the anchor"]
        return []

    def take_metrics(self) -> dict[str, float | int | None]:
        """See Method."""
        recent, self._recent = self._recent, GateTally()
        return recent.metrics()
