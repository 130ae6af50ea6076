"""The words of the completions protocol that we speak: token ids out, token ids and log-probabilities back.

OpenAI's /v1/completions with the additions of vLLM's server: `return_token_ids` (answers with `token_ids` and
`prompt_token_ids`), `stop_token_ids`, `ignore_eos`, `top_k`, `/v1/load_lora_adapter`.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

from strop.core.engines.protocol import Completion, Request
from strop.core.engines.values import find_fault, rounded

# As much of a server's own message as a line can hold.
MESSAGE_LENGTH = 300


class Passing(Exception):  # noqa: N818 (the name says what kind of failure it is)
    """A failure that another try, here or elsewhere, may not meet.

    `of_endpoint`: the endpoint cannot be used now, by anybody. `forgotten`: it answers, but no longer knows our model.
    `pause_s`: how long it asks us to wait.
    """

    def __init__(
        self, message: str, *, of_endpoint: bool = False, forgotten: bool = False, pause_s: float = 0.0
    ) -> None:
        super().__init__(message)
        self.of_endpoint = of_endpoint
        self.forgotten = forgotten
        self.pause_s = pause_s


class Lasting(Exception):  # noqa: N818
    """A failure that the same request will meet again."""


class Card(Struct):
    """One entry of /v1/models: `root` is the path or hub id served as `id`; an adapter names its base as `parent`."""

    id: str
    root: str | None = None
    parent: str | None = None
    max_model_len: int | None = None


class Cards(Struct):
    """The answer of /v1/models."""

    data: list[Card]


class _Logprobs(Struct):
    token_logprobs: list[float | None] | None = None
    tokens: list[str] | None = None


class _TokenLogprob(Struct):
    logprob: float


class _Choice(Struct):
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_logprobs: list[dict[int, _TokenLogprob] | None] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Answer(Struct):
    """The answer of /v1/completions."""

    choices: list[_Choice]


def payload(request: Request, model: str, eos_ids: list[int], context_length: int) -> dict[str, Any]:
    """The body of a completions request. Everything is said, since a server's defaults come from where it likes.

    (vLLM's come from the model's own generation config: a penalty there would change the distribution unseen.)
    """
    sampling = request.sampling
    return {
        "model": model, "prompt": request.prompt_ids, "seed": request.seed, "n": 1, "stream": False,
        "max_tokens": max(1, min(sampling.max_tokens, context_length - len(request.prompt_ids))),
        "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1, "min_p": 0.0,
        "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": sampling.stop, "stop_token_ids": eos_ids, "ignore_eos": True, "add_special_tokens": False,
        "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
    }  # fmt: skip


def scoring_payload(token_ids: list[int], model: str) -> dict[str, Any]:
    """The body of a completions request that asks for the log-probabilities of its own prompt.

    They are the model's at temperature 1; how the one token is sampled that must be asked for does not touch them.
    """
    return {
        "model": model, "prompt": token_ids, "n": 1, "stream": False, "max_tokens": 1, "temperature": 0.0,
        "ignore_eos": True, "add_special_tokens": False, "prompt_logprobs": 0, "return_token_ids": True,
    }  # fmt: skip


def read(body: bytes, kind: type[Any]) -> Any:
    """A decoded answer. Raises Passing for one that is cut short, Lasting for one that means something else."""
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise Lasting(f"the answer is not what was asked for: {error}") from None
    except msgspec.DecodeError as error:
        for word in (b"NaN", b"Infinity"):
            if word in body:
                raise Lasting(f"the answer holds {word.decode()}, which is no log-probability") from None
        raise Passing(f"the answer is not JSON or was cut short: {error}") from None


def prompt_logprobs(token_ids: list[int], answer: Answer) -> list[float]:
    """The log-probabilities (nats) of a prompt's tokens but its first. Raises Lasting where anything does not fit."""
    if len(answer.choices) != 1:
        raise Lasting(f"{len(answer.choices)} choices for one prompt")
    choice = answer.choices[0]
    if choice.prompt_logprobs is None:
        raise Lasting("the answer has no prompt_logprobs: the server cannot score given tokens (vLLM's can)")
    if choice.prompt_token_ids != token_ids or len(choice.prompt_logprobs) != len(token_ids):
        raise Lasting("the server scored another prompt than the one that was sent")
    values = []
    for token, table in zip(token_ids[1:], choice.prompt_logprobs[1:], strict=True):
        if table is None or token not in table:
            raise Lasting("a token of the prompt came back without its log-probability")
        values.append(table[token].logprob)
    return values


def completion(request: Request, answer: Answer, eos_ids: frozenset[int], vocab_size: int) -> Completion:
    """The completion in an answer. Raises Lasting where anything in it does not fit."""
    if len(answer.choices) != 1:
        raise Lasting(f"{len(answer.choices)} choices for one prompt")
    choice = answer.choices[0]
    if choice.token_ids is None or choice.prompt_token_ids is None:
        raise Lasting("the answer has no token_ids: the server must take return_token_ids (vLLM does)")
    if choice.prompt_token_ids != request.prompt_ids:
        raise Lasting("the server's prompt is not the one that was sent (another tokenizer, or a start token added)")
    ids = choice.token_ids
    values = choice.logprobs.token_logprobs if choice.logprobs is not None else None
    fault = find_fault(ids, values, vocab_size)
    if fault is not None:
        raise Lasting(fault)
    named = choice.logprobs.tokens if choice.logprobs is not None else None
    if named and named[0].startswith("token_id:") and [int(name[len("token_id:") :]) for name in named] != ids:
        raise Lasting("the log-probabilities are of other tokens than the sampled ones")
    logprobs = rounded([value for value in values or [] if value is not None])
    return Completion(request.key, ids, logprobs, _stop(choice, request.sampling.stop, eos_ids))


def _stop(choice: _Choice, stops: list[str], eos_ids: frozenset[int]) -> str:
    reason, last = choice.stop_reason, (choice.token_ids or [-1])[-1]
    if choice.finish_reason == "length":
        return "length"
    if choice.finish_reason == "stop":
        if isinstance(reason, str) and reason in stops:
            return "stop"
        if last in eos_ids:
            return "eos"
        if stops:
            return "stop"
        raise Lasting("the server stopped, but the last token it returned is no end token")
    raise Lasting(f"the server ended the request with {choice.finish_reason}")


def message_of(body: bytes) -> str:
    """What a server says went wrong, on one line."""
    try:
        said = msgspec.json.decode(body)
    except msgspec.DecodeError:
        said = body.decode("utf-8", "replace")
    for name in ("error", "message", "detail"):
        if isinstance(said, dict) and name in said:
            said = said[name]
    return " ".join(str(said).split())[:MESSAGE_LENGTH] or "no message"
