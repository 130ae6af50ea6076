"""Any running server that takes token-id prompts and returns token ids (`vllm serve`), at one or more endpoints.

Requests run in one background thread (an asyncio loop); every request comes back exactly once, as a completion or as an
error. Needs httpx and nothing else. Seeds are sent along; what a server promises of them is its own affair (vLLM's is
given in core/engines/vllm.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import queue
import threading
import warnings
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

from strop.core.engines.endpoints import Endpoint, Pool, ServerLimits, base_url, is_loopback, shown
from strop.core.engines.lora import read_lora
from strop.core.engines.protocol import Completion, ModelInfo, Request
from strop.core.engines.served import API_KEY_VARIABLE, ServedModel
from strop.core.engines.values import check_for_vllm
from strop.core.engines.wire import Lasting, Passing
from strop.core.errors import Unavailable, UsageError
from strop.core.seeds import derive_seed

if TYPE_CHECKING:
    from strop.core.records import Sampling

log = logging.getLogger("strop.engines")
T = TypeVar("T")

# Samples in flight for each endpoint; vLLM puts what it cannot batch at once into its queue.
REQUESTS_PER_ENDPOINT = 128
# Where a server does not say how long its context is, it refuses what is too long.
UNKNOWN_CONTEXT = 1 << 30
FIRST_TRIES = 3
CLOSING_S = 5.0


class ServerEngine:
    """A model behind OpenAI-compatible endpoints (see core/engines/protocol.py for the methods).

    `names` are the names or paths the model may be served under; `adapter` is a LoRA folder that the servers can read,
    or the name of an adapter that they already serve. `scored_at_once` bounds the prompts that are scored together: 0
    is 128 an endpoint, or one with an adapter (vLLM's issue 16668: with adapters it takes a prompt's tokens for those
    of other requests, and on a CPU it ends). Raises Unavailable where no server can be used or one serves something
    else, UsageError for endpoints that are no URLs.
    """

    name = "server"

    def __init__(
        self, endpoints: tuple[str, ...], names: tuple[str, ...], eos_ids: frozenset[int], info: ModelInfo, *,
        adapter: Path | str | None = None, max_context: int | None = None, vocab_size: int = 0, scored_at_once: int = 0,
        limits: ServerLimits | None = None,
    ) -> None:  # fmt: skip
        self.info = info
        self.concurrency = REQUESTS_PER_ENDPOINT * max(1, len(endpoints))
        self._scored_at_once = scored_at_once or (self.concurrency if adapter is None else max(1, len(endpoints)))
        self._limits = limits or ServerLimits()
        self._served = ServedModel(
            names, info.model, eos_ids, adapter=read_lora(adapter) if isinstance(adapter, Path) else adapter,
            vocab_size=vocab_size, context_length=max_context or UNKNOWN_CONTEXT, limits=self._limits,
        )  # fmt: skip
        self._finished: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._pending = 0
        # Both are used in the loop's thread only.
        self._drawing: dict[Any, asyncio.Task[Completion]] = {}
        self._unwanted: set[Any] = set()
        urls = [base_url(endpoint) for endpoint in endpoints]
        if not urls:
            raise UsageError("the server engine needs at least one --endpoint")
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="server-engine", daemon=True)
        self._thread.start()
        try:
            self._pool: Pool = self._in_loop(self._connect(urls)).result()
            self._in_loop(self._open()).result()
            self.context_length = self._served.context_length
        except BaseException:
            self.close()
            raise

    def submit(self, request: Request) -> None:
        """Sends a request; one whose prompt leaves no room for a token ends with stop "length" and no tokens."""
        check_for_vllm(request.sampling)
        self._pending += 1
        if len(request.prompt_ids) >= self.context_length:
            self._finished.put(Completion(request.key, stop="length"))
            return
        self._in_loop(self._finish(request))

    def cancel(self, key: Any) -> None:
        """Drops a pending request; the server notices the closed connection. What it had drawn is not known."""
        self._loop.call_soon_threadsafe(self._cancel, key)

    def collect(self, patience_s: float | None = None) -> list[Completion]:
        """Waits until a request has come back."""
        if not self._pending:
            return []
        try:
            done = [self._finished.get(timeout=patience_s)]
        except queue.Empty:
            return []
        with contextlib.suppress(queue.Empty):
            while True:
                done.append(self._finished.get_nowait())
        self._pending -= len(done)
        return done

    @property
    def pending(self) -> int:
        """Requests submitted and not yet collected."""
        return self._pending

    def logprobs_mode(self, sampling: Sampling) -> str:
        """What the server was seen to return: a setting of the server (vLLM: --logprobs-mode).

        A server that returns "raw" values gives the "scaled" ones at temperature 1, whatever is cut off; one that
        returns "processed" values gives them wherever nothing is cut off.
        """
        if sampling.temperature == 0:
            return "raw"
        if self._served.mode == "raw":
            return "scaled" if sampling.temperature == 1 else "raw"
        return "processed" if sampling.top_p < 1 or sampling.top_k > 0 else "scaled"

    def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Log-probabilities (nats, temperature 1, whole vocabulary) of each prompt's tokens but its first.

        A prompt leaves room for one token in the context. Raises Unavailable where no server gives them.
        """
        try:
            found: list[list[float]] = self._in_loop(self._score(prompts)).result()
        except Lasting as failure:
            raise Unavailable(f"scoring failed: {failure}") from None
        return found

    @property
    def fingerprint(self) -> str:
        """Stands for what the first endpoint that could be used computes of a fixed text; weights do not tell here."""
        return next((endpoint.fingerprint for endpoint in self._pool.endpoints if endpoint.fingerprint), "")

    def close(self) -> None:
        """Drops what is still under way. The servers go on; an adapter that was loaded stays with them."""
        if not self._thread.is_alive():
            return
        closing = self._in_loop(self._shut())
        with contextlib.suppress(TimeoutError):
            closing.result(CLOSING_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)
        if not self._thread.is_alive():
            self._loop.close()
        if self._pending:
            # A connection that was cancelled while being made leaves a coroutine, of which Python would complain.
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", RuntimeWarning)
                gc.collect()
        self._pending = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def _in_loop(self, work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _connect(self, urls: list[str]) -> Pool:
        """Clients for the endpoints; nothing is sent yet."""
        import httpx

        # They would report each request, with its URL, wherever logging is switched on.
        for name in ("httpx", "httpcore"):
            logging.getLogger(name).setLevel(logging.WARNING)
        key = os.environ.get(API_KEY_VARIABLE)
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=REQUESTS_PER_ENDPOINT)
        timeout = httpx.Timeout(self._limits.read_s, connect=self._limits.connect_s)
        return Pool(
            [
                Endpoint(
                    url,
                    httpx.AsyncClient(
                        base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=not is_loopback(url)
                    ),
                )
                for url in urls
            ]
        )

    async def _open(self) -> None:
        """Checks every endpoint. One that is down is left for later if another is up; a wrong one is not accepted."""
        results = await asyncio.gather(*(self._first_check(endpoint) for endpoint in self._pool.endpoints))
        wrong = [reason for reason in results if reason]
        if wrong:
            raise Unavailable(wrong[0])
        if not any(endpoint.ready for endpoint in self._pool.endpoints):
            raise Unavailable(f"no server can be used: {self._pool.reasons()}")

    async def _first_check(self, endpoint: Endpoint) -> str:
        for attempt in range(1, FIRST_TRIES + 1):
            try:
                await self._served.check(endpoint)
                return ""
            except Lasting as error:
                return f"{shown(endpoint.url)}: {error}"
            except Passing:
                if attempt < FIRST_TRIES:
                    await asyncio.sleep(self._limits.pause(attempt))
        return ""

    async def _finish(self, request: Request) -> None:
        key = request.key
        task = self._drawing[key] = self._loop.create_task(self._draw(request))
        if key in self._unwanted:
            # It was cancelled before this began.
            task.cancel()
        try:
            done = await task
        except asyncio.CancelledError:
            done = Completion(key, stop="cancelled")
        except Exception as error:  # noqa: BLE001 (a request must come back whatever happens)
            done = Completion(key, error=f"{type(error).__name__}: {error}")
        del self._drawing[key]
        self._unwanted.discard(key)
        self._finished.put(done)

    def _cancel(self, key: Any) -> None:
        task = self._drawing.get(key)
        if task is None:
            self._unwanted.add(key)
        else:
            task.cancel()

    async def _score(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        room = asyncio.Semaphore(self._scored_at_once)

        async def score(index: int, token_ids: list[int]) -> list[float]:
            async with room:
                return await self._try(lambda endpoint: self._served.score(endpoint, token_ids), seed=index)

        return list(await asyncio.gather(*(score(index, token_ids) for index, token_ids in enumerate(prompts))))

    async def _draw(self, request: Request) -> Completion:
        try:
            return await self._try(lambda endpoint: self._served.draw(endpoint, request), request.seed)
        except Lasting as failure:
            return Completion(request.key, error=str(failure))

    async def _try(self, ask: Callable[[Endpoint], Awaitable[T]], seed: int) -> T:
        """Asks until there is an answer. Raises Lasting for a failure that lasts, and where no try is left."""
        endpoint: Endpoint | None = None
        failure = ""
        for attempt in range(1, self._limits.attempts + 1):
            endpoint = await self._take(avoid=endpoint)
            if endpoint is None:
                raise Lasting(f"no server could be used for {self._limits.patience_s:g} s: {self._pool.reasons()}")
            try:
                return await ask(endpoint)
            except Lasting as error:
                raise Lasting(f"{shown(endpoint.url)}: {error}") from None
            except Passing as error:
                failure = f"{shown(endpoint.url)}: {error}"
                if not error.of_endpoint and attempt < self._limits.attempts:
                    await asyncio.sleep(max(error.pause_s, self._pause(seed, attempt)))
            finally:
                endpoint.in_flight -= 1
        raise Lasting(f"{failure} (tried {self._limits.attempts} times)")

    def _pause(self, seed: int, attempt: int) -> float:
        """Doubles with each try; between half and all of it, by the request's seed, so that requests spread out."""
        share = derive_seed(seed, "pause", attempt) / 2**53
        return self._limits.pause(attempt) * (0.5 + share / 2)

    async def _take(self, avoid: Endpoint | None) -> Endpoint | None:
        """An endpoint that is ready, counted as busier by one; None when patience is at its end."""
        while True:
            for rested in self._pool.rested():
                rested.checking = self._loop.create_task(self._look(rested))
            endpoint = self._pool.choose(avoid)
            if endpoint is not None:
                endpoint.in_flight += 1
                return endpoint
            left = self._limits.patience_s - self._pool.seconds_down()
            if left <= 0:
                return None
            if checks := self._pool.checks():
                await asyncio.wait(checks, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(min(self._pool.seconds_to_next(), left) + 0.01)

    async def _look(self, endpoint: Endpoint) -> None:
        """Sees whether an endpoint that was set aside is back; other requests go on meanwhile."""
        try:
            await self._served.check(endpoint)
            log.warning("%s is back", shown(endpoint.url))
        except Lasting as error:
            endpoint.excluded = str(error)
            log.warning("%s is not used any more: it %s", shown(endpoint.url), error)
        except Passing:
            pass
        finally:
            endpoint.checking = None

    async def _shut(self) -> None:
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if hasattr(self, "_pool"):
            await asyncio.gather(*(endpoint.client.aclose() for endpoint in self._pool.endpoints))
