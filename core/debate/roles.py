"""Who speaks: an engine of ours, any program, or replies that were recorded.

    model             --model or --endpoint: the filled template goes through the chat template, and is sampled
    command:PROG ...  a program that lives as long as the run: one JSON object a line on stdin, one on stdout

        {"op": "reply", "role": "support", "round": 1, "rounds": 2, "attempt": 0, "seed": 7, "prompt": "...",
         "example": {"id", "query", "agent"}, "skills": [...], "dialogue": [...], "guidance": "..."}
        {"text": "..."}

    replay:FILE       recorded replies; see replies.py

A back-end that fails (a program that ends, answers garbage or twice) gives a reply with `error`: the machine failed,
and nobody lost an argument by it. What a role says is never refused for its words; an empty reply is a reply.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from strop.core.debate.replies import Question, Reply, Store, stored
from strop.core.errors import UsageError
from strop.core.streams import read_records

if TYPE_CHECKING:
    from strop.core.engines.open import EngineOptions
    from strop.core.records import Record, Sampling

SIDES = ("support", "objection", "judge", "router")
# Whose back-end speaks as what.
SPEAKER = {
    "support": "support", "objection": "objection", "guidance": "judge", "verdict": "judge", "router": "router",
}  # fmt: skip
ANSWER_S = 120.0


class Backend(Protocol):
    """Answers questions; `name` says who it is, in records and in the hash of a question."""

    name: str

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply]]:
        """Each question's number with its reply, as they come: a run that is killed has kept those before."""

    def close(self) -> None:
        """Lets go of what it holds."""


class ProgramRole:
    """Asks a program; one that failed is started anew for the next question."""

    def __init__(self, command: str, *, seconds: float = ANSWER_S) -> None:
        from strop.core.envs.programs import Program

        try:
            self._arguments = tuple(shlex.split(command))
        except ValueError as error:
            raise UsageError(f"--role command:{command}: {error}") from None
        if not self._arguments:
            raise UsageError("--role command: names no program")
        self.name = f"command:{command}"
        self._seconds = seconds
        # Whether there is such a program is known before any work.
        self._program: Program | None = Program(self._arguments, "role")

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply]]:
        """One after the other, each within the limit of time."""
        return enumerate(map(self._one, questions))

    def _one(self, question: Question) -> Reply:
        from strop.core.envs.programs import Program
        from strop.core.sandbox.protocol import SandboxLost

        self._program = self._program or Program(self._arguments, "role")
        request = {
            "op": "reply", "role": question.role, "round": question.round, "attempt": question.attempt,
            "seed": question.seed, **question.details, "prompt": question.prompt,
        }  # fmt: skip
        try:
            answer = self._program.ask(request, seconds=self._seconds)
        except SandboxLost as error:
            self._program = None
            return Reply("", str(error))
        text = answer.get("text")
        if not isinstance(text, str):
            return Reply("", f"role: {self._arguments[0]!r} answered without a text: {str(answer)[:200]}")
        return Reply(text)

    def close(self) -> None:
        """Ends the program."""
        if self._program is not None:
            self._program.close()


class ReplayRole:
    """Gives what was recorded; a question without a reply is bad data, since nothing else could answer it."""

    def __init__(self, file: str) -> None:
        if not file:
            raise UsageError("--role replay: names no file")
        self.name = f"replay:{file}"
        self._file = file
        self._store = Store(read_records([file], sys.stdin.buffer, None, "example"))

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply]]:
        """What is recorded; a question without a reply gives a bad one."""
        return enumerate(map(self._one, questions))

    def _one(self, question: Question) -> Reply:
        text = self._store.any(question)
        if text is not None:
            return Reply(text)
        what = f"{question.role} in round {question.round}, attempt {question.attempt}"
        return Reply("", f"{self._file} holds no reply of {what}", is_bad=True)

    def close(self) -> None:
        """Nothing is held."""


class ModelRole:
    """Asks an engine, which is opened at the first question."""

    def __init__(self, options: EngineOptions, sampling: Sampling) -> None:
        from strop.core.engines.open import choose_engine, policy_info

        choose_engine(options)
        self._options = options
        self._sampling = sampling
        self._engine: Any = None
        self._tokenizer: Any = None
        # With the hashes of their content: other weights under the same name are another back-end.
        info = policy_info(options)
        adapter = f"+{info.adapter}" if info.adapter else ""
        drawn = f"temperature {sampling.temperature:g}, top-p {sampling.top_p:g}, {sampling.max_tokens} tokens"
        self.name = f"model:{info.model}@{info.revision}{adapter} ({drawn})"
        self.sampled_tokens = 0

    def ask(self, questions: Sequence[Question]) -> Iterator[tuple[int, Reply]]:
        """All together, each under its own seed. A prompt that does not fit leaves an error."""
        from strop.core.engines.protocol import Request

        engine, tokenizer = self._open()
        for number, question in enumerate(questions):
            chat = tokenizer.chat_template is not None
            prompt = [{"role": "user", "content": question.prompt}] if chat else question.prompt
            ids = tokenizer.encode_prompt(prompt)
            if len(ids) >= engine.context_length:
                told = f"a prompt of {len(ids)} tokens in a context of {engine.context_length}"
                yield number, Reply("", f"{self.name}: {told}")
                continue
            engine.submit(Request(number, ids, self._sampling, question.seed))
        while engine.pending:
            for done in engine.collect():
                self.sampled_tokens += len(done.token_ids)
                text = "" if done.error else tokenizer.decode(done.token_ids)
                yield done.key, Reply(text, done.error)

    def _open(self) -> tuple[Any, Any]:
        if self._engine is None:
            from strop.core.engines.open import open_engine, open_tokenizer

            self._tokenizer = open_tokenizer(self._options)
            self._engine = open_engine(self._options)
        return self._engine, self._tokenizer

    def close(self) -> None:
        """Lets go of the model."""
        if self._engine is not None:
            self._engine.close()


class Cast:
    """The back-ends of all roles. Replies in `store` are not asked for again; new ones go to `on_reply` at once."""

    def __init__(
        self, by_side: dict[str, Backend], store: Store | None = None, on_reply: Callable[[Record], None] | None = None
    ) -> None:
        self._by_side = by_side
        self._store = store
        self._on_reply = on_reply
        self.num_asked = 0
        self.num_stored = 0

    @property
    def names(self) -> dict[str, str]:
        """Who speaks for whom."""
        return {side: backend.name for side, backend in self._by_side.items()}

    def ask(self, questions: Sequence[Question]) -> list[Reply]:
        """The replies in the order of the questions."""
        replies: dict[int, Reply] = {}
        wanted: dict[str, list[int]] = {}
        for number, question in enumerate(questions):
            backend = self._by_side[SPEAKER[question.role]]
            text = None if self._store is None else self._store.exact(question, backend.name)
            if text is not None:
                replies[number] = Reply(text)
                self.num_stored += 1
            else:
                wanted.setdefault(SPEAKER[question.role], []).append(number)
        for side, numbers in wanted.items():
            backend = self._by_side[side]
            self.num_asked += len(numbers)
            for place, reply in backend.ask([questions[number] for number in numbers]):
                number = numbers[place]
                # A lone surrogate is no text, and could not be written.
                text = reply.text.encode("utf-8", "replace").decode()
                replies[number] = Reply(text, reply.error, reply.is_bad)
                if self._on_reply is not None and reply.error is None:
                    self._on_reply(stored(questions[number], backend.name, text))
        return [replies[number] for number in range(len(questions))]

    def close(self) -> None:
        """Closes each back-end once."""
        for backend in {id(backend): backend for backend in self._by_side.values()}.values():
            backend.close()
