"""The dialogue of a policy with a world, turn by turn: prompts, exact tokens, limits, and the steps of the record.

A turn is one message of the policy and what comes of it. A message cut off at its token limit ends the episode, even if
it holds calls (FrogNano, section 1.4). The calls of the last turn that the limit allows are still run, since what they
did counts (our choice: the paper is silent). The history is rendered anew each turn, and the tokens that are fed are
those of `Stitcher`. With `compact_at` a history that grows too long is replaced by the policy's own summary
(core/envs/compaction.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import UNSET

from strop.core.envs.answer import anchor_of, mean_nll
from strop.core.envs.compaction import Compaction, with_user_text
from strop.core.envs.tool_calls import (
    BadCall,
    Call,
    Format,
    detect_format,
    has_tool_role,
    parse_message,
    result_messages,
)
from strop.core.envs.tool_schemas import Tools, tool_schemas, tools_in_words
from strop.core.envs.world import Opening, Outcome, World
from strop.core.errors import Unavailable
from strop.core.models.token_bytes import TokenBytes
from strop.core.rollout.stitch import Stitcher
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.verifiers.verdict import Verdict

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Chunk

# Of an observation a record keeps this much; the tokens hold all of it.
SHOWN_CHARS = 2_000
# A prompt that leaves the policy's reasoning open ends with its tag and at most a line end.
THINK_TOKENS = 8


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The most turns (FrogNano: 75), tokens of prompt and response together, and seconds of wall-clock time.

    `compact_at` is the share of the context from which the history is summarised; None: never.
    """

    max_turns: int = 75
    max_context: int | None = None
    max_time_s: float = 3_000.0
    compact_at: float | None = None


@dataclass(slots=True)
class Turn:
    """What the policy saw last, what it said, whether it could be done as it was meant, and what that brought."""

    observation: str
    action: str
    valid: bool = True
    reward: float | None = None
    is_summary: bool = False


@dataclass(slots=True)
class Said:
    """One message of the policy for the world: its text, and the calls read from it."""

    text: str
    calls: Sequence[Call | BadCall] = ()


@dataclass(slots=True)
class Summary:
    """What the policy says of its history; `failed` where it is of no use."""

    text: str
    failed: bool


# What `act` is given: the world is to begin, or to answer; of a summary it is not told.
BEGIN = Said("")


@dataclass(slots=True)
class DialogueEpisode:
    """One attempt in a world (see core/envs/episode.py for how the loop drives it).

    `stop` says why it ended: agent (a message without a call), env (the world ended it), max_turns, max_context,
    max_tokens_per_turn, max_time, cancelled.
    """

    has_sandbox: ClassVar[bool] = True

    tokenizer: Tokenizer
    world: World
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    clock: Callable[[], float] = time.monotonic
    turns: list[Turn] = field(default_factory=list)
    stop: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    num_sampled: int = 0
    _messages: list[dict[str, Any]] = field(default_factory=list)
    _num_first: int = 0
    _tools: list[dict[str, Any]] = field(default_factory=list)
    _schemas: Tools | None = None
    _form: Format | None = None
    _calls: Sequence[Call | BadCall] = ()
    _stitcher: Stitcher = field(init=False)
    _compaction: Compaction | None = None
    _fed: list[int] = field(default_factory=list)
    _started: float = 0.0

    def __post_init__(self) -> None:
        """Nothing begins yet."""
        self._stitcher = Stitcher(TokenBytes(self.tokenizer))
        if self.limits.compact_at is not None and self.limits.max_context is not None:
            self._compaction = Compaction(self.limits.compact_at, self.limits.max_context)

    @property
    def num_turns(self) -> int:
        """Turns so far; a summary is none."""
        return sum(not turn.is_summary for turn in self.turns)

    @property
    def max_tokens(self) -> int | None:
        """Most tokens of what is to be sampled next, where that is not the policy's own choice."""
        asking = self._compaction is not None and self._compaction.is_asking
        return self._compaction.max_tokens if asking and self._compaction is not None else None

    def begin(self) -> Said:
        """What `act` is to do before the first prompt."""
        self._started = self.clock()
        return BEGIN

    def advance(self, completion: Completion) -> Said | Summary | None:
        """Takes what was sampled: what `act` is to do, or None at the end of the episode."""
        if completion.stop == "cancelled":
            self.stop = "cancelled"
            if not completion.token_ids:
                return None
        self._stitcher.take(completion.token_ids, completion.logprobs)
        self.num_sampled += len(completion.token_ids)
        text = self.tokenizer.decode(completion.token_ids)
        if self._compaction is not None and self._compaction.is_asking:
            return self._take_summary(text, completion.stop)
        return self._take_turn(text, completion)

    def act(self, work: Said | Summary) -> Opening | Outcome | Summary:
        """Lets the world begin, or answer. Raises SandboxLost, Unavailable."""
        if isinstance(work, Summary):
            return work
        if work is BEGIN:
            return self.world.reset()
        return self.world.act(work.text, work.calls, seconds_left=self._seconds_left())

    def resume(self, came: Opening | Outcome | Summary) -> list[int] | None:
        """Takes what came of it: the next ids to feed, or None at the end of the episode.

        Raises DataError where the chat template refuses the messages.
        """
        if isinstance(came, Opening):
            self._open(came)
        elif isinstance(came, Summary):
            assert self._compaction is not None
            self._messages = self._compaction.take(
                came.text, failed=came.failed, messages=self._messages, num_first=self._num_first,
                num_turns=self.num_turns, count=self._count,
            )  # fmt: skip
        else:
            self._answer(came)
        ids = None if self.stop else self._next_prompt(new_chunk=isinstance(came, Summary))
        if not self.turns and ids is not None:
            self.prompt_ids = ids
        return ids

    def judge(self) -> Verdict | None:
        """The world's verdict; the world is then let go of. What the machine lost or lacks is its error."""
        try:
            return self.world.judge()
        except SandboxLost as error:
            return Verdict.failed(f"sandbox lost: {error}")
        except Unavailable as error:
            return Verdict.failed(str(error))
        finally:
            self.close()

    def cancel(self) -> None:
        """It is not wanted any more."""
        self.stop = "cancelled"

    def close(self) -> None:
        """Lets go of the world; may be called again."""
        self.world.close()

    def chunks(self) -> list[Chunk]:
        """The tokens exactly as fed and drawn."""
        return self._stitcher.chunks()

    def trajectory(self, response: str) -> dict[str, Any]:
        """The fields of the rollout that say what happened; `response` is the last message."""
        chunks = self.chunks()
        fields = {
            "chunks": chunks, "response": response, "turns": self.num_turns, "horizon": self.limits.max_turns,
            "steps": self._steps(chunks),
            "stitching": {**self._stitcher.counts, "dropped": self._stitcher.num_dropped},
        }  # fmt: skip
        if self.stop:
            # Without one the machine stopped it, and not the episode.
            fields["stop"] = self.stop
        if self._compaction is not None:
            fields["compaction"] = {"done": self._compaction.done, "failed": self._compaction.failed}
        return fields

    def _open(self, opening: Opening) -> None:
        self._tools = opening.tools
        self._messages = list(opening.messages)
        if opening.fenced:
            self._form = "bash"
        elif opening.tools:
            self._schemas = tool_schemas(opening.tools)
            self._form = detect_format(self.tokenizer.chat_template)
            if self._form in (None, "bash"):
                # The template would say nothing of tools: the policy is told of them in words.
                self._form, self._tools = "hermes", []
                self._messages = with_system_text(self._messages, tools_in_words(opening.tools))
        self._num_first = len(self._messages)

    def _change_tools(self, tools: list[dict[str, Any]], messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Other tools from here on. The template renders them at its beginning; in words only the new ones are told."""
        known = self._schemas or {}
        self._schemas = tool_schemas(tools)
        if self._tools:
            self._tools = tools
            return messages
        new = [tool for tool in tools if tool["function"]["name"] not in known]
        if not new:
            return messages
        words = {"role": "user", "content": tools_in_words(new)}
        if messages and messages[0]["role"] == "user":
            return [*with_user_text([words], str(messages[0]["content"])), *messages[1:]]
        return [words, *messages]

    def _take_turn(self, text: str, completion: Completion) -> Said | None:
        calls: Sequence[Call | BadCall] = ()
        if self._form is not None:
            is_open = self.tokenizer.decode(self._fed[-THINK_TOKENS:]).rstrip().endswith("<think>")
            calls = parse_message(text, self._form, self._schemas, reasoning_is_open=is_open).calls
        self.turns.append(Turn(self._last_observation(), text, all(call.valid for call in calls)))
        self._messages.append({"role": "assistant", "content": text})
        self._calls = calls
        if completion.stop == "length":
            self.stop = "max_context" if self._is_full(completion) else "max_tokens_per_turn"
        return None if self.stop else Said(text, calls)

    def _take_summary(self, text: str, stop: str) -> Summary | None:
        self.turns.append(Turn(self._last_observation(), text, is_summary=True))
        has_call = self._form is not None and bool(parse_message(text, self._form).calls)
        failed = stop == "length" or has_call
        self.turns[-1].valid = not failed and bool(text.strip())
        return None if self.stop else Summary(text, failed)

    def _answer(self, came: Outcome) -> None:
        turn = self.turns[-1]
        turn.valid = turn.valid and all(result.valid for result in came.results)
        turn.reward = came.reward
        self._started += came.making_s
        texts = [result.text for result in came.results]
        if self._calls and self._form is not None:
            tool_role = has_tool_role(self.tokenizer.chat_template) and bool(self._tools)
            said = list(zip(self._calls, texts, strict=False))
            self._messages.extend(result_messages(said, self._form, tool_role=tool_role))
        elif texts:
            self._messages.append({"role": "user", "content": "\n\n".join(texts)})
        self._messages.extend(came.messages if came.tools is None else self._change_tools(came.tools, came.messages))
        if came.done:
            self.stop = came.stop
        elif self.num_turns >= self.limits.max_turns:
            self.stop = "max_turns"
        elif self._seconds_left() <= 0:
            self.stop = "max_time"

    def _next_prompt(self, *, new_chunk: bool = False) -> list[int] | None:
        rendered = self._render(self._messages)
        compaction = self._compaction
        if compaction is not None and compaction.is_due(len(rendered), self.num_turns):
            rendered = self._render(compaction.request(self._messages, self._num_first, self._count))
        self._fed = self._stitcher.next_prompt(rendered, new_chunk=new_chunk)
        if self.limits.max_context is not None and len(self._fed) >= self.limits.max_context:
            self.stop = "max_context"
            return None
        return self._fed

    def _is_full(self, completion: Completion) -> bool:
        used = len(self._fed) + len(completion.token_ids)
        return self.limits.max_context is not None and used >= self.limits.max_context

    def _steps(self, chunks: list[Chunk]) -> list[dict[str, Any]]:
        steps = []
        for turn, place in zip(self.turns, self._stitcher.places(), strict=True):
            step: dict[str, Any] = {
                "observation": turn.observation[:SHOWN_CHARS], "anchor": anchor_of(turn.observation),
                "action": turn.action, "valid": turn.valid, "chunk": place.chunk,
            }  # fmt: skip
            if turn.reward is not None:
                step["reward"] = turn.reward
            if turn.is_summary:
                step["summary"] = True
            if place.span is not None:
                chunk = chunks[place.chunk]
                before = sum(span.end - span.start for span in chunk.sampled if span.start < place.span.start)
                assert chunk.logprobs is not UNSET
                logprobs = chunk.logprobs[before : before + place.span.end - place.span.start]
                step |= {"span": place.span, "nll": mean_nll(logprobs)}
            steps.append(step)
        return steps

    def _render(self, messages: list[dict[str, Any]]) -> list[int]:
        return self.tokenizer.encode_prompt(messages, self._tools or None)

    def _count(self, messages: list[dict[str, Any]]) -> int:
        return len(self._render(messages))

    def _seconds_left(self) -> float:
        return self.limits.max_time_s - (self.clock() - self._started)

    def _last_observation(self) -> str:
        """What came since the policy spoke last."""
        start = len(self._messages)
        while start and self._messages[start - 1]["role"] != "assistant":
            start -= 1
        return "\n".join(str(message["content"]) for message in self._messages[start:])


def with_system_text(messages: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """The messages with a text at the end of the system's, which is made where there is none."""
    if messages and messages[0]["role"] == "system":
        return [{**messages[0], "content": f"{messages[0]['content']}\n\n{text}"}, *messages[1:]]
    return [{"role": "system", "content": text}, *messages]
