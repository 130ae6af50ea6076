"""What the credit estimators read of a rollout, and nothing more: heads, steps, and the numbers of one attempt."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Annotated, Any, TypeGuard

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from strop.core.records import Chunk, Record, Span, check_chunks

# Squares of rewards must stay finite in float64; no reward of use comes near.
MAX_REWARD = 1e100
Value = Annotated[float, Meta(ge=-MAX_REWARD, le=MAX_REWARD)]
NLL_SPANS = ("step", "action")
# Below what rounding can do to a log-probability of 0, an nll is a log-probability with the wrong sign.
MIN_NLL = -1e-3


class Head(Struct, kw_only=True):
    """The fields that place a rollout in its group and score it."""

    id: str
    task: str
    group: str | None = None
    group_size: Annotated[int, Meta(ge=1)] | None = None
    sample: int | None = None
    statement_version: int | None = None
    reward: Value | None = None
    success: bool | None = None
    error: str | None = None

    @property
    def group_key(self) -> str:
        """The group's id. A rollout that names none belongs to the attempts at its task in its statement version."""
        return f"{self.task}@{self.statement_version or 1}" if self.group is None else self.group


class CountedHead(Head, kw_only=True):
    """A head that also counts steps, for all-row statistics."""

    steps: list[Raw] = []


class StepView(Struct, kw_only=True):
    """The fields of a step that credit depends on. `chunk` is the chunk that `span` points into (needed if several).

    `action_span`: the part of the span that is the action alone, without the reasoning before it.
    The last fields are outputs, read only to know whether they are there.
    """

    reward: Value | None = None
    anchor: str | UnsetType | None = UNSET
    observation: Raw | UnsetType = UNSET
    valid: bool | None = None
    nll: Annotated[float, Meta(ge=MIN_NLL)] | UnsetType | None = UNSET
    span: Span | None = None
    action_span: Span | None = None
    chunk: Annotated[int, Meta(ge=0)] | None = None
    optimal_advantage: Value | None = None
    old_return: Raw | UnsetType = msgspec.field(default=UNSET, name="return")
    advantage: Raw | UnsetType = UNSET
    episode_advantage: Raw | UnsetType = UNSET
    step_advantage: Raw | UnsetType = UNSET
    anchor_size: Raw | UnsetType = UNSET
    nll_score: Raw | UnsetType = UNSET
    weight: Raw | UnsetType = UNSET
    action_nll: Raw | UnsetType = UNSET

    @property
    def holds_outputs(self) -> bool:
        """Whether a field that credit writes is there already, be it null."""
        return (
            self.anchor is None or self.nll is None or self.old_return is not UNSET or self.advantage is not UNSET
            or self.episode_advantage is not UNSET or self.step_advantage is not UNSET
            or self.anchor_size is not UNSET or self.nll_score is not UNSET or self.weight is not UNSET
            or self.action_nll is not UNSET
        )  # fmt: skip


class SteppedHead(Head, kw_only=True):
    """A head with its steps read."""

    steps: list[StepView] | UnsetType = UNSET


@dataclass(slots=True)
class Trajectory:
    """The numbers of one attempt, a list entry a step. NaN is "not known".

    `texts` (observations) are kept for similarity grouping only. `num_tokens` are sampled tokens in the step's span.
    `lacks_anchor`, `lacks_nll`: the step's record has none; the value here, if any, was made from what it has.
    `holds_outputs`: some step already has a field of a name that credit writes.
    """

    reward: float
    rewards: list[float] = field(default_factory=list)
    valid: list[bool] = field(default_factory=list)
    anchors: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    nll: list[float] = field(default_factory=list)
    num_tokens: list[float] = field(default_factory=list)
    optimal: list[float] = field(default_factory=list)
    lacks_anchor: list[bool] = field(default_factory=list)
    lacks_nll: list[bool] = field(default_factory=list)
    holds_outputs: bool = False


@dataclass(frozen=True, slots=True)
class Needs:
    """What an estimator wants of each step besides reward, validity and anchor."""

    nll: bool = False
    texts: bool = False
    num_tokens: bool = False
    nll_span: str = "step"


def read_trajectory(record: Record, head: SteppedHead, needs: Needs) -> Trajectory:
    """The numbers of an attempt with a reward. Raises DataError for steps that give none."""
    if head.reward is None:
        raise missing_reward(record)
    if head.steps is UNSET:
        raise record.bad("missing; step-level credit needs steps (--grpo does without)", "steps")
    trajectory = Trajectory(head.reward)
    _read_rewards(head.steps, trajectory)
    for i, step in enumerate(head.steps):
        trajectory.valid.append(step.valid is not False)
        trajectory.optimal.append(math.nan if step.optimal_advantage is None else step.optimal_advantage)
        trajectory.holds_outputs |= step.holds_outputs
        if needs.texts:
            trajectory.texts.append(_text(record, step, i))
        trajectory.lacks_anchor.append(not isinstance(step.anchor, str))
        if isinstance(step.anchor, str):
            trajectory.anchors.append(step.anchor)
        elif _is_there(step.observation):
            trajectory.anchors.append(_hashed(record, step.observation, i))
        else:
            raise record.bad("missing; a step needs an anchor, or an observation to make one of", f"steps[{i}].anchor")
    if needs.nll or needs.num_tokens:
        _read_tokens(record, head.steps, needs, trajectory)
    return trajectory


def missing_reward(record: Record) -> Exception:
    """The error for a rollout that neither failed by the machine nor was scored."""
    return record.bad("missing; a rollout without an error needs a finite reward", "reward")


def _read_rewards(steps: list[StepView], trajectory: Trajectory) -> None:
    """Rewards a step; where no step has one, the episode's reward came with the last step."""
    trajectory.rewards = [0.0 if step.reward is None else step.reward for step in steps]
    if steps and all(step.reward is None for step in steps):
        trajectory.rewards[-1] = trajectory.reward


def _text(record: Record, step: StepView, i: int) -> str:
    if _is_there(step.observation):
        value = _decoded(record, step.observation, i)
        if isinstance(value, str):
            return value
    raise record.bad("missing or not text; similarity grouping compares texts", f"steps[{i}].observation")


def _is_there(observation: Raw | UnsetType) -> TypeGuard[Raw]:
    return observation is not UNSET and bytes(observation) != b"null"


def _decoded(record: Record, observation: Raw, i: int) -> Any:
    try:
        return msgspec.json.decode(observation)
    except msgspec.DecodeError as error:
        raise record.bad(str(error), f"steps[{i}].observation") from None


def _hashed(record: Record, observation: Raw, i: int) -> str:
    """The anchor of an observation: text as it is, other JSON with its keys sorted (sheet gaca, 2.2 item 4)."""
    from strop.core.envs.answer import anchor_of

    value = _decoded(record, observation, i)
    return anchor_of(value if isinstance(value, str) else msgspec.json.encode(value, order="sorted").decode())


def _read_tokens(record: Record, steps: list[StepView], needs: Needs, trajectory: Trajectory) -> None:
    """The nll of each step, as recorded or from the log-probabilities in its span, and how many tokens it took."""
    reader = _SpanReader(record)
    for i, step in enumerate(steps):
        actions_only = needs.nll_span == "action"
        span, name = (step.action_span, "action_span") if actions_only else (step.span, "span")
        recorded = None if actions_only or step.nll is UNSET else step.nll
        nll = count = math.nan
        if span is not None and (recorded is None or needs.num_tokens):
            nll, count = reader.measure(step, span, i, name, is_needed=recorded is None)
        trajectory.lacks_nll.append(recorded is None)
        trajectory.nll.append(nll if recorded is None else recorded)
        trajectory.num_tokens.append(count)


class _SpanReader:
    """Looks spans up in a record's chunks, which are decoded and checked when the first span asks for them."""

    def __init__(self, record: Record) -> None:
        self._record = record
        self._chunks: list[Chunk] | None = None
        self._indices: dict[int, _SampledIndex] = {}

    def measure(self, step: StepView, span: Span, i: int, name: str, *, is_needed: bool) -> tuple[float, float]:
        """Mean negative log-probability (nats) of the sampled tokens in `span`, and their number; NaN if not known.

        Raises DataError for a span outside its chunk, or in no certain chunk if the answer `is_needed`.
        """
        if self._chunks is None:
            self._chunks = self._record.get("chunks", list[Chunk] | None) or []
            check_chunks(self._record, self._chunks)
        if not self._chunks or (step.chunk is None and len(self._chunks) > 1 and not is_needed):
            return math.nan, math.nan
        if step.chunk is None and len(self._chunks) > 1:
            message = f"missing; the rollout has {len(self._chunks)} chunks, and `{name}` points into one of them"
            raise self._record.bad(message, f"steps[{i}].chunk")
        index = step.chunk or 0
        if index >= len(self._chunks):
            raise self._record.bad(f"{index}, but there are {len(self._chunks)} chunks", f"steps[{i}].chunk")
        chunk = self._chunks[index]
        if not 0 <= span.start <= span.end <= len(chunk.token_ids):
            message = f"[{span.start}, {span.end}) lies outside the {len(chunk.token_ids)} tokens of chunk {index}"
            raise self._record.bad(message, f"steps[{i}].{name}")
        if index not in self._indices:
            self._indices[index] = _SampledIndex(chunk)
        return self._indices[index].mean_nll(span)


class _SampledIndex:
    """Where a chunk's sampled tokens are, so that a span finds its log-probabilities without a walk over all spans."""

    def __init__(self, chunk: Chunk) -> None:
        self._chunk = chunk
        self._ends = [span.end for span in chunk.sampled]
        self._before = list(accumulate((span.end - span.start for span in chunk.sampled), initial=0))

    def mean_nll(self, span: Span) -> tuple[float, float]:
        """Over the tokens in `span` that the policy sampled, and their number; those it was fed have no part in it."""
        picked: list[float] = []
        count = 0
        for j in range(bisect_right(self._ends, span.start), len(self._ends)):
            sampled = self._chunk.sampled[j]
            low, high = max(sampled.start, span.start), min(sampled.end, span.end)
            if sampled.start >= span.end:
                break
            if low < high:
                count += high - low
                offset = self._before[j] - sampled.start
                if self._chunk.logprobs is not UNSET:
                    picked += self._chunk.logprobs[low + offset : high + offset]
        return (-math.fsum(picked) / count if picked else math.nan), float(count)
