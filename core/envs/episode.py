"""What an env gives the rollout loop: one attempt, from its first prompt to its record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from strop.core.engines.protocol import Completion
    from strop.core.records import Chunk
    from strop.core.tasks.verifiers.verdict import Verdict


class Episode(Protocol):
    """One attempt.

    `begin` may give something to do before the policy is asked; None: `prompt_ids` are there. The loop feeds these to
    an engine and hands each completion to `advance`. Where that gives something to do, `act` does it, in a thread of
    its own, and `resume` gives the next ids to feed; None from either is the end. `judge` has a verdict where the env
    judges for itself. All but `act` and `judge` are called in the loop's thread.
    """

    prompt_ids: list[int]

    @property
    def has_sandbox(self) -> bool:
        """Whether `judge` takes time in a sandbox of its own, so that others need not wait for it."""
        ...

    @property
    def stop(self) -> str:
        """Why it ended."""
        ...

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy has produced so far."""
        ...

    @property
    def num_turns(self) -> int:
        """Turns so far."""
        ...

    @property
    def max_tokens(self) -> int | None:
        """The most tokens of the next turn, where the episode and not the sampling decides."""
        ...

    def begin(self) -> Any | None:
        """What is to be done first, or None."""
        ...

    def advance(self, completion: Completion) -> Any | None:
        """Takes the policy's turn: what is to be done, or None."""
        ...

    def act(self, work: Any) -> Any:
        """Does it. Raises SandboxLost, Unavailable."""
        ...

    def resume(self, results: Any) -> list[int] | None:
        """Takes what came of it: the next ids to feed, or None. Raises DataError."""
        ...

    def judge(self) -> Verdict | None:
        """The verdict, or None: the task's verifier judges the response. Lets go of what is held."""
        ...

    def chunks(self) -> list[Chunk]:
        """The tokens exactly as fed and drawn."""
        ...

    def trajectory(self, response: str) -> dict[str, Any]:
        """The fields of the rollout that say what happened."""
        ...

    def cancel(self) -> None:
        """It is not wanted any more: `stop` is "cancelled"."""
        ...

    def close(self) -> None:
        """Lets go of what is held, without a verdict."""
        ...
