"""The env `shell`: an agent works in a sandbox by calling tools, until it says something without a call.

Several calls of one message run in order; a message without a call ends the episode (FrogNano, section 1.4; there is no
tool to finish with).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from strop.core.envs.shell_tools import PROFILES, Profile, run_call
from strop.core.envs.world import Opening, Outcome
from strop.core.sandbox.protocol import Sandbox

if TYPE_CHECKING:
    from strop.core.envs.tool_calls import BadCall, Call
    from strop.core.tasks.verifiers.verdict import Verdict

SYSTEM = "You work in a terminal on the task you are given. Use the tools; when it is done, answer without a call."
SYSTEM_FENCED = (
    "You work in a terminal on the task you are given. To run a command write it in a block\n\n"
    "```bash\nCOMMAND\n```\n\nand you will see what it prints. When the task is done, answer without a block."
)


@dataclass(slots=True)
class ShellWorld:
    """A sandbox and its tools (see core/envs/world.py). The sandbox is started when the first command wants it."""

    messages: list[dict[str, Any]]
    open_sandbox: Callable[[], Sandbox]
    verify: Callable[[Sandbox], Verdict]
    profile: Profile = field(default_factory=lambda: PROFILES["leaf"])
    _sandbox: Sandbox | None = None

    def reset(self) -> Opening:
        """The task's messages behind the system's words, unless the task has its own."""
        fenced = self.profile.fenced
        messages = self.messages
        if messages[0]["role"] != "system":
            messages = [{"role": "system", "content": SYSTEM_FENCED if fenced else SYSTEM}, *messages]
        return Opening(messages, [] if fenced else self.profile.tools, fenced=fenced)

    def act(self, text: str, calls: Sequence[Call | BadCall], *, seconds_left: float) -> Outcome:
        """Runs the calls in order; without any the agent has ended. Raises SandboxLost, Unavailable."""
        if not calls:
            return Outcome(done=True, stop="agent")
        begun = time.monotonic()
        sandbox = self._ready()
        ready = time.monotonic()
        end = ready + seconds_left
        results = [run_call(call, sandbox, seconds_left=end - time.monotonic()) for call in calls]
        return Outcome(results, making_s=ready - begun)

    def judge(self) -> Verdict:
        """The verdict on what the agent left behind. Raises SandboxLost."""
        sandbox = self._ready()
        sandbox.stop_processes()
        return self.verify(sandbox)

    def close(self) -> None:
        """Removes the sandbox."""
        sandbox, self._sandbox = self._sandbox, None
        if sandbox is not None:
            sandbox.close()

    def _ready(self) -> Sandbox:
        if self._sandbox is None:
            self._sandbox = self.open_sandbox()
        return self._sandbox
