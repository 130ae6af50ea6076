"""The env `shell`: an agent works in a sandbox by calling tools, turn by turn, until it says something without a call.

Several calls of one message run in order; a message without a call ends the episode (FrogNano, section 1.4; there is no
tool to finish with). A message cut off at its token limit ends it too, even if it holds calls. The calls of the last
turn that --max-turns allows are still run, since what they did counts (our choice: the paper is silent). The history is
rendered anew each turn, and the tokens that are fed are those of `Stitcher`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from msgspec import UNSET

from strop.core.envs.answer import anchor_of, mean_nll
from strop.core.envs.shell_tools import PROFILES, Profile, run_call
from strop.core.envs.tool_calls import (
    BadCall,
    Call,
    Format,
    detect_format,
    has_tool_role,
    parse_message,
    result_messages,
)
from strop.core.envs.world import ToolResult
from strop.core.models.token_bytes import TokenBytes
from strop.core.rollout.stitch import Stitcher
from strop.core.sandbox.protocol import Sandbox, SandboxLost
from strop.core.tasks.verifiers.verdict import Verdict

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Chunk

# Of an observation a record keeps this much; the tokens hold all of it.
SHOWN_CHARS = 2_000
SYSTEM = "You work in a terminal on the task you are given. Use the tools; when it is done, answer without a call."
SYSTEM_FENCED = (
    "You work in a terminal on the task you are given. To run a command write it in a block\n\n"
    "```bash\nCOMMAND\n```\n\nand you will see what it prints. When the task is done, answer without a block."
)


@dataclass(frozen=True, slots=True)
class EpisodeLimits:
    """The most turns (FrogNano: 75), tokens of prompt and response together, and seconds of wall-clock time."""

    max_turns: int = 75
    max_context: int | None = None
    max_time_s: float = 3_000.0


@dataclass(slots=True)
class Turn:
    """What the policy saw last, what it said, and whether each of its calls could be run."""

    observation: str
    action: str
    valid: bool = True


@dataclass(slots=True)
class ShellEpisode:
    """One attempt in the env `shell`.

    The loop feeds `prompt_ids` to an engine and hands each completion to `advance`, which gives the calls to run, or
    None at the end. `act` runs them, in any thread, and `resume` (in the loop's) gives the next ids to feed, or None.
    `judge`, in any thread, has the verdict and closes the sandbox. `stop` says why the episode ended: agent,
    max_turns, max_context, max_tokens_per_turn, max_time.
    """

    has_sandbox: ClassVar[bool] = True

    tokenizer: Tokenizer
    messages: list[dict[str, Any]]
    open_sandbox: Callable[[], Sandbox]
    verify: Callable[[Sandbox], Verdict]
    limits: EpisodeLimits = field(default_factory=EpisodeLimits)
    clock: Callable[[], float] = time.monotonic
    turns: list[Turn] = field(default_factory=list)
    stop: str = ""
    prompt_ids: list[int] = field(default_factory=list)
    num_sampled: int = 0
    _stitcher: Stitcher = field(init=False)
    _form: Format = field(init=False)
    _profile: Profile = field(init=False)
    _sandbox: Sandbox | None = None
    _started: float = 0.0

    def __post_init__(self) -> None:
        """Renders the first prompt. Raises DataError where the chat template refuses it."""
        template = self.tokenizer.chat_template
        self._form = detect_format(template) or "bash"
        self._profile = PROFILES["bash" if self._form == "bash" else "leaf"]
        if self.messages[0]["role"] != "system":
            system = SYSTEM_FENCED if self._form == "bash" else SYSTEM
            self.messages = [{"role": "system", "content": system}, *self.messages]
        self._stitcher = Stitcher(TokenBytes(self.tokenizer))
        self._started = self.clock()
        self.prompt_ids = self._stitcher.next_prompt(self._render())

    def advance(self, completion: Completion) -> Sequence[Call | BadCall] | None:
        """Takes the policy's turn: the calls to run, or None at the end of the episode."""
        self._stitcher.take(completion.token_ids, completion.logprobs)
        self.num_sampled += len(completion.token_ids)
        text = self.tokenizer.decode(completion.token_ids)
        message = parse_message(text, self._form, self._profile.schemas)
        self.turns.append(Turn(self._last_observation(), text, all(call.valid for call in message.calls)))
        self.messages.append({"role": "assistant", "content": text})
        if completion.stop == "length":
            self.stop = "max_tokens_per_turn"
        elif not message.calls:
            self.stop = "agent"
        return None if self.stop else message.calls

    def act(self, calls: Sequence[Call | BadCall]) -> list[tuple[Call | BadCall, ToolResult]]:
        """Runs the calls in order. Raises SandboxLost, Unavailable."""
        sandbox = self._ready()
        results = []
        for call in calls:
            left = self.limits.max_time_s - (self.clock() - self._started)
            results.append((call, run_call(call, sandbox, seconds_left=left)))
        return results

    def resume(self, results: list[tuple[Call | BadCall, ToolResult]]) -> list[int] | None:
        """Takes what the tools said: the next ids to feed, or None at the end of the episode."""
        self.turns[-1].valid = all(result.valid for _, result in results)
        said = [(call, result.text) for call, result in results]
        tool_role = has_tool_role(self.tokenizer.chat_template)
        self.messages.extend(result_messages(said, self._form, tool_role=tool_role))
        if len(self.turns) >= self.limits.max_turns:
            self.stop = "max_turns"
        elif self.clock() - self._started >= self.limits.max_time_s:
            self.stop = "max_time"
        else:
            ids = self._stitcher.next_prompt(self._render())
            if self.limits.max_context is None or len(ids) < self.limits.max_context:
                return ids
            self.stop = "max_context"
        return None

    def judge(self) -> Verdict:
        """The verdict on what the agent left behind; closes the sandbox. A lost sandbox is an error of the machine."""
        try:
            sandbox = self._ready()
            sandbox.stop_processes()
            return self.verify(sandbox)
        except SandboxLost as error:
            return Verdict.failed(f"sandbox lost: {error}")
        finally:
            self.close()

    def close(self) -> None:
        """Removes the sandbox; may be called again."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def chunks(self) -> list[Chunk]:
        """The tokens exactly as fed and drawn."""
        return self._stitcher.chunks()

    def trajectory(self, response: str) -> dict[str, Any]:
        """The fields of the rollout that say what happened; `response` is the last message."""
        chunks = self.chunks()
        return {
            "chunks": chunks,
            "response": response,
            "turns": len(self.turns),
            "horizon": self.limits.max_turns,
            "steps": self._steps(chunks),
            "stop": self.stop,
            "stitching": {**self._stitcher.counts, "dropped": self._stitcher.num_dropped},
        }

    def _steps(self, chunks: list[Chunk]) -> list[dict[str, Any]]:
        steps = []
        for turn, place in zip(self.turns, self._stitcher.places(), strict=True):
            step: dict[str, Any] = {
                "observation": turn.observation[:SHOWN_CHARS], "anchor": anchor_of(turn.observation),
                "action": turn.action, "valid": turn.valid, "chunk": place.chunk,
            }  # fmt: skip
            if place.span is not None:
                chunk = chunks[place.chunk]
                before = sum(span.end - span.start for span in chunk.sampled if span.start < place.span.start)
                assert chunk.logprobs is not UNSET
                logprobs = chunk.logprobs[before : before + place.span.end - place.span.start]
                step |= {"span": place.span, "nll": mean_nll(logprobs)}
            steps.append(step)
        return steps

    def _ready(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self.open_sandbox()
        return self._sandbox

    def _render(self) -> list[int]:
        tools = None if self._form == "bash" else self._profile.tools
        return self.tokenizer.encode_prompt(self.messages, tools)

    def _last_observation(self) -> str:
        """What came since the policy spoke last."""
        start = len(self.messages)
        while start and self.messages[start - 1]["role"] != "assistant":
            start -= 1
        return "\n".join(str(message["content"]) for message in self.messages[start:])
