"""The embedded engine: transformers' forward, our own sampler, and samples that do not depend on their batch mates.

The same seed, prompt, model and machine give a sample the same tokens and log-probabilities to the last bit, whatever
its neighbours, the order of arrival, the number of requests in flight, or what an earlier run did. core/engines/rows.py
says how; models that it cannot compute run in core/engines/blocks.py, which is slower and promises the same.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Any, Self

from strop.core.engines.open import EngineOptions, resolve_policy
from strop.core.engines.protocol import Completion, ModelInfo, Request
from strop.core.engines.sampler import check_sampling, logprobs_mode
from strop.core.errors import Unavailable
from strop.core.models.adapters import apply_adapter, merge_adapter, model_info
from strop.core.models.load import ModelPath, context_length, load_model, load_tokenizer
from strop.core.models.memory import available_bytes, free_memory, log

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from strop.core.engines.blocks import BlockScheduler
    from strop.core.engines.schedule import RowScheduler
    from strop.core.records import Sampling

# Samples in flight: on two cores more bring nothing, a GPU wants more.
SAMPLES_CPU, SAMPLES_CUDA = 64, 256
# The part of the free memory that keys and values may take.
CACHE_SHARE = 0.4


class TransformersEngine:
    """Generates with a transformers model in this process (see core/engines/protocol.py for the methods).

    The weights are loaded when the first request is worked on. `batch_rows` is the most samples in flight (0: 64 on a
    CPU, 256 on a GPU). A prompt as long as the context, or longer, ends at once with stop "length" and no tokens. With
    `record_routing` completions of a mixture of experts say which experts were used. `load` gives a model that somebody
    else has in memory, peft-wrapped or not, in the place of the weights in the folder.
    """

    name = "transformers"

    def __init__(
        self, model: ModelPath, info: ModelInfo, *, adapter: Path | None = None, device: str = "auto",
        dtype: str = "auto", max_context: int | None = None, batch_rows: int = 0, record_routing: bool = False,
        load: Callable[[], Any] | None = None,
    ) -> None:  # fmt: skip
        from strop.core.models.load import choose_device

        self.info = info
        self.context_length = context_length(model, max_context)
        self._device = choose_device(device)
        self._max_samples = batch_rows or (SAMPLES_CUDA if self._device.startswith("cuda") else SAMPLES_CPU)
        # A few more, so that the next prompts are computed while the last samples of the batch end.
        self.concurrency = self._max_samples + self._max_samples // 4
        self._path, self._adapter, self._dtype = model, adapter, dtype
        self._record_routing = record_routing
        self._is_shared = load is not None
        self._load_weights = load or self._load_model
        self._scheduler: RowScheduler | BlockScheduler | None = None
        self._finished: list[Completion] = []
        self._pending = 0

    @classmethod
    def open(cls, options: EngineOptions, load: Callable[[], Any] | None = None) -> TransformersEngine:
        """The engine the options describe, `load` as for the class.

        Raises Unavailable, UsageError or DataError as models and adapters do.
        """
        model, adapter = resolve_policy(options)
        return cls(
            model, model_info(model, adapter, options.adapter), adapter=adapter, device=options.device,
            dtype=options.dtype, max_context=options.max_context, batch_rows=options.batch_rows,
            record_routing=options.record_routing, load=load,
        )  # fmt: skip

    def renew(self) -> None:
        """Forgets what was computed with the weights as they were: a model that is in training has changed.

        Nothing may be pending.
        """
        if self._scheduler is not None:
            self._scheduler.forget()

    def submit(self, request: Request) -> None:
        """Queues a request. Raises UsageError for numbers that mean nothing, Unavailable for a bad model."""
        check_sampling(request.sampling)
        self._pending += 1
        if len(request.prompt_ids) >= self.context_length:
            self._finished.append(Completion(request.key, stop="length"))
            return
        if self._scheduler is None:
            self._scheduler = self._load()
        self._scheduler.submit(request)

    def cancel(self, key: Any) -> None:
        """Ends a pending request; what it drew comes back."""
        done = None if self._scheduler is None else self._scheduler.cancel(key)
        if done is not None:
            self._finished.append(done)

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        return self._pending

    def logprobs_mode(self, sampling: Sampling) -> str:
        """ "scaled", or "raw" for greedy decoding."""
        return logprobs_mode(sampling)

    def collect(self, patience_s: float | None = None) -> list[Completion]:
        """Computes steps until a sample has finished. Raises Unavailable when memory runs out."""
        done, self._finished = self._finished, []
        end = math.inf if patience_s is None else time.monotonic() + patience_s
        try:
            while not done and self._pending and self._scheduler is not None:
                done = self._scheduler.step()
                if time.monotonic() > end:
                    break
        except (MemoryError, RuntimeError) as error:
            if "out of memory" not in str(error).lower() and not isinstance(error, MemoryError):
                raise
            raise Unavailable("out of memory while generating; a lower --max-context or --concurrency helps") from None
        self._pending -= len(done)
        if self._is_shared and not self._pending and self._scheduler is not None:
            self._scheduler.rest()
        return done

    def close(self) -> None:
        """Lets go of the model and of what was queued."""
        self._scheduler = None
        self._finished.clear()
        self._pending = 0
        free_memory()

    def __enter__(self) -> Self:
        """The engine itself; nothing is loaded yet."""
        return self

    def __exit__(self, *failure: Any) -> None:
        """Closes."""
        self.close()

    def _load_model(self) -> Any:
        model = load_model(self._path, device=self._device, dtype=self._dtype)
        return model if self._adapter is None else merge_adapter(apply_adapter(model, self._adapter))

    def _load(self) -> RowScheduler | BlockScheduler:
        from strop.core.engines.blocks import ROWS, BlockScheduler
        from strop.core.engines.invariance import open_row_model
        from strop.core.engines.rows import CHUNK
        from strop.core.engines.schedule import RowScheduler
        from strop.core.models.routing import RoutingRecorder, is_mixture

        tokenizer = load_tokenizer(self._path)
        model = self._load_weights()
        try:
            rows = open_row_model(model, self._max_samples + CHUNK)
        except Unavailable as reason:
            log.info("samples are computed in blocks: %s", reason)
            num_rows = 1 if is_mixture(model) else ROWS
            recorder = RoutingRecorder(model) if self._record_routing else None
            return BlockScheduler(model, tokenizer, context=self.context_length, rows=num_rows, recorder=recorder)
        return RowScheduler(
            rows, tokenizer, context=self.context_length, max_samples=self._max_samples,
            max_tokens=_cache_tokens(model, self._device),
        )  # fmt: skip


def _cache_tokens(model: Any, device: str) -> int:
    """How many tokens' keys and values fit into the memory that is free now."""
    import torch

    if device.startswith("cuda"):
        free = torch.cuda.mem_get_info()[0]
    else:
        free = available_bytes() or 1 << 32
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    each = 2 * config.num_hidden_layers * heads * size * next(model.parameters()).element_size()
    return int(free * CACHE_SHARE) // int(each)
