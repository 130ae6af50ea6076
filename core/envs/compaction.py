"""Own-summary compaction: a history that has grown too long is replaced by what the policy itself says of it.

FrogNano, section 1.9 of its sheet: with a context of W tokens the history is compacted once it holds rho W of them, and
a summary may have 0.2 W. So that it fits, the oldest whole turns are left out of the request until what is kept has at
most C = max(1, W - tokens(P) - floor(0.2 W)) tokens, P being the episode's first messages. Then the history is P and
the summary. What the paper leaves open is our choice: the words of the request count with P; a summary that was cut
off, is empty or calls a tool has failed; it is counted (T1 saw 98.3 % of them fail), and the newest whole turns go on
without one, in half of the context.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

SUMMARY_SHARE = 0.2
KEPT_AFTER_FAILURE = 0.5

REQUEST = (
    "The conversation is too long to go on. Sum it up for yourself, in words and without calling a tool: the task, "
    "what was done and found, what is left to do. Your summary will stand in place of all that came after the task."
)
INTRODUCTION = "The conversation so far was replaced by this summary of yours:"

Message = dict[str, Any]


@dataclass(slots=True)
class Compaction:
    """Of one episode: `at` is rho, `window` W; `done` and `failed` count summaries, `is_asking` awaits one."""

    at: float
    window: int
    done: int = 0
    failed: int = 0
    is_asking: bool = False
    # Turns that were there after the last one: without a new turn, another would only say the same again.
    _turns_then: int = 0

    def is_due(self, num_tokens: int, num_turns: int) -> bool:
        """Whether a history of so many tokens and turns is to be summed up before the policy goes on."""
        return num_tokens >= self.at * self.window and num_turns > self._turns_then

    @property
    def max_tokens(self) -> int:
        """Most tokens of a summary."""
        return max(1, math.floor(SUMMARY_SHARE * self.window))

    def request(self, messages: list[Message], num_first: int, count: Callable[[list[Message]], int]) -> list[Message]:
        """The messages that ask for a summary; `count` gives the tokens of messages."""
        self.is_asking = True
        first = messages[:num_first]
        budget = max(1, self.window - count(with_user_text(first, REQUEST)) - self.max_tokens)
        return with_user_text(first + newest_turns(messages, num_first, budget, count), REQUEST)

    def take(
        self, summary: str, *, failed: bool, messages: list[Message], num_first: int, num_turns: int,
        count: Callable[[list[Message]], int],
    ) -> list[Message]:  # fmt: skip
        """The history after a summary, or after a failed one."""
        self.is_asking = False
        self._turns_then = num_turns
        first = messages[:num_first]
        if failed or not summary.strip():
            self.failed += 1
            budget = max(1, math.floor(KEPT_AFTER_FAILURE * self.window) - count(first))
            return first + newest_turns(messages, num_first, budget, count)
        self.done += 1
        return with_user_text(first, f"{INTRODUCTION}\n\n{summary.strip()}")


def newest_turns(
    messages: list[Message], num_first: int, budget: int, count: Callable[[list[Message]], int]
) -> list[Message]:
    """The newest whole turns after the first messages that have at most `budget` tokens; a turn is never cut."""
    first = messages[:num_first]
    starts = [i for i in range(num_first, len(messages)) if messages[i]["role"] == "assistant"]
    base = count(first)
    for start in starts:
        rest = messages[start:]
        if count(first + rest) - base <= budget:
            return rest
    return []


def with_user_text(messages: list[Message], text: str) -> list[Message]:
    """The messages with a text of the user's at the end: templates want users and assistants in turn."""
    if messages and messages[-1]["role"] == "user":
        last = messages[-1]
        return [*messages[:-1], {**last, "content": f"{last['content']}\n\n{text}"}]
    return [*messages, {"role": "user", "content": text}]
