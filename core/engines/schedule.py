"""Which rows the next step computes: samples in flight, and prompts in chunks, whatever they belong to."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.core.engines.protocol import Completion, Request
from strop.core.engines.rows import CHUNK, Cache, Draws, PromptChunk, RowModel
from strop.core.engines.samples import Sample

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strop.core.engines.rows import Segment
    from strop.core.models.tokens import Tokenizer


@dataclass(slots=True)
class _Prompt:
    """A prompt that some sample waits for: how much of it is computed, and at the end the logits behind it."""

    token_ids: list[int]
    cache: Cache
    num_done: int = 0
    logits_V: NDArray[Any] | None = None  # noqa: N815
    starting: list[Sample] = field(default_factory=list)

    def next_chunk(self) -> PromptChunk:
        return PromptChunk(self.token_ids[self.num_done : self.num_done + CHUNK], self.num_done, self.cache)


@dataclass(slots=True)
class _Group:
    """Samples that began together behind one prompt; row i of the cache is that of samples[i]."""

    samples: list[Sample]
    cache: Cache
    length: int


class RowScheduler:
    """Continuous batching over a RowModel. Which samples share a step changes the speed, never a bit of a sample.

    At most `max_samples` samples are in flight, and as many as keep keys and values of about `max_tokens` tokens.
    """

    def __init__(
        self, model: RowModel, tokenizer: Tokenizer, *, context: int, max_samples: int, max_tokens: int
    ) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._context = context
        self._max_samples = max_samples
        self._max_tokens = max_tokens
        # In the order of arrival, requests with the same prompt together.
        self._waiting: dict[tuple[int, ...], deque[Request]] = {}
        self._prompts: dict[tuple[int, ...], _Prompt] = {}
        self._groups: list[_Group] = []

    def forget(self) -> None:
        """Nothing to let go of: keys and values live as long as the samples behind them, and none is under way."""

    def rest(self) -> None:
        """Gives the model its own attention back until the next step: somebody else uses it, too."""
        self._model.restore()

    def submit(self, request: Request) -> None:
        """Queues a request whose prompt leaves room in the context."""
        self._waiting.setdefault(tuple(request.prompt_ids), deque()).append(request)

    def cancel(self, key: Any) -> Completion | None:
        """Takes a request out, wherever it is; None where there is none of this key."""
        for requests in self._waiting.values():
            for request in requests:
                if request.key == key:
                    requests.remove(request)
                    return Completion(key, stop="cancelled")
        for prompt in self._prompts.values():
            for sample in prompt.starting:
                if sample.request.key == key:
                    prompt.starting.remove(sample)
                    return sample.cancelled()
        for group in self._groups:
            for row, sample in enumerate(group.samples):
                if sample.request.key == key:
                    self._drop(group, row)
                    self._groups = [one for one in self._groups if one.samples]
                    return sample.cancelled()
        return None

    def step(self) -> list[Completion]:
        """Computes one step; the completions that it finished. Does nothing if nothing is queued."""
        import torch

        self._admit()
        finished = self._begin_ready()
        segments, chunked, wanted = self._plan()
        if not segments:
            return finished
        with torch.inference_mode():
            logits_RV = self._model.step(segments, wanted).float().cpu().numpy()
        row = 0
        for group in self._groups:
            num = len(group.samples)
            group.length += 1
            finished += self._draw(group, logits_RV[row : row + num])
            row += num
        for prompt in chunked:
            prompt.num_done = min(len(prompt.token_ids), prompt.num_done + CHUNK)
            if prompt.num_done == len(prompt.token_ids):
                prompt.logits_V = logits_RV[row].copy()
                row += 1
        self._groups = [group for group in self._groups if group.samples]
        return finished + self._begin_ready()

    def _admit(self) -> None:
        """Moves requests from the queue to their prompts, oldest prompt first, as far as there is room."""
        for key in list(self._waiting):
            requests = self._waiting[key]
            while requests and self._has_room(requests[0]):
                request = requests.popleft()
                if key not in self._prompts:
                    self._prompts[key] = _Prompt(request.prompt_ids, Cache(1, len(key)))
                budget = self._context - len(key)
                self._prompts[key].starting.append(Sample(request, self._tokenizer, budget))
            if requests:
                return
            del self._waiting[key]

    def _has_room(self, request: Request) -> bool:
        in_flight = [sample for group in self._groups for sample in group.samples]
        in_flight += [sample for prompt in self._prompts.values() for sample in prompt.starting]
        if not in_flight:
            return True
        tokens = sum(len(sample.request.prompt_ids) + sample.limit for sample in in_flight)
        tokens += min(len(request.prompt_ids) + request.sampling.max_tokens, self._context)
        return len(in_flight) < self._max_samples and tokens <= self._max_tokens

    def _begin_ready(self) -> list[Completion]:
        """First tokens of the samples whose prompts are computed; prompts that nobody waits for are let go."""
        finished: list[Completion] = []
        for key, prompt in list(self._prompts.items()):
            if prompt.logits_V is None:
                continue
            samples, prompt.starting = prompt.starting, []
            alive = [sample for sample in samples if not self._take(sample, prompt.logits_V, finished)]
            if alive:
                cache = prompt.cache.expanded(len(alive), len(key))
                self._groups.append(_Group(alive, cache, len(key)))
            if key not in self._waiting:
                del self._prompts[key]
        return finished

    def _draw(self, group: _Group, logits_RV: NDArray[Any]) -> list[Completion]:
        finished: list[Completion] = []
        # From the last row down, so that what moves into a hole has been drawn already.
        for row in reversed(range(len(group.samples))):
            if self._take(group.samples[row], logits_RV[row], finished):
                self._drop(group, row)
        return finished[::-1]

    @staticmethod
    def _drop(group: _Group, row: int) -> None:
        group.cache.drop(row)
        group.samples[row] = group.samples[-1]
        group.samples.pop()

    @staticmethod
    def _take(sample: Sample, logits_V: NDArray[Any], finished: list[Completion]) -> bool:
        completion = sample.take(logits_V)
        if completion is None:
            return False
        finished.append(completion)
        return True

    def _plan(self) -> tuple[list[Segment], list[_Prompt], list[int]]:
        """The step's segments, the prompts among them, and the rows whose logits are wanted."""
        segments: list[Segment] = []
        for group in self._groups:
            group.cache.reserve(group.length + 1)
            segments.append(Draws([sample.token_ids[-1] for sample in group.samples], group.length, group.cache))
        num_rows = sum(len(group.samples) for group in self._groups)
        wanted = list(range(num_rows))
        chunked: list[_Prompt] = []
        for prompt in self._prompts.values():
            if prompt.logits_V is not None:
                continue
            chunk = prompt.next_chunk()
            if num_rows + len(chunk.token_ids) > self._model.max_rows:
                break
            segments.append(chunk)
            chunked.append(prompt)
            num_rows += len(chunk.token_ids)
            if chunk.start + len(chunk.token_ids) == len(prompt.token_ids):
                wanted.append(num_rows - 1)
        return segments, chunked, wanted
