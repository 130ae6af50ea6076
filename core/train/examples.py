"""From records to what is trained on: exact token ids, the positions the policy produced, advantages, old log-probs.

No text of a rollout is ever tokenised again. There is no padding, so that an end token which doubles as the padding
token is trained like any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import UNSET, Meta, Struct

from strop.core.records import Chunk, Record, Sampling, Span, check_chunks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strop.core.models.tokens import Tokenizer
    from strop.core.train.routing import RoutingReading

# Rounding can put the log-probability of a certain token a little above 0.
MAX_LOGPROB = 1e-3
# Squares of advantages must stay finite in float32.
MAX_ADVANTAGE = 1e15
Advantage = Annotated[float, Meta(ge=-MAX_ADVANTAGE, le=MAX_ADVANTAGE)]


class TrainStep(Struct, kw_only=True):
    """A step's credit and where its tokens are: `span` points into the chunk `chunk` (needed if there are several)."""

    advantage: Advantage | None = None
    span: Span | None = None
    chunk: Annotated[int, Meta(ge=0)] | None = None


class Place(Struct, kw_only=True):
    """The fields that place a rollout in its group."""

    id: str
    task: str
    group: str | None = None
    group_size: Annotated[int, Meta(ge=1)] | None = None
    sample: int | None = None
    statement_version: int | None = None

    @property
    def group_key(self) -> str:
        """The group's id; a rollout that names none belongs to the attempts at its task in its statement version."""
        return f"{self.task}@{self.statement_version or 1}" if self.group is None else self.group


class TrainRollout(Place, kw_only=True):
    """What training reads of a rollout."""

    sampling: Sampling | None = None
    chunks: list[Chunk] = []
    steps: list[TrainStep] = []
    advantage: Advantage | None = None
    success: bool | None = None
    error: str | None = None
    horizon: int | None = None


class Sft(Struct, kw_only=True):
    """A supervised example: `prompt` (text or chat messages) and `response`, or `token_ids` with `trained` spans."""

    id: str | None = None
    prompt: str | list[dict[str, Any]] | None = None
    response: str | None = None
    token_ids: list[int] | None = None
    trained: list[Span] | None = None


@dataclass(slots=True)
class TrainSequence:
    """Tokens in their context. `positions` (all >= 1) are those trained on; the other lists are as long.

    `old_logprobs` is empty where the record has none; `values` and `returns` are the critic's, `logp_ref` and `gate`
    those of a negative self-teacher, empty without one. The logits are divided by `temperature` before the softmax, as
    they were when the tokens were drawn. `routing` holds for each token but the last the experts to use,
    [len(token_ids) - 1, L, K]; None leaves the choice to the model. `teacher_prompt_ids` is what the frozen model reads
    in the place of all tokens before the first position; None: the same tokens.
    """

    token_ids: list[int]
    positions: list[int]
    advantages: list[float]
    old_logprobs: list[float]
    temperature: float = 1.0
    values: list[float] = field(default_factory=list)
    returns: list[float] = field(default_factory=list)
    logp_ref: list[float] = field(default_factory=list)
    gate: list[float] = field(default_factory=list)
    routing: NDArray[Any] | None = None
    teacher_prompt_ids: list[int] | None = None

    @property
    def num_fed(self) -> int:
        """How many tokens go through the model, or through the teacher if that reads more. The last is never fed."""
        own = len(self.token_ids) - 1
        return own if self.teacher_prompt_ids is None else max(own, own + self.teacher_shift)

    @property
    def teacher_shift(self) -> int:
        """By how much the trained positions move in what the teacher reads."""
        return 0 if self.teacher_prompt_ids is None else len(self.teacher_prompt_ids) - self.positions[0]

    @property
    def teacher_ids(self) -> list[int]:
        """What the teacher is fed."""
        if self.teacher_prompt_ids is None:
            return self.token_ids[:-1]
        return self.teacher_prompt_ids + self.token_ids[self.positions[0] : -1]


@dataclass(slots=True)
class Example:
    """One rollout (or supervised example): its sequences, one for each chunk that holds sampled tokens."""

    id: str
    sequences: list[TrainSequence] = field(default_factory=list)

    @property
    def num_trained(self) -> int:
        """How many tokens are trained on."""
        return sum(len(sequence.positions) for sequence in self.sequences)

    @property
    def num_tokens(self) -> int:
        """How many tokens go through the model."""
        return sum(len(sequence.token_ids) for sequence in self.sequences)

    @property
    def has_signal(self) -> bool:
        """Whether any advantage differs from zero."""
        return any(value != 0 for sequence in self.sequences for value in sequence.advantages)


@dataclass(frozen=True, slots=True)
class Reading:
    """What the loss asks of a record. `vocabulary` is asked when the first record needs it; None checks no ids.

    `routing` None: the experts of a mixture are not looked for.
    """

    loss: str
    needs_old: bool
    vocabulary: Callable[[], int | None] = lambda: None
    allow_truncated: bool = False
    needs_returns: bool = False
    routing: RoutingReading | None = None


def rollout_example(record: Record, rollout: TrainRollout, reading: Reading) -> Example | None:
    """The example of a rollout, or None if it carries no signal (or, for sft, was no success). Raises DataError."""
    is_sft, is_nsd, is_opsd = (reading.loss == loss for loss in ("sft", "nsd", "opsd"))
    if is_sft and rollout.success is not True:
        return None
    credit = None if is_sft or is_nsd or is_opsd else _credit(record, rollout)
    if is_nsd and all(chunk.gate is UNSET for chunk in rollout.chunks):
        return None
    if is_opsd and all(chunk.teacher_prompt_ids is UNSET for chunk in rollout.chunks):
        return None
    if not (is_sft or is_nsd or is_opsd) and credit is None:
        return None
    if not rollout.chunks:
        raise record.bad("missing; training needs the tokens of a rollout", "chunks")
    check_chunks(record, rollout.chunks, reading.vocabulary())
    sampling = rollout.sampling or Sampling()
    if not is_sft and not is_opsd and (not is_nsd or reading.needs_old):
        _check_sampling(record, sampling, allowed=reading.allow_truncated)
    if is_nsd and reading.needs_old and sampling.temperature != 1:
        # The scores are those of temperature 1, which is what NSD trains.
        raise record.bad("the trust mask compares with log-probabilities of temperature 1", "sampling.temperature")
    plain = is_sft or is_nsd or is_opsd or sampling.logprobs == "raw" or sampling.temperature == 0
    temperature = 1.0 if plain else sampling.temperature
    example = Example(rollout.id)
    for i, chunk in enumerate(rollout.chunks):
        if not chunk.num_sampled:
            continue
        positions = _positions(record, chunk.sampled, f"chunks[{i}].sampled")
        advantages = [1.0] * len(positions) if credit is None else credit[i]
        old = _old_logprobs(record, chunk, i, needed=reading.needs_old and not is_sft)
        sequence = _sequence(chunk.token_ids, positions, advantages, old, temperature)
        if is_nsd:
            sequence.logp_ref, sequence.gate = _signals(record, chunk, i)
        if is_opsd:
            sequence.teacher_prompt_ids = _teacher_prompt(record, chunk, i)
        if reading.needs_returns:
            sequence.values, sequence.returns = _critic_values(record, chunk, i)
        routing = None if reading.routing is None else reading.routing.of_chunk(record, i, chunk)
        if routing is not None:
            # Cut as the tokens are: the last one is predicted and not fed.
            sequence.routing = routing[: len(sequence.token_ids) - 1]
        example.sequences.append(sequence)
    if not example.sequences:
        raise record.bad("no sampled token in any chunk; there is nothing to train on", "chunks")
    return example


def _sequence(
    token_ids: list[int], positions: list[int], advantages: list[float], old: list[float], temperature: float
) -> TrainSequence:
    # What follows the last trained token cannot matter to a causal model.
    return TrainSequence(token_ids[: positions[-1] + 1], positions, advantages, old, temperature)


def _positions(record: Record, spans: list[Span], field_name: str) -> list[int]:
    positions = [position for span in spans for position in range(span.start, span.end)]
    if positions and positions[0] == 0:
        raise record.bad("the first token of a chunk has nothing before it and cannot have been sampled", field_name)
    return positions


def _old_logprobs(record: Record, chunk: Chunk, i: int, *, needed: bool) -> list[float]:
    if chunk.logprobs is UNSET:
        if needed:
            raise record.bad(
                "missing; this loss compares with the rollout's log-probabilities (--loss reinforce does without)",
                f"chunks[{i}].logprobs",
            )
        return []
    for j, value in enumerate(chunk.logprobs):
        if value > MAX_LOGPROB:
            raise record.bad(f"{value} is above 0 and no log-probability", f"chunks[{i}].logprobs[{j}]")
    return chunk.logprobs


def _critic_values(record: Record, chunk: Chunk, i: int) -> tuple[list[float], list[float]]:
    found = []
    for name, values in ("values", chunk.values), ("returns", chunk.returns):
        if values is UNSET:
            message = "missing; a critic learns from what `strop advantage --gae` writes"
            raise record.bad(message, f"chunks[{i}].{name}")
        found.append(values)
    return found[0], found[1]


def _signals(record: Record, chunk: Chunk, i: int) -> tuple[list[float], list[float]]:
    """The frozen model's log-probabilities and the gate of each sampled token."""
    if chunk.logp_ref is UNSET or chunk.gate is UNSET:
        name = "gate" if chunk.gate is UNSET else "logp_ref"
        raise record.bad("missing; --loss nsd learns from what `strop distill --nsd` writes", f"chunks[{i}].{name}")
    for j, (logp, gate) in enumerate(zip(chunk.logp_ref, chunk.gate, strict=True)):
        if not -math.inf < logp <= MAX_LOGPROB:
            raise record.bad(f"{logp} is no log-probability", f"chunks[{i}].logp_ref[{j}]")
        if not 0 <= gate < math.inf:
            raise record.bad(f"{gate} is below 0 and no gate", f"chunks[{i}].gate[{j}]")
    return chunk.logp_ref, chunk.gate


def _teacher_prompt(record: Record, chunk: Chunk, i: int) -> list[int]:
    if chunk.teacher_prompt_ids is UNSET or not chunk.teacher_prompt_ids:
        message = "missing or empty; --loss opsd learns from what `strop distill --opsd` writes"
        raise record.bad(message, f"chunks[{i}].teacher_prompt_ids")
    return chunk.teacher_prompt_ids


def _check_sampling(record: Record, sampling: Sampling, *, allowed: bool) -> None:
    """Refuses log-probabilities of another distribution than the trainer's (see the help of `strop train`)."""
    message = None
    truncated = sampling.top_p < 1 or sampling.top_k > 0
    if sampling.logprobs not in ("raw", "scaled", "processed"):
        raise record.bad(f"{sampling.logprobs!r}, expected raw, scaled or processed", "sampling.logprobs")
    if sampling.logprobs == "processed" and truncated:
        message = (
            f"drawn with top_p {sampling.top_p:g}, top_k {sampling.top_k} and logprobs over the surviving tokens only: "
            "their ratio to the policy's is biased by the mass that was cut off"
        )
    elif sampling.temperature == 0:
        message = "drawn greedily: there is no distribution whose samples these are"
    elif sampling.logprobs == "raw" and sampling.temperature != 1:
        message = (
            f"drawn at temperature {sampling.temperature:g}, but the logprobs are those of temperature 1: "
            "their ratio to the policy's is not an importance weight"
        )
    if message and not allowed:
        raise record.bad(f"{message} (sample without, or pass --allow-truncated-sampling)", "sampling")


def _credit(record: Record, rollout: TrainRollout) -> list[list[float]] | None:
    """An advantage for each sampled token of each chunk: token level before step level before the rollout's own."""
    token_level = [chunk.advantages is not UNSET for chunk in rollout.chunks if chunk.num_sampled]
    if any(token_level):
        if not all(token_level):
            raise record.bad("some chunks have token-level advantages and some do not", "chunks")
        return [_finite(record, chunk, i) for i, chunk in enumerate(rollout.chunks)]
    if any(step.advantage is not None for step in rollout.steps):
        return _step_credit(record, rollout)
    if rollout.advantage is None:
        return None
    return [[rollout.advantage] * chunk.num_sampled for chunk in rollout.chunks]


def _finite(record: Record, chunk: Chunk, i: int) -> list[float]:
    values = [] if chunk.advantages is UNSET else chunk.advantages
    for j, value in enumerate(values):
        if not math.isfinite(value) or abs(value) > MAX_ADVANTAGE:
            raise record.bad(f"{value} is too large to train on", f"chunks[{i}].advantages[{j}]")
    return values


def _step_credit(record: Record, rollout: TrainRollout) -> list[list[float]]:
    by_position: list[dict[int, float]] = [{} for _ in rollout.chunks]
    for i, step in enumerate(rollout.steps):
        if step.span is None or (step.chunk is None and len(rollout.chunks) > 1):
            name = "span" if step.span is None else "chunk"
            raise record.bad("missing; step-level advantages reach the tokens by it", f"steps[{i}].{name}")
        chunk = step.chunk or 0
        if chunk >= len(rollout.chunks):
            raise record.bad(f"{chunk}, but there are {len(rollout.chunks)} chunks", f"steps[{i}].chunk")
        size = len(rollout.chunks[chunk].token_ids)
        if not 0 <= step.span.start <= step.span.end <= size:
            message = f"[{step.span.start}, {step.span.end}) lies outside the {size} tokens of chunk {chunk}"
            raise record.bad(message, f"steps[{i}].span")
        if step.advantage is None:
            raise record.bad("missing; other steps of this rollout have one", f"steps[{i}].advantage")
        by_position[chunk].update(dict.fromkeys(range(step.span.start, step.span.end), step.advantage))
    credit = []
    for i, chunk_values in enumerate(by_position):
        positions = [p for span in rollout.chunks[i].sampled for p in range(span.start, span.end)]
        lost = next((p for p in positions if p not in chunk_values), None)
        if lost is not None:
            raise record.bad(f"sampled token {lost} of chunk {i} lies in no step's span", "steps")
        credit.append([chunk_values[p] for p in positions])
    return credit


def sft_example(record: Record, tokenizer: Tokenizer | None, vocabulary: int | None) -> Example:
    """The example of an sft record: its spans, or prompt and response through the tokenizer and one end token."""
    sft = record.view(Sft)
    name = sft.id or str(record.where)
    if sft.token_ids is not None:
        if not sft.trained:
            raise record.bad("missing or empty; token_ids come with the spans that are trained", "trained")
        chunk = Chunk(sft.token_ids, sft.trained)
        try:
            check_chunks(record, [chunk], vocabulary)
        except Exception as error:
            if field_name := getattr(error, "field", None):
                error.field = field_name.replace("chunks[0].sampled", "trained").replace("chunks[0].", "")  # type: ignore[attr-defined]
            raise
        positions = _positions(record, sft.trained, "trained")
        ids = sft.token_ids
    else:
        if sft.prompt is None or sft.response is None:
            missing = "prompt" if sft.prompt is None else "response"
            raise record.bad("missing; an sft record has prompt and response, or token_ids and trained", missing)
        assert tokenizer is not None
        prompt_ids = tokenizer.encode_prompt(sft.prompt)
        response_ids = response_tokens(tokenizer, sft.response)
        ids = prompt_ids + response_ids
        positions = list(range(max(len(prompt_ids), 1), len(ids)))
    if not positions:
        raise record.bad("nothing to train on", "response" if sft.token_ids is None else "trained")
    return Example(name, [_sequence(ids, positions, [1.0] * len(positions), [], 1.0)])


def response_tokens(tokenizer: Tokenizer, text: str) -> list[int]:
    """A response's ids and exactly one end token, whether or not the text already ends with one."""
    ids: list[int] = tokenizer.inner(text, add_special_tokens=False)["input_ids"]
    if ids and ids[-1] in tokenizer.eos_ids:
        return ids
    own = tokenizer.inner.eos_token_id
    end = [own] if own is not None else sorted(tokenizer.eos_ids)[:1]
    return ids + end

