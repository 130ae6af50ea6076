"""The embedded engine: transformers' forward, our own sampler, and samples that do not depend on their batch mates.

Requests with one prompt form a group. Its prompt is computed once, as a batch of one, and its keys and values are
expanded to a block of a fixed number of rows; a sample sits in the row that its own index names. Rows that are absent
or finished are computed along, so every product has the same shape whoever else is there: nothing is padded, and
nothing depends on neighbours, on the order of arrival, or on what was done in an earlier run.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from strop.core.engines.open import EngineOptions, resolve_policy
from strop.core.engines.protocol import Completion, ModelInfo, Request
from strop.core.engines.sampler import Uniforms, check_sampling, draw, logprobs_mode
from strop.core.engines.stops import StopFinder
from strop.core.models.adapters import apply_adapter, merge_adapter, model_info
from strop.core.models.load import ModelPath, context_length, load_model, load_tokenizer

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Sampling

ROWS = 8


class TransformersEngine:
    """Generates with a transformers model in this process; see the module's text for what it promises.

    The weights are loaded when the first request is worked on. `batch_rows` is the number of rows of a block (0: 8).
    A prompt as long as the context, or longer, ends at once with stop "length" and no tokens.
    """

    name = "transformers"

    def __init__(
        self, model: ModelPath, info: ModelInfo, *, adapter: Path | None = None, device: str = "auto",
        dtype: str = "auto", max_context: int | None = None, batch_rows: int = 0,
    ) -> None:  # fmt: skip
        self.info = info
        self.context_length = context_length(model, max_context)
        self.rows = batch_rows or ROWS
        self.concurrency = 4 * self.rows
        self._path, self._adapter, self._device, self._dtype = model, adapter, device, dtype
        self._tokenizer: Tokenizer | None = None
        self._model: Any = None
        self._queue: deque[Request] = deque()
        self._active: Iterator[list[Completion]] | None = None
        self._prefix: _Prefix | None = None
        self._pending = 0

    @classmethod
    def open(cls, options: EngineOptions) -> TransformersEngine:
        """The engine the options describe. Raises Unavailable, UsageError or DataError as models and adapters do."""
        model, adapter = resolve_policy(options)
        return cls(
            model, model_info(model, adapter, options.adapter), adapter=adapter, device=options.device,
            dtype=options.dtype, max_context=options.max_context, batch_rows=options.batch_rows,
        )  # fmt: skip

    def submit(self, request: Request) -> None:
        """Queues a request. Raises UsageError for numbers that mean nothing."""
        check_sampling(request.sampling)
        self._queue.append(request)
        self._pending += 1

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        return self._pending

    def logprobs_mode(self, sampling: Sampling) -> str:
        """ "scaled", or "raw" for greedy decoding."""
        return logprobs_mode(sampling)

    def collect(self) -> list[Completion]:
        """Works on one block of samples until some of them have finished, and returns those."""
        while self._pending:
            if self._active is None:
                self._active = self._run_block(self._next_block())
            finished = next(self._active, None)
            if finished is None:
                self._active = None
            elif finished:
                self._pending -= len(finished)
                return finished
        return []

    def close(self) -> None:
        """Lets go of the model and of what was queued."""
        self._active = self._prefix = self._model = self._tokenizer = None
        self._queue.clear()
        self._pending = 0
        _free_device_memory()

    def __enter__(self) -> Self:
        """The engine itself; nothing is loaded yet."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Closes."""
        self.close()

    def _next_block(self) -> list[Request]:
        """The oldest request, and those queued that sit in its block, no two in one row."""
        first = self._queue[0]
        taken: dict[int, Request] = {}
        rest: deque[Request] = deque()
        for request in self._queue:
            same = request.row // self.rows == first.row // self.rows and request.prompt_ids == first.prompt_ids
            if same and request.row not in taken:
                taken[request.row] = request
            else:
                rest.append(request)
        self._queue = rest
        return list(taken.values())

    def _run_block(self, requests: list[Request]) -> Iterator[list[Completion]]:
        """Yields, after every step, the completions that finished in it."""
        import torch

        self._load()
        assert self._tokenizer is not None
        prompt_ids = requests[0].prompt_ids
        budget = self.context_length - len(prompt_ids)
        if budget <= 0:
            yield [Completion(request.key, stop="length") for request in requests]
            return
        samples = {request.row % self.rows: _Sample(request, self._tokenizer, budget) for request in requests}
        with torch.inference_mode():
            if self._prefix is None or self._prefix.prompt_ids != prompt_ids:
                self._prefix = None
                self._prefix = _Prefix.compute(self._model, prompt_ids)
            logits_BV = self._prefix.logits_1V.expand(self.rows, -1)
            cache = self._prefix.expanded(self.rows)
        while True:
            finished = [done for row, sample in samples.items() if (done := sample.take(logits_BV[row])) is not None]
            samples = {row: sample for row, sample in samples.items() if not sample.is_done}
            yield finished
            if not samples:
                return
            tokens = [samples[row].token_ids[-1] if row in samples else 0 for row in range(self.rows)]
            with torch.inference_mode():
                logits_BV = _step(self._model, torch.tensor(tokens, device=self._model.device)[:, None], cache)

    def _load(self) -> None:
        if self._model is not None:
            return
        self._tokenizer = load_tokenizer(self._path)
        model = load_model(self._path, device=self._device, dtype=self._dtype)
        if self._adapter is not None:
            model = merge_adapter(apply_adapter(model, self._adapter))
        self._model = model


@dataclass(slots=True)
class _Prefix:
    """A prompt's keys and values [1, heads, T, D] of each layer, and the logits after its last token."""

    prompt_ids: list[int]
    layers: list[tuple[Tensor, Tensor]]
    logits_1V: Tensor  # noqa: N815
    config: Any

    @classmethod
    def compute(cls, model: Any, prompt_ids: list[int]) -> _Prefix:
        import torch
        from transformers import DynamicCache

        cache = DynamicCache(config=model.config)
        logits_1V = _step(model, torch.tensor([prompt_ids], device=model.device), cache)
        return cls(prompt_ids, [(layer.keys, layer.values) for layer in cache.layers], logits_1V, model.config)

    def expanded(self, rows: int) -> Any:
        """A cache of `rows` rows that all begin with the prompt."""
        from transformers import DynamicCache

        pairs = ((keys.expand(rows, -1, -1, -1), values.expand(rows, -1, -1, -1)) for keys, values in self.layers)
        return DynamicCache(pairs, config=self.config)


def _step(model: Any, ids_BT: Tensor, cache: Any) -> Tensor:
    """Logits [B, V] after the last column of `ids_BT`, whose keys and values go into the cache."""
    return model(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits[:, -1]  # type: ignore[no-any-return]


class _Sample:
    """One request being answered."""

    def __init__(self, request: Request, tokenizer: Tokenizer, budget: int) -> None:
        self.request = request
        self.token_ids: list[int] = []
        self.is_done = False
        self._logprobs: list[float] = []
        self._limit = min(request.sampling.max_tokens, budget)
        self._eos_ids = tokenizer.eos_ids
        self._uniforms = Uniforms(request.seed)
        self._stops = StopFinder(tokenizer, request.sampling.stop)

    def take(self, logits_V: Tensor) -> Completion | None:
        """Draws the next token; the completion if that was the last."""
        if not bool(logits_V.isfinite().any()) or bool(logits_V.isnan().any()):
            self.is_done = True
            where = f"token {len(self.token_ids)} of the response"
            return Completion(self.request.key, error=f"the model's logits are not numbers at {where}")
        token, logprob = draw(logits_V, self.request.sampling, self._uniforms)
        self.token_ids.append(token)
        self._logprobs.append(logprob)
        stop = self._reason(token)
        if not stop:
            return None
        self.is_done = True
        return Completion(self.request.key, self.token_ids, self._logprobs, stop)

    def _reason(self, token: int) -> str:
        if token in self._eos_ids:
            return "eos"
        if self._stops.found(token):
            return "stop"
        return "length" if len(self.token_ids) >= self._limit else ""


def _free_device_memory() -> None:
    import gc
    import sys

    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available():
        torch.cuda.empty_cache()
