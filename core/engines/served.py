"""What our model is called at a server, and talking to it: checks, probes, one completion."""

from __future__ import annotations

import asyncio
import time
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from strop.core.engines.lora import Lora
from strop.core.engines.protocol import Completion, Request
from strop.core.engines.wire import (
    Answer,
    Card,
    Cards,
    Lasting,
    Passing,
    completion,
    message_of,
    payload,
    prompt_logprobs,
    read,
    scoring_payload,
)
from strop.core.records import Sampling

if TYPE_CHECKING:
    import httpx

    from strop.core.engines.endpoints import Endpoint, ServerLimits

# OPENAI_API_KEY is not read: an endpoint is whatever host the user names, and most shells hold that key.
API_KEY_VARIABLE = "STROP_API_KEY"
# Small ids exist in every vocabulary.
PROBE_IDS = list(range(10, 26))
PROBE_TOKENS = 8
# Nats by which the likeliest token may differ from one server to another: precision and hardware, but not the weights.
PROBE_TOLERANCE = 0.25
PASSING_STATUS = {408, 425, 429, 500}
DOWN_STATUS = {502, 503, 504}
LONGEST_ASKED_PAUSE_S = 60.0


class ServedModel:
    """Our model (and adapter) as servers serve it.

    `names` are the names or paths it may be served under and `label` what messages call it; `adapter` is a LoRA folder
    to load, or the name of an adapter that is served already. `mode`, the kind of log-probabilities that come back
    ("raw" or "processed"), is known after the first check, and every other endpoint must agree.
    """

    def __init__(
        self, names: tuple[str, ...], label: str, eos_ids: frozenset[int], *, adapter: Lora | str | None,
        vocab_size: int, context_length: int, limits: ServerLimits,
    ) -> None:  # fmt: skip
        self.mode = ""
        self.context_length = context_length
        self._names = names
        self._label = label
        self._eos_ids = eos_ids
        self._vocab_size = vocab_size
        self._limits = limits
        self._likeliest: float | None = None
        self._lora = adapter if isinstance(adapter, Lora) else None
        self._adapter = f"strop-{adapter.digest}" if isinstance(adapter, Lora) else adapter

    async def draw(self, endpoint: Endpoint, request: Request) -> Completion:
        """One try at one request. Raises Passing or Lasting."""
        return await self._complete(endpoint, request, endpoint.model, sorted(self._eos_ids))

    async def score(self, endpoint: Endpoint, token_ids: list[int]) -> list[float]:
        """One try to have all tokens but the first scored (nats). Raises Passing or Lasting."""
        body = scoring_payload(token_ids, endpoint.model)
        return prompt_logprobs(token_ids, await self._post(endpoint, "/v1/completions", body, Answer))

    async def check(self, endpoint: Endpoint) -> None:
        """Makes sure that the endpoint serves our model, and the adapter, token for token.

        Raises Passing (and sets the endpoint aside) if it cannot be used now, Lasting if it is the wrong one.
        """
        cards = (await self._get(endpoint, "/v1/models", Cards)).data
        base = self._find_base(cards)
        model = base.id if self._adapter is None else await self._adapter_card(endpoint, cards, base)
        if base.max_model_len is not None:
            self.context_length = min(self.context_length, base.max_model_len)
        greedy = await self._probe(endpoint, model, Sampling(temperature=0.0, max_tokens=PROBE_TOKENS))
        if self._lora is not None and self._lora.changes_base:
            plain = await self._probe(endpoint, base.id, Sampling(temperature=0.0, max_tokens=PROBE_TOKENS))
            if (greedy.token_ids, greedy.logprobs) == (plain.token_ids, plain.logprobs):
                raise Lasting(f"serves the adapter {model}, but computes what its base {base.id} computes")
        if self._likeliest is None:
            self._likeliest = greedy.logprobs[0]
        if abs(self._likeliest - greedy.logprobs[0]) > PROBE_TOLERANCE:
            raise Lasting(f"serves {model}, but computes something else than was seen before under this name")
        # Of one survivor the processed log-probability is 0, and the raw one what it was.
        sole = await self._probe(endpoint, model, Sampling(temperature=1.0, top_k=1, max_tokens=1))
        mode = "processed" if sole.logprobs[0] > -1e-6 else "raw"
        if self.mode not in ("", mode):
            raise Lasting(f"returns {mode} log-probabilities, and another endpoint {self.mode} ones")
        self.mode = mode
        endpoint.model, endpoint.ready, endpoint.fingerprint = model, True, _fingerprint(greedy)
        endpoint.succeeded()

    async def _probe(self, endpoint: Endpoint, model: str, sampling: Sampling) -> Completion:
        # No end tokens are named, so that every probe has its full length.
        return await self._complete(endpoint, Request("probe", PROBE_IDS, sampling, seed=0), model, [])

    async def _complete(self, endpoint: Endpoint, request: Request, model: str, stops: list[int]) -> Completion:
        body = payload(request, model, stops, self.context_length)
        answer = await self._post(endpoint, "/v1/completions", body, Answer)
        return completion(request, answer, self._eos_ids, self._vocab_size)

    def _find_base(self, cards: list[Card]) -> Card:
        bases = [card for card in cards if card.parent is None]
        wanted = set(self._names)
        tails = {Path(name).name for name in wanted}
        for card in bases:
            if {card.id, card.root} & wanted:
                return card
        for card in bases:
            if {Path(name).name for name in (card.id, card.root) if name} & tails:
                return card
        served = ", ".join(card.id for card in bases) or "nothing"
        raise Lasting(f"serves {served}, not {self._label} (vllm serve: --served-model-name gives it another name)")

    async def _adapter_card(self, endpoint: Endpoint, cards: list[Card], base: Card) -> str:
        """The name under which the adapter is served, after loading it where that is needed."""
        name = str(self._adapter)
        card = next((card for card in cards if card.id == name), None)
        if card is None and self._lora is not None:
            body = {"lora_name": name, "lora_path": str(self._lora.folder.resolve())}
            refusal = ""
            try:
                await self._post(endpoint, "/v1/load_lora_adapter", body, None)
            except (Lasting, Passing) as error:
                if isinstance(error, Passing) and error.of_endpoint:
                    raise
                refusal = str(error)
            # Asked again even so: another process may just have loaded the same adapter.
            cards = (await self._get(endpoint, "/v1/models", Cards)).data
            card = next((card for card in cards if card.id == name), None)
            if card is None:
                raise Lasting(
                    f"cannot load the adapter {self._lora.folder}: {refusal or 'no reason was given'}; vllm serve "
                    f"needs --enable-lora, --max-lora-rank {self._lora.rank} or more, this folder, and "
                    "VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
        if card is None:
            raise Lasting(f"does not serve the adapter {name}")
        if card.parent not in (None, base.id, base.root):
            raise Lasting(f"serves the adapter {name} on {card.parent}, not on {base.id}")
        return name

    async def _get(self, endpoint: Endpoint, path: str, kind: type[Any]) -> Any:
        return await self._ask(endpoint, "GET", path, None, kind, self._limits.check_s)

    async def _post(self, endpoint: Endpoint, path: str, body: dict[str, Any], kind: type[Any] | None) -> Any:
        return await self._ask(endpoint, "POST", path, body, kind, self._limits.read_s)

    async def _ask(
        self, endpoint: Endpoint, method: str, path: str, body: Any, kind: type[Any] | None, read_s: float
    ) -> Any:
        """One exchange. Raises Passing or Lasting; what it says of the endpoint is noted there."""
        import httpx

        started = time.monotonic()
        try:
            async with asyncio.timeout(self._limits.total_s):
                timeout = httpx.Timeout(read_s, connect=self._limits.connect_s)
                answer = await endpoint.client.request(method, path, json=body, timeout=timeout)
            _raise_for(answer)
            found = None if kind is None else read(answer.content, kind)
        except (httpx.TransportError, TimeoutError) as error:
            passing = Passing(_transport_failure(error, self._limits), of_endpoint=True)
            endpoint.failed(str(passing), started, self._limits, down=True)
            raise passing from None
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise Lasting(str(error) or type(error).__name__) from None
        except Passing as error:
            endpoint.failed(str(error), started, self._limits, down=error.of_endpoint)
            if error.forgotten:
                endpoint.ready = False
            raise
        endpoint.succeeded()
        return found


def _fingerprint(greedy: Completion) -> str:
    """12 hex digits that change with what a probe brought, but not with the last digits of a busy server's values."""
    seen = [greedy.token_ids, [f"{value:.2f}" for value in greedy.logprobs]]
    return blake2b(repr(seen).encode(), digest_size=6).hexdigest()


def _raise_for(answer: httpx.Response) -> None:
    """Raises for an answer that is not a success."""
    status = answer.status_code
    if answer.is_success:
        return
    said = f"HTTP {status}: {message_of(answer.content)}"
    if status in PASSING_STATUS | DOWN_STATUS:
        asked = answer.headers.get("retry-after", "")
        pause_s = min(float(asked), LONGEST_ASKED_PAUSE_S) if asked.isdigit() else 0.0
        raise Passing(said, of_endpoint=status in DOWN_STATUS, pause_s=pause_s)
    if status == 404:
        raise Passing(said, forgotten=True)
    if status in (401, 403):
        raise Lasting(f"{said} (the key is taken from {API_KEY_VARIABLE})")
    raise Lasting(said)


def _transport_failure(error: Exception, limits: ServerLimits) -> str:
    import httpx

    if isinstance(error, httpx.ConnectTimeout):
        return f"no connection within {limits.connect_s:g} s"
    if isinstance(error, httpx.TimeoutException | TimeoutError):
        return "no answer in time"
    return f"{type(error).__name__}: {error}".rstrip(": ")
