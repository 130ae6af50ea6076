"""Raw replies, kept apart from what is read out of them: a parser may change, and no model need be asked again.

A reply is known by what it answers: example, role, round and attempt, and by the hash of the prompt, the back-end's own
name and the seed. A model's name holds its revision, the hash of its weights, and its adapter's; a program is known by
its command line alone. `replay:FILE` gives recorded replies by the first four alone, so that labels can be parsed anew;
FILE holds `reply` records, as `--replies` writes them, or `label` records, whose traces hold the raw replies.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from msgspec import Struct

from strop.core.errors import Where
from strop.core.records import Label, Record

# The roles by which replies are known; the judge speaks as guidance and as verdict, the router alone.
ROLES = ("support", "objection", "guidance", "verdict", "router")


@dataclass(frozen=True, slots=True)
class Question:
    """What a role is asked. `attempt` counts from 0 how often the same was asked before; `seed` is this one's own."""

    example: str
    role: str
    round: int
    attempt: int
    prompt: str
    seed: int
    details: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def key(self) -> tuple[str, str, int, int]:
        """What it is about, whatever the words."""
        return (self.example, self.role, self.round, self.attempt)

    def digest(self, source: str) -> str:
        """A hash of the prompt, the seed and who is asked."""
        text = f"{source}\0{self.seed}\0{self.prompt}"
        return blake2b(text.encode("utf-8", "replace"), digest_size=12).hexdigest()


@dataclass(frozen=True, slots=True)
class Reply:
    """The raw text, or why the machine gave none; `is_bad`: it is not the machine's fault, but that of the data."""

    text: str
    error: str | None = None
    is_bad: bool = False


class StoredReply(Struct, kw_only=True, omit_defaults=True):
    """A reply as a record: the back-end that gave it (`source`) and the question's `digest` where they are known."""

    example: str
    role: str
    round: int
    text: str
    attempt: int = 0
    digest: str | None = None
    source: str | None = None


class Store:
    """Replies that were recorded. A question answered twice is bad data, as is a role that does not exist."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_key: dict[tuple[str, str, int, int], dict[str | None, str]] = {}
        self._places: dict[tuple[Any, str | None], Where | None] = {}
        for record in records:
            if record.kind == "reply":
                self._add(record, record.view(StoredReply))
            elif record.kind == "label":
                for reply in _of_label(record):
                    self._add(record, reply)

    def _add(self, record: Record, reply: StoredReply) -> None:
        if reply.role not in ROLES:
            raise record.bad(f"{reply.role!r}, expected one of {', '.join(ROLES)}", "role")
        key = (reply.example, reply.role, reply.round, reply.attempt)
        if (key, reply.digest) in self._places:
            message = (
                f"{reply.role} of {reply.example!r} answered round {reply.round} twice, first at "
                f"{self._places[key, reply.digest]}"
            )
            raise record.bad(message, "role")
        self._places[key, reply.digest] = record.where
        self._by_key.setdefault(key, {})[reply.digest] = reply.text

    def exact(self, question: Question, source: str) -> str | None:
        """The reply to this very question by this very back-end."""
        return self._by_key.get(question.key, {}).get(question.digest(source))

    def any(self, question: Question) -> str | None:
        """The reply that was given to the question, whatever its words were then; of several the last."""
        found = self._by_key.get(question.key)
        return None if not found else list(found.values())[-1]


def stored(question: Question, source: str, text: str) -> Record:
    """The record of a reply."""
    values = StoredReply(
        example=question.example, role=question.role, round=question.round, attempt=question.attempt,
        digest=question.digest(source), source=source, text=text,
    )  # fmt: skip
    return Record.make("reply", values)


def _of_label(record: Record) -> list[StoredReply]:
    """The raw replies in a label's trace."""
    label = record.view(Label)
    found = []
    for spoken in label.trace.get("replies", ()):
        if not isinstance(spoken, dict) or not isinstance(spoken.get("text"), str):
            raise record.bad("a reply without text", "trace.replies")
        try:
            found.append(
                StoredReply(
                    example=label.id, role=spoken["role"], round=spoken["round"], attempt=spoken["attempt"],
                    text=spoken["text"],
                )
            )
        except KeyError as error:
            raise record.bad(f"a reply without {error.args[0]}", "trace.replies") from None
    return found
