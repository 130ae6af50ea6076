"""The records every tool reads and writes: one JSON object a line, "kind" first (design, section 2).

A `Record` keeps the line as it came, split into its top-level fields without reading them (`msgspec.Raw`). A tool asks
for a typed *view* of the few fields it needs, sets the fields it adds, and writes the rest back byte for byte: unknown
fields, token arrays, key order and number spellings survive. Numbers of fields that a tool does not read are not
evaluated; in a field that is read, a number that no float can hold (1e999) is bad data.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from strop.core.errors import DataError, Where

V = TypeVar("V", bound=Struct)

# msgspec says five different things of it; this finds it in a line that msgspec refused.
LONE_SURROGATE = re.compile(r"\\u[dD][89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..)\\u[dD][c-fC-F]")

_fields = msgspec.json.Decoder(dict[str, Raw])
_encoder = msgspec.json.Encoder()
_string = msgspec.json.Decoder(str)


class Span(Struct, array_like=True, frozen=True):
    """Half-open range [start, end) of positions in a chunk's `token_ids`."""

    start: int
    end: int


# Fields of a chunk with one value for each sampled token, in order.
PER_TOKEN = ("logprobs", "advantages", "values", "returns", "logp_ref", "logp_neg", "gate")


class RoutingRef(Struct):
    """Where a chunk's routing lies: a file of arrays one behind the other, each in C order, little endian.

    Of a chunk of N tokens `shape` is [N - 1, L, K]: for each token but the last the K experts that were used in each of
    L layers to predict the next one. `path` is as the user of `rollout` named it, from the folder it ran in.
    """

    path: str
    offset: int
    shape: list[int]
    dtype: str


class Chunk(Struct, omit_defaults=True):
    """A run of tokens as the model saw them: fed and sampled tokens, and which of them the policy produced.

    `logprobs` holds one value (nats) for each sampled token, in order; token-level estimators and signals stand beside
    it, as long and in the same order. `routing` says where the experts are that a mixture of experts used, and
    `teacher_prompt_ids` what a self-teacher reads in the place of all that comes before the first sampled token.
    """

    token_ids: list[int]
    sampled: list[Span]
    logprobs: list[float] | UnsetType = UNSET
    advantages: list[float] | UnsetType = UNSET
    values: list[float] | UnsetType = UNSET
    returns: list[float] | UnsetType = UNSET
    logp_ref: list[float] | UnsetType = UNSET
    logp_neg: list[float] | UnsetType = UNSET
    gate: list[float] | UnsetType = UNSET
    routing: RoutingRef | UnsetType = UNSET
    teacher_prompt_ids: list[int] | UnsetType = UNSET

    @property
    def num_sampled(self) -> int:
        """How many tokens the policy produced in this chunk."""
        return sum(span.end - span.start for span in self.sampled)


class Step(Struct, omit_defaults=True):
    """One decision of an episode: what was seen, what was done, what it brought.

    `anchor` is the hash of the observation; `nll` the mean negative log-probability (nats) of the step's own tokens.
    `span` points into chunk number `chunk` (needed where there are several); `action_span` is the part of it without
    the reasoning. The last fields are the credit that `advantage` gives.
    """

    reward: float | None = None
    observation: str | None = None
    anchor: str | None = None
    action: str | None = None
    valid: bool = True
    nll: float | None = None
    span: Span | None = None
    chunk: int | None = None
    action_span: Span | None = None
    done: bool | None = None
    optimal_advantage: float | None = None
    return_: float | None = msgspec.field(default=None, name="return")
    episode_advantage: float | None = None
    step_advantage: float | None = None
    anchor_size: int | None = None
    nll_score: float | None = None
    weight: float | None = None
    advantage: float | None = None


class Rollout(Struct, kw_only=True, omit_defaults=True):
    """One attempt at one task. A rollout without chunks or steps is legal wherever tokens are not needed."""

    id: str
    task: str
    group: str | None = None
    group_size: int | None = None
    sample: int | None = None
    statement_version: int | None = None
    seed: int | None = None
    policy: dict[str, Any] | None = None
    sampling: Sampling | None = None
    chunks: list[Chunk] = []
    steps: list[Step] = []
    turns: int | None = None
    horizon: int | None = None
    response: str | None = None
    reward: float | None = None
    success: bool | None = None
    assertions: list[dict[str, Any]] | None = None
    grading: dict[str, Any] | None = None
    stop: str | None = None
    advantage: float | None = None
    distill: dict[str, Any] | None = None
    error: str | None = None


class Sampling(Struct, kw_only=True, omit_defaults=True):
    """How tokens were drawn, and of which distribution `logprobs` speaks.

    `logprobs`: "raw" (temperature 1, whole vocabulary), "scaled" (at `temperature`, whole vocabulary) or "processed"
    (at `temperature`, over the tokens that survived top-p and top-k).
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 256
    stop: list[str] = []
    logprobs: str = "scaled"


class Task(Struct, kw_only=True, omit_defaults=True):
    """Something to attempt. `reference` is for verifiers and is never shown to the policy.

    `prompt` is text, or chat messages ({"role", "content"}); `verifier` is {"name": ..., and what it needs}; `sampling`
    holds hints ("stop", "max_tokens") that apply where the user of `rollout` says nothing else; `sandbox` is what the
    env `shell` starts an agent in, and `world` what other envs begin with; under `negative_condition` a negative
    self-teacher is to solve it.
    """

    id: str
    prompt: str | list[dict[str, Any]] | None = None
    env: str = "answer"
    verifier: dict[str, Any] | None = None
    reference: Any = None
    sandbox: dict[str, Any] | None = None
    world: dict[str, Any] | None = None
    negative_condition: str | None = None
    sampling: dict[str, Any] | None = None
    statement_version: int = 1
    parent: str | None = None
    calibration: dict[str, Any] | None = None


class Metric(Struct, kw_only=True, omit_defaults=True):
    """One measured number. `low` and `high` bound the 95 % interval where one is known."""

    name: str
    value: float | int | None
    low: float | None = None
    high: float | None = None
    n: int | None = None
    of: str | None = None


class CheckpointInfo(Struct, kw_only=True, omit_defaults=True):
    """A checkpoint that `train` wrote: `sha256` is over the weight files, in order of their names."""

    path: str
    version: int
    base: str
    sha256: str


class HorizonStep(Struct, kw_only=True, omit_defaults=True):
    """How the cap on turns moved after a training step; `applied` is the cap in whole turns that the step ran under."""

    step: int
    before: float
    after: float
    applied: int
    percentile: float | None = None
    target: float | None = None
    successes: int = 0
    rollouts: int = 0


class Example(Struct, kw_only=True, omit_defaults=True):
    """A request and an agent that might serve it. `y_raw` and `y_human` (0, 1, 2) never reach a prompt."""

    id: str
    query: str
    agent: dict[str, Any]
    y_raw: int | None = None
    y_human: int | None = None
    split: str | None = None


class Label(Struct, kw_only=True):
    """What a debate found of an example: the raw verdict 0, 1, 2 (None: none could be read) and the whole trace."""

    id: str
    query: str
    agent: dict[str, Any]
    trace: dict[str, Any] = {}
    verdict: int | None = None
    priority: float | None = None
    reward: dict[str, Any] | None = None
    split: str | None = None
    y_raw: int | None = None
    error: str | None = None


class Skill(Struct, kw_only=True):
    """A principle of judging what an agent can do; `origin` is seed, added or refined."""

    id: str
    title: str
    principle: str
    when_to_apply: str = ""
    tags: list[str] = []
    origin: str = "added"
    version: int = 1
    support_count: int = 0


VIEWS: dict[str, type[Struct]] = {
    "task": Task, "rollout": Rollout, "metric": Metric, "checkpoint": CheckpointInfo, "horizon": HorizonStep,
    "example": Example, "label": Label, "skill": Skill,
}  # fmt: skip


@lru_cache(maxsize=64)
def _view_decoder(view: type[Struct]) -> tuple[msgspec.json.Decoder[Any], tuple[str, ...]]:
    return msgspec.json.Decoder(view), tuple(field.encode_name for field in msgspec.structs.fields(view))


class Record:
    """One line of a stream: its kind, its top-level fields unread, and where it came from."""

    __slots__ = ("_line", "fields", "kind", "where")

    def __init__(self, kind: str, fields: dict[str, Raw], where: Where | None, line: str | None = None) -> None:
        self.kind = kind
        self.fields = fields
        self.where = where
        self._line = line

    @classmethod
    def parse(cls, line: str, where: Where, kind_if_none: str | None = None) -> Record:
        """The record on `line` (with or without its line end); one without `kind` is bad, or of `kind_if_none`.

        Raises DataError.
        """
        try:
            fields = _fields.decode(line)
        except msgspec.ValidationError as error:
            raise DataError(f"not a JSON object ({error})", where=where) from None
        except msgspec.DecodeError as error:
            raise DataError(_explain(line, error), where=where) from None
        kind = fields.get("kind")
        if kind is None and kind_if_none is not None:
            return cls(kind_if_none, fields, where, line)
        if kind is None:
            raise DataError('missing; every record names its kind, e.g. "kind": "rollout"', where=where, field="kind")
        try:
            return cls(_string.decode(kind), fields, where, line)
        except msgspec.DecodeError as error:
            raise DataError(str(error), where=where, field="kind") from None

    @classmethod
    def make(cls, kind: str, values: Mapping[str, Any] | Struct) -> Record:
        """A new record from a mapping or a struct of records.py; None is written as null, UNSET is left out."""
        pairs = msgspec.structs.asdict(values) if isinstance(values, Struct) else values
        if isinstance(values, Struct) and values.__struct_config__.omit_defaults:
            fields = _fields.decode(_encoder.encode(values))
        else:
            fields = {key: Raw(_encoder.encode(value)) for key, value in pairs.items() if value is not UNSET}
        return cls(kind, {"kind": Raw(_encoder.encode(kind)), **fields}, None)

    def view(self, view: type[V]) -> V:
        """The fields of `view`, decoded and checked. Raises DataError with file, line and field."""
        decoder, names = _view_decoder(view)
        some = {name: self.fields[name] for name in names if name in self.fields}
        try:
            return decoder.decode(_encoder.encode(some))  # type: ignore[no-any-return]
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            raise self.bad(message, path.rstrip("`").lstrip(".") or None) from None
        except msgspec.DecodeError as error:
            raise self.bad(str(error), None) from None

    def get(self, name: str, kind: Any = Any) -> Any:
        """One top-level field decoded as `kind`, or None where the record lacks it."""
        raw = self.fields.get(name)
        if raw is None:
            return None
        try:
            return msgspec.json.decode(raw, type=kind)
        except msgspec.DecodeError as error:
            raise self.bad(str(error).partition(" - at")[0], name) from None

    def set(self, **values: Any) -> None:
        """Adds or replaces top-level fields; a `Raw` goes in as it is."""
        for name, value in values.items():
            self.fields[name] = value if isinstance(value, Raw) else Raw(_encoder.encode(value))
        self._line = None

    def bad(self, message: str, field: str | None) -> DataError:
        """The error for this record, with its place filled in."""
        return DataError(message, where=self.where, field=field)

    def encode(self) -> bytes:
        """The line without its line end: byte for byte as it came if nothing was set."""
        if self._line is not None:
            return self._line.rstrip("\r\n").encode()
        return _encoder.encode(self.fields)


def _explain(line: str, error: msgspec.DecodeError) -> str:
    if LONE_SURROGATE.search(line) and line.rstrip().endswith("}"):
        return "a lone surrogate (\\ud800-\\udfff without its other half) is not text"
    if "truncated" in str(error):
        return "the line ends in the middle of the record (was the writer killed?)"
    for word in ("NaN", "Infinity"):
        if word in line:
            return f"{word} is not JSON; write null or leave the field out"
    return str(error)


def check_chunks(record: Record, chunks: list[Chunk], vocabulary: int | None = None) -> None:
    """Spans lie in their chunk, in order; every per-token list is as long as the sampled tokens. Raises DataError."""
    for i, chunk in enumerate(chunks):
        last = 0
        for j, span in enumerate(chunk.sampled):
            if not last <= span.start <= span.end <= len(chunk.token_ids):
                raise record.bad(
                    f"span [{span.start}, {span.end}) is out of order or outside the {len(chunk.token_ids)} tokens",
                    f"chunks[{i}].sampled[{j}]",
                )
            last = span.end
        for name in PER_TOKEN:
            values = getattr(chunk, name)
            if values is not UNSET and len(values) != chunk.num_sampled:
                raise record.bad(f"{len(values)} values for {chunk.num_sampled} sampled tokens", f"chunks[{i}].{name}")
        for name in ("token_ids", "teacher_prompt_ids"):
            ids = getattr(chunk, name)
            if vocabulary is not None and ids and not 0 <= min(ids) <= max(ids) < vocabulary:
                message = f"a token id lies outside the model's vocabulary of {vocabulary}"
                raise record.bad(message, f"chunks[{i}].{name}")
