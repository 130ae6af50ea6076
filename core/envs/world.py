"""What an agent acts in over many turns: the small protocol behind all envs but `answer`.

The dialogue with the policy (prompts, tokens, limits, steps) is core/envs/dialogue.py; a world says how it begins, and
what comes of what the policy said.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from strop.core.envs.tool_calls import BadCall, Call
    from strop.core.tasks.verifiers.verdict import Verdict


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What goes back to the model for one call, and whether the call could be run as it was meant (`valid`)."""

    text: str
    valid: bool = True


@dataclass(frozen=True, slots=True)
class Opening:
    """How an episode begins: the chat messages, and the tools as chat templates take them.

    Without tools the policy's whole message is its action; with `fenced`, the blocks of bash in it are.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] = field(default_factory=list)
    fenced: bool = False


@dataclass(slots=True)
class Outcome:
    """What came of one message of the policy.

    `results` answers its calls in order (without tools: one answer to the message); `messages` follow them (a user who
    goes on). `done` ends the episode, and `stop` says who ended it: the "agent", or the "env". `reward` is the step's.
    `tools` are all tools from here on, where they change in the middle of an episode.
    `making_s` is what the world took to get ready: none of the policy's time.
    """

    results: list[ToolResult] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    done: bool = False
    stop: str = "env"
    reward: float | None = None
    tools: list[dict[str, Any]] | None = None
    making_s: float = 0.0


class World(Protocol):
    """One episode's surroundings. Methods are called one at a time, in any thread.

    What the policy does wrong is said in a result with `valid` false; what the machine does wrong is SandboxLost.
    """

    def reset(self) -> Opening:
        """Begins. Raises SandboxLost, Unavailable."""
        ...

    def act(self, text: str, calls: Sequence[Call | BadCall], *, seconds_left: float) -> Outcome:
        """Takes one message of the policy: its text, and the calls that were read from it (none without tools)."""
        ...

    def judge(self) -> Verdict | None:
        """The verdict on the episode; None: the task's verifier judges the last message. Raises SandboxLost."""
        ...

    def close(self) -> None:
        """Lets go of everything; may be called again."""
        ...
