"""Log-probabilities of tokens that are already there, from any engine: one protocol, as for generation.

A scorer takes token ids with the spans to score and gives nats at temperature 1 over the whole vocabulary. What cannot
be scored is refused before the model is asked, and what comes back is checked: a number that is none never goes on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self

from strop.core.engines.open import EngineOptions, choose_engine, open_server, open_vllm, resolve_policy
from strop.core.engines.protocol import ModelInfo
from strop.core.engines.values import MINUS_INFINITY
from strop.core.errors import DataError, Unavailable, UsageError
from strop.core.models.memory import memory_told
from strop.core.models.score import TokenSequence, score_tokens

if TYPE_CHECKING:
    from strop.core.engines.vllm import VllmEngine
    from strop.core.models.load import ModelPath

# Above zero by more than rounding: no log-probability.
TOO_LARGE = 1e-3


class Scorer(Protocol):
    """A model that scores. A context manager: leaving it lets go of the model.

    `experts` is how many experts a token is given where that is not the model's own number. `arithmetic` names what
    computes, so far as it changes the last digits or is not known from `info`: engine, precision, what a server serves.
    Sequences have at most `context_length` tokens (up to the last one scored), with ids below `vocab_size`.
    """

    info: ModelInfo
    experts: int | None
    arithmetic: str
    vocab_size: int

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        ...

    def score(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """Log-probabilities (nats, temperature 1, whole vocabulary) of each sequence's spanned tokens, in order.

        Raises BadSequence for one that cannot be scored, Unavailable where the engine fails.
        """
        ...

    def close(self) -> None:
        """Lets go of the model, its memory and its processes."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: Any) -> None: ...


class BadSequence(DataError):  # noqa: N818 (the name says what is wrong)
    """A sequence that cannot be scored, or whose score is no number: `index` says which one of the call.

    `message` names it by that index; `reason` leaves it out, for callers that can name the record.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"sequence {index}: {reason}")
        self.index = index
        self.reason = reason


def find_sequence_fault(sequence: TokenSequence, *, vocab_size: int, context_length: int) -> str | None:
    """Why this sequence cannot be scored, or None. Tokens behind the last span are not looked at."""
    num_tokens = len(sequence.token_ids)
    if any(not 1 <= start <= end <= num_tokens for start, end in sequence.spans):
        return f"spans {sequence.spans} of {num_tokens} tokens; the first token has nothing before it to predict it"
    needed = needed_tokens(sequence)
    if len(needed) > context_length:
        return f"{len(needed)} tokens are more than the {context_length} that the context holds"
    for position, token in enumerate(needed):
        if not 0 <= token < vocab_size:
            return f"token id {token} at position {position} lies outside the vocabulary of {vocab_size}"
    return None


def needed_tokens(sequence: TokenSequence) -> list[int]:
    """The tokens up to the last one that is scored."""
    return sequence.token_ids[: max((end for start, end in sequence.spans if start < end), default=0)]


def check_sequences(scorer: Scorer, sequences: Sequence[TokenSequence]) -> None:
    """Raises BadSequence for the first one that `scorer` cannot score."""
    for index, sequence in enumerate(sequences):
        fault = find_sequence_fault(sequence, vocab_size=scorer.vocab_size, context_length=scorer.context_length)
        if fault is not None:
            raise BadSequence(index, fault)


def _checked(sequences: Sequence[TokenSequence], scores: list[list[float]]) -> list[list[float]]:
    """The scores, at most 0. Raises BadSequence for one that is no log-probability."""
    for index, (sequence, values) in enumerate(zip(sequences, scores, strict=True)):
        for position, value in zip(sequence.positions, values, strict=True):
            if not math.isfinite(value) or not MINUS_INFINITY < value <= TOO_LARGE:
                raise BadSequence(index, f"the log-probability of the token at position {position} is {value}")
    return [[min(0.0, value) for value in values] for values in scores]


class ModelScorer:
    """Scores with a transformers model that is in memory already, peft-wrapped or not (see Scorer for the methods).

    `without_adapter` switches a peft adapter off while it scores; `experts` gives each token so many. `close` leaves
    the model to whoever loaded it.
    """

    def __init__(
        self, model: Any, info: ModelInfo, *, context_length: int, experts: int | None = None,
        without_adapter: bool = False, max_tokens_per_pack: int = 2048,
    ) -> None:  # fmt: skip
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        if without_adapter and base is model:
            raise ValueError("a model without an adapter has none to switch off")
        weight = base.get_input_embeddings().weight
        self.info = replace(info, adapter=None) if without_adapter else info
        self.experts = experts
        self.arithmetic = f"transformers {str(weight.dtype).removeprefix('torch.')}"
        self.vocab_size = int(weight.shape[0])
        self.context_length = context_length
        self._model = model
        self._without_adapter = without_adapter
        self._max_tokens_per_pack = max_tokens_per_pack

    def score(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """See Scorer. Weights may have changed since the last call; the values are those of now."""
        from strop.core.models.routing import experts_per_token

        check_sequences(self, sequences)
        off = self._model.disable_adapter() if self._without_adapter else nullcontext()
        with off, experts_per_token(self._model, self.experts), memory_told("scoring"):
            scores = score_tokens(self._model, sequences, max_tokens_per_pack=self._max_tokens_per_pack)
        return _checked(sequences, scores)

    def close(self) -> None:
        """Leaves the model as it is."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


class Weights:
    """A checkpoint, with an adapter or not, that several scorers share: loaded once, by the first that needs it."""

    def __init__(self, model: ModelPath, adapter: Path | None, device: str, dtype: str) -> None:
        from strop.core.models.load import choose_device, choose_dtype

        self.device = choose_device(device)
        self.dtype = choose_dtype(dtype, self.device)
        self._path, self._adapter = model, adapter
        self._model: Any = None
        self._num_users = 0

    def take(self) -> Any:
        """The model, for one more user."""
        from strop.core.models.adapters import apply_adapter, merge_adapter
        from strop.core.models.load import load_model

        if self._model is None:
            model = load_model(self._path, device=self.device, dtype=self.dtype)
            self._model = model if self._adapter is None else merge_adapter(apply_adapter(model, self._adapter))
        self._num_users += 1
        return self._model

    def give_back(self) -> None:
        """One user less; the last one lets go of the model."""
        from strop.core.models.memory import free_memory

        self._num_users -= 1
        if not self._num_users:
            self._model = None
            free_memory()


class TransformersScorer:
    """Scores with a checkpoint whose weights are loaded at the first call (see Scorer for the methods)."""

    def __init__(
        self, weights: Weights, info: ModelInfo, *, context_length: int, vocab_size: int, experts: int | None = None
    ) -> None:
        self.info = info
        self.experts = experts
        self.arithmetic = f"transformers {weights.dtype}"
        self.context_length = context_length
        self.vocab_size = vocab_size
        self.weights = weights
        self._scorer: ModelScorer | None = None

    def score(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """See Scorer."""
        check_sequences(self, sequences)
        if self._scorer is None:
            self._scorer = ModelScorer(
                self.weights.take(), self.info, context_length=self.context_length, experts=self.experts
            )
        return self._scorer.score(sequences)

    def close(self) -> None:
        """Lets go of the weights, where no other scorer uses them."""
        if self._scorer is not None:
            self._scorer = None
            self.weights.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


class PromptEngine(Protocol):
    """What can score prompts: VllmEngine, ServerEngine. A prompt leaves room for one token in `context_length`."""

    context_length: int

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Log-probabilities (nats, temperature 1, whole vocabulary) of each prompt's tokens but its first."""
        ...

    def close(self) -> None:
        """Lets go of the model."""
        ...


class LazyVllm:
    """vLLM, started by the first prompts: a run whose scores are all known never loads it."""

    def __init__(self, options: EngineOptions, context_length: int) -> None:
        self.context_length = context_length
        self._options = options
        self._engine: VllmEngine | None = None

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """See PromptEngine. What vLLM finds memory for may be less than the context that was promised."""
        if self._engine is None:
            self._engine = open_vllm(self._options, for_scoring=True)
            self.context_length = self._engine.context_length
        longest = max(map(len, prompts), default=0)
        if longest >= self.context_length:
            raise Unavailable(
                f"vLLM has memory for {self.context_length} tokens, and a sequence has {longest}; "
                "--max-context bounds sequences, --gpu-memory gives it more"
            )
        return self._engine.prompt_logprobs(prompts)

    def close(self) -> None:
        """Lets go of the model."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


class PromptScorer:
    """Scores with an engine that gives the log-probabilities of its prompts (see Scorer for the methods).

    These engines sample a token behind every prompt, so that the longest sequence is one shorter than their context.
    """

    def __init__(self, engine: PromptEngine, info: ModelInfo, *, arithmetic: str, vocab_size: int) -> None:
        self.info = info
        self.experts: int | None = None
        self.arithmetic = arithmetic
        self.vocab_size = vocab_size
        self._engine = engine

    @property
    def context_length(self) -> int:
        """Most tokens of a sequence."""
        return self._engine.context_length - 1

    def score(self, sequences: Sequence[TokenSequence]) -> list[list[float]]:
        """See Scorer."""
        check_sequences(self, sequences)
        scored = [sequence for sequence in sequences if sequence.positions]
        rows = iter(self._engine.prompt_logprobs([needed_tokens(sequence) for sequence in scored]) if scored else ())
        scores: list[list[float]] = []
        for sequence in sequences:
            row = next(rows) if sequence.positions else []
            scores.append([row[position - 1] for position in sequence.positions])
        return _checked(sequences, scores)

    def close(self) -> None:
        """Lets go of the engine."""
        self._engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def open_scorer(options: EngineOptions, *, experts: int | None = None, beside: Scorer | None = None) -> Scorer:
    """The scorer the options ask for; the engines transformers and vllm load weights at the first call.

    `batch_rows` of the options bounds what a server scores at a time. `experts` routes a mixture of experts with so
    many experts a token (CompassOPD's weaker self; engine transformers alone). `beside` is another scorer, whose
    weights are shared where it is of the same checkpoint. Raises UsageError for options that do not fit together,
    Unavailable for a model or a server that is not there.
    """
    from strop.core.models.adapters import model_info
    from strop.core.models.load import choose_device, choose_dtype, context_length, vocab_size

    name = choose_engine(options)
    if experts is not None and name == "vllm" and options.engine == "auto":
        name = "transformers"
    if name == "script":
        raise UsageError(f"--engine {options.engine}: a script says tokens, and scores none")
    if name != "transformers":
        if experts is not None:
            raise UsageError(f"{experts} experts a token: the engine {name} cannot choose that; transformers can")
        _check_adapter(name, options.adapter)
    if name == "server":
        server = open_server(options)
        arithmetic = f"server {server.fingerprint}"
        # The base may be a hub id or a folder; the ids it knows are in its configuration either way.
        size = vocab_size(resolve_policy(replace(options, adapter=None))[0])
        return PromptScorer(server, server.info, arithmetic=arithmetic, vocab_size=size)
    model, adapter = resolve_policy(options)
    info = model_info(model, adapter, options.adapter)
    length, size = context_length(model, options.max_context), vocab_size(model)
    if name == "vllm":
        dtype = choose_dtype(options.dtype, choose_device(options.device))
        return PromptScorer(LazyVllm(options, length), info, arithmetic=f"vllm {dtype}", vocab_size=size)
    if experts is not None:
        _check_experts(model, experts)
    weights = Weights(model, adapter, options.device, options.dtype)
    if isinstance(beside, TransformersScorer) and _same(beside, info, weights):
        weights = beside.weights
    return TransformersScorer(weights, info, context_length=length, vocab_size=size, experts=experts)


def _check_adapter(name: str, adapter: str | None) -> None:
    """Raises UsageError for an adapter of whose part on the output matrix vLLM scores nothing, and says nothing."""
    from strop.core.engines.lora import read_lora
    from strop.core.models.adapters import resolve_adapter

    if adapter is not None and Path(adapter).expanduser().exists() and read_lora(resolve_adapter(adapter)).has_output:
        raise UsageError(
            f"--adapter {adapter}: it changes the output matrix, which vLLM leaves out where it scores given tokens "
            f"(its issue 51594), so the engine {name} cannot; --engine transformers can"
        )


def _same(other: TransformersScorer, info: ModelInfo, weights: Weights) -> bool:
    theirs = (other.info.revision, other.info.adapter, other.weights.device, other.weights.dtype)
    return theirs == (info.revision, info.adapter, weights.device, weights.dtype)


def _check_experts(model: ModelPath, experts: int) -> None:
    """Raises UsageError where the model cannot give a token so many experts, before its weights are loaded."""
    from strop.core.models.routing import routing_shape

    shape = routing_shape(model.path)
    if shape is None:
        raise UsageError(f"{experts} experts a token: {model.name} is not a mixture of experts")
    if not 1 <= experts <= shape.num_experts:
        raise UsageError(f"{experts} experts a token: {model.name} has {shape.num_experts}")
