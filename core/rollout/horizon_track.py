"""The track of a horizon over stored rollouts: what a schedule of caps made of them, or would have made of them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct

from strop.core.records import Record, Span
from strop.core.rollout.horizon import Elastic, Move, Planned


class ChunkSpans(Struct):
    """The sampled spans of a chunk; the tokens are not read."""

    sampled: list[Span] = []


class StepSpan(Struct):
    """Where a step's tokens are."""

    span: Span | None = None


class Episode(Struct, kw_only=True):
    """What the horizon reads of a rollout. `horizon` is the cap it ran under, `turns` how many it took."""

    success: bool | None = None
    reward: float | None = None
    error: str | None = None
    turns: int | None = None
    horizon: int | None = None
    stop: str | None = None
    chunks: list[ChunkSpans] = []
    steps: list[StepSpan] = []

    @property
    def length(self) -> int | None:
        """Turns; without the field as many as there are steps. None, or 0, is no length (as in the released code)."""
        return (self.turns if self.turns is not None else len(self.steps)) or None

    @property
    def succeeded(self) -> bool:
        """Whether all assertions passed: a graded reward reaches 1 without that (sheet, section 4c)."""
        return self.success if self.success is not None else (self.reward or 0.0) >= 1

    @property
    def was_clipped(self) -> bool:
        """Whether it ended because its turns were used up."""
        if self.stop is not None:
            return self.stop == "max_turns"
        return self.horizon is not None and self.length is not None and self.length >= self.horizon

    def tokens(self, cap: int | None = None) -> int:
        """Sampled tokens, of the first `cap` turns alone; by shares of turns where steps do not say where they lie."""
        total = sum(span.end - span.start for chunk in self.chunks for span in chunk.sampled)
        length = self.length
        if cap is None or length is None or length <= cap:
            return total
        spans = [step.span for step in self.steps[:cap]]
        if len(self.steps) == length and all(span is not None for span in spans):
            return sum(span.end - span.start for span in spans if span is not None)
        return round(total * cap / length)


@dataclass(slots=True)
class Batch:
    """The rollouts of one step so far."""

    rollouts: int = 0
    successes: int = 0
    errors: int = 0
    clipped: int = 0
    unknown: int = 0
    tokens: int = 0
    tokens_as_run: int = 0
    lengths: list[int] = field(default_factory=list)


class Track:
    """Feeds rollouts to a schedule, `every` of them a step (0: all of them are one).

    With `replay`, an episode longer than the cap in force counts as cut off there: no success, and its tokens to that
    point. What it cannot know is counted as `unknown`: an episode that ran out of turns under a smaller cap than the
    one in force might have succeeded.
    """

    def __init__(self, schedule: Elastic | Planned, *, every: int, replay: bool = False) -> None:
        self.schedule = schedule
        self.num_steps = 0
        self.tokens = 0
        self.tokens_as_run = 0
        self.num_unknown = 0
        self._every = every
        self._replay = replay
        self.batch = Batch()

    def add(self, record: Record) -> dict[str, Any] | None:
        """Takes a rollout; returns the fields of a `horizon` record where it ended a step. Raises DataError."""
        episode = record.view(Episode)
        if episode.turns is not None and episode.turns < 0:
            raise record.bad(f"{episode.turns} turns", "turns")
        self._count(episode)
        batch = self.batch
        return self._end() if self._every and batch.rollouts >= self._every else None

    def end(self) -> dict[str, Any] | None:
        """Ends a last step that is not full; None where nothing is left."""
        return self._end() if self.batch.rollouts else None

    def _count(self, episode: Episode) -> None:
        batch, cap = self.batch, self.schedule.applied
        batch.rollouts += 1
        if episode.error is not None:
            batch.errors += 1
            return
        length = episode.length
        cut = self._replay and length is not None and length > cap
        batch.clipped += cut or episode.was_clipped
        batch.unknown += (
            self._replay and episode.was_clipped and not episode.succeeded and length is not None and length < cap
        )
        batch.tokens += episode.tokens(cap if self._replay else None)
        batch.tokens_as_run += episode.tokens()
        if episode.succeeded and not cut:
            batch.successes += 1
            if length is not None:
                batch.lengths.append(length)

    def _end(self) -> dict[str, Any]:
        batch, self.batch = self.batch, Batch()
        applied = self.schedule.applied
        move = self.schedule.step(batch.lengths)
        self.num_steps += 1
        self.tokens += batch.tokens
        self.tokens_as_run += batch.tokens_as_run
        self.num_unknown += batch.unknown
        return self._fields(batch, applied, move)

    def _fields(self, batch: Batch, applied: int, move: Move) -> dict[str, Any]:
        counted = batch.rollouts - batch.errors
        fields = {
            "id": f"horizon/{self.num_steps}", "step": self.num_steps, "before": move.before, "after": move.after,
            "applied": applied, "percentile": move.percentile, "target": move.target, "reason": move.reason,
            "successes": batch.successes, "rollouts": batch.rollouts, "errors": batch.errors,
            "success_rate": batch.successes / counted if counted else None,
            "clipped_share": batch.clipped / counted if counted else None,
            "tokens": batch.tokens, "tokens_total": self.tokens,
        }  # fmt: skip
        if isinstance(self.schedule, Elastic):
            fields["buffered"] = len(self.schedule.lengths)
        if self._replay:
            saved = 1 - self.tokens / self.tokens_as_run if self.tokens_as_run else None
            fields |= {"unknown": batch.unknown, "tokens_saved_share": saved}
        return fields
