"""The engine `script:FILE`: a policy that says what is written down, to try envs and verifiers without a model's luck.

FILE holds one JSON object a line: {"task": ID, "messages": [TEXT, ...]}, with "sample" where attempts differ; the task
"*" is for all that have none of their own. The n-th message is what the policy says in its n-th turn, and after the
last it says nothing, which ends an episode. Its log-probabilities are 0: it was certain.
"""

from __future__ import annotations

from collections import deque
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import msgspec
from msgspec import Struct

from strop.core.engines.protocol import Completion, ModelInfo, Request
from strop.core.errors import DataError, InputMissing, Where

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Sampling


class _Line(Struct, forbid_unknown_fields=True):
    messages: list[str]
    task: str = "*"
    sample: int | None = None


class ScriptEngine:
    """Answers each request with the next message of its attempt; `key` of a request is the rollout's id."""

    name = "script"
    concurrency = 64

    def __init__(self, file: Path, tokenizer: Tokenizer, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._scripts, digest = _read(file)
        self._turns: dict[Any, int] = {}
        self._queue: deque[Request] = deque()
        self.context_length = context_length
        self.info = ModelInfo(f"script:{file}", digest)

    def submit(self, request: Request) -> None:
        """Queues a request."""
        self._queue.append(request)

    def collect(self, patience_s: float | None = None) -> list[Completion]:
        """The answers to all that was submitted."""
        answered = [self._answer(request) for request in self._queue]
        self._queue.clear()
        return answered

    def cancel(self, key: Any) -> None:
        """Nothing: what was submitted is answered at once."""

    @property
    def pending(self) -> int:
        """Requests not yet answered."""
        return len(self._queue)

    def logprobs_mode(self, sampling: Sampling) -> str:
        """ "scaled": a script that is certain is so at any temperature."""
        return "scaled"

    def close(self) -> None:
        """Nothing is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()

    def _answer(self, request: Request) -> Completion:
        turn = self._turns.get(request.key, 0)
        self._turns[request.key] = turn + 1
        group, _, sample = str(request.key).rpartition("/")
        task = group.rpartition("#")[0].rpartition("@")[0]
        places = ((task, int(sample) if sample.isdigit() else None), (task, None), ("*", None))
        messages = next((self._scripts[place] for place in places if place in self._scripts), [])
        text = messages[turn] if turn < len(messages) else ""
        ids = list(self._tokenizer.inner(text, add_special_tokens=False)["input_ids"])
        own = self._tokenizer.inner.eos_token_id
        ids += [own] if own is not None else sorted(self._tokenizer.eos_ids)[:1]
        room = max(self.context_length - len(request.prompt_ids), 0)
        kept = ids[: min(request.sampling.max_tokens, room)]
        return Completion(request.key, kept, [0.0] * len(kept), "eos" if kept == ids else "length")


def _read(file: Path) -> tuple[dict[tuple[str, int | None], list[str]], str]:
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputMissing(f"{file}: {error.strerror}") from None
    found = {}
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            one = msgspec.json.decode(line, type=_Line)
        except msgspec.DecodeError as error:
            raise DataError(str(error), where=Where(str(file), number)) from None
        found[one.task, one.sample] = one.messages
    return found, blake2b(data, digest_size=6).hexdigest()
