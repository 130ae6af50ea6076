"""Samples in blocks of fixed rows: for models that core/engines/rows.py cannot compute.

The requests with one prompt form a group. Its prompt is computed once, as a batch of one, and its keys and values are
expanded to a block of a fixed number of rows; a sample sits in the row that its own index names. Rows that are absent
or finished are computed along, so every product has the same shape whoever else is there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from strop.core.engines.protocol import Completion, Request
from strop.core.engines.samples import Sample
from strop.core.errors import Unavailable

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from strop.core.models.routing import RoutingRecorder
    from strop.core.models.tokens import Tokenizer

ROWS = 8


class BlockScheduler:
    """One block after another, in the order of arrival. `rows` is 1 where a row's neighbours would change its bits.

    With a `recorder`, which needs that, completions hold the routing of the tokens that were fed.
    """

    def __init__(
        self, model: Any, tokenizer: Tokenizer, *, context: int, rows: int = ROWS,
        recorder: RoutingRecorder | None = None,
    ) -> None:  # fmt: skip
        if recorder is not None and rows != 1:
            raise ValueError(f"routing is recorded of one row at a time, not of {rows}")
        self._model = model
        self._tokenizer = tokenizer
        self._context = context
        self._rows = rows
        self._recorder = recorder
        self._queue: deque[Request] = deque()
        self._active: Iterator[list[Completion]] | None = None
        self._prompt: tuple[list[int], Any, Tensor, NDArray[Any] | None] | None = None
        self._unwanted: set[Any] = set()
        self._check_cache()

    def _check_cache(self) -> None:
        """Raises Unavailable for a model that keeps its history elsewhere: it would answer each token by itself."""
        import torch

        from strop.core.engines.invariance import TOLERANCE

        ids = [(7 * i + 11) % self._model.get_input_embeddings().weight.shape[0] for i in range(6)]
        kind, dtype = self._model.config.model_type, str(self._model.dtype).removeprefix("torch.")
        try:
            plain = torch.log_softmax(self._forward([ids], None)[0].float(), -1)
            cache, _, _ = self._prompt_of(ids[:-1])
            ours = torch.log_softmax(self._forward([ids[-1:]] * self._rows, cache)[-1].float(), -1)
        except (ValueError, TypeError, AttributeError, KeyError, IndexError, RuntimeError) as error:
            raise Unavailable(f"{kind}: this engine cannot run it ({error}); --engine vllm may") from None
        self._prompt = None
        self._take_routing()
        best = plain.argmax()
        gap = abs(float(ours[best] - plain[best]))
        # Not a number: a broken model, which is said where it is sampled.
        if gap > TOLERANCE[dtype]:
            raise Unavailable(f"{kind}: token by token it differs by {gap:.2g} nats from its own forward")

    def forget(self) -> None:
        """Lets go of the last prompt's keys and values; nothing may be under way."""
        self._prompt = None

    def rest(self) -> None:
        """Nothing to give back: the model is used as it is."""

    def submit(self, request: Request) -> None:
        """Queues a request whose prompt leaves room in the context."""
        self._queue.append(request)

    def cancel(self, key: Any) -> Completion | None:
        """Takes a request out; None where there is none of this key, or it comes back in the next step."""
        for request in self._queue:
            if request.key == key:
                self._queue.remove(request)
                return Completion(key, stop="cancelled")
        self._unwanted.add(key)
        return None

    def step(self) -> list[Completion]:
        """Computes one step of the block under way; the completions that it finished."""
        if self._active is None:
            if not self._queue:
                return []
            self._active = self._run(self._next_block())
        finished = next(self._active, None)
        if finished is None:
            self._active = None
        return finished or []

    def _next_block(self) -> dict[int, Request]:
        """The oldest request, and those queued that sit in its block, no two in one row."""
        first = self._queue[0]
        taken: dict[int, Request] = {}
        rest: deque[Request] = deque()
        for request in self._queue:
            same = request.row // self._rows == first.row // self._rows and request.prompt_ids == first.prompt_ids
            if same and request.row % self._rows not in taken:
                taken[request.row % self._rows] = request
            else:
                rest.append(request)
        self._queue = rest
        return taken

    def _run(self, requests: dict[int, Request]) -> Iterator[list[Completion]]:
        """Yields, after every step, the completions that finished in it."""
        prompt_ids = next(iter(requests.values())).prompt_ids
        budget = self._context - len(prompt_ids)
        samples = {row: Sample(request, self._tokenizer, budget) for row, request in requests.items()}
        cache, logits_BV, routing = self._prompt_of(prompt_ids)
        routings = [routing]
        while True:
            rows_BV = logits_BV.float().cpu().numpy()
            finished = {row: done for row in samples if (done := self._take(samples[row], rows_BV[row])) is not None}
            for done in finished.values():
                # A cancelled sample's last token has been routed already.
                done.routing = _joined(routings, len(prompt_ids) + len(done.token_ids) - 1)
            samples = {row: sample for row, sample in samples.items() if row not in finished}
            yield list(finished.values())
            if not samples:
                return
            tokens = [samples[row].token_ids[-1] if row in samples else 0 for row in range(self._rows)]
            logits_BV = self._forward([[token] for token in tokens], cache)
            routings.append(self._take_routing())

    def _take(self, sample: Sample, logits_V: NDArray[Any]) -> Completion | None:
        if sample.request.key in self._unwanted:
            self._unwanted.remove(sample.request.key)
            return sample.cancelled()
        return sample.take(logits_V)

    def _take_routing(self) -> NDArray[Any] | None:
        return None if self._recorder is None else self._recorder.take()

    def _prompt_of(self, prompt_ids: list[int]) -> tuple[Any, Tensor, NDArray[Any] | None]:
        """A cache of all rows behind the prompt, its logits [B, V] and its routing; kept for the next block."""
        import copy

        from transformers import DynamicCache

        if self._prompt is None or self._prompt[0] != prompt_ids:
            self._prompt = None
            base = self._model.get_base_model() if hasattr(self._model, "get_base_model") else self._model
            cache = DynamicCache(config=base.config)
            logits_1V = self._forward([prompt_ids], cache)
            self._prompt = prompt_ids, cache, logits_1V, self._take_routing()
        _, cache, logits_1V, routing = self._prompt
        expanded = copy.deepcopy(cache)
        expanded.batch_repeat_interleave(self._rows)
        return expanded, logits_1V.expand(self._rows, -1), routing

    def _forward(self, ids_BT: list[list[int]], cache: Any) -> Tensor:
        """Logits [B, V] after the last column, whose keys and values go into the cache."""
        import torch

        with torch.inference_mode():
            ids = torch.tensor(ids_BT, device=self._model.device)
            past = {} if cache is None else {"past_key_values": cache}
            output = self._model(input_ids=ids, use_cache=cache is not None, logits_to_keep=1, **past)
        return output.logits[:, -1]  # type: ignore[no-any-return]


def _joined(routings: list[NDArray[Any] | None], number: int) -> NDArray[Any] | None:
    import numpy as np

    known = [rows for rows in routings if rows is not None]
    return np.concatenate(known)[:number] if known else None
