"""The verifier `env`: the environment that the task is attempted in judges the whole episode.

Programs of the env `command`, the functions of `functions`, the games of `textworld` know how an attempt came out; a
response alone says nothing of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from strop.core.tasks.verifiers.verdict import Options, PlainVerifier, Verdict, options_of

if TYPE_CHECKING:
    from strop.core.records import Record, Task


class EnvVerifier(PlainVerifier):
    """Checks the options; the worlds of core/envs/ judge."""

    def check(self, task: Task) -> None:
        """Raises DataError for options: there are none."""
        options_of(task, Options)

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """An error: only the environment of the episode can tell."""
        return Verdict.failed("the verifier `env` is the environment of the episode, and nothing of one is stored")
