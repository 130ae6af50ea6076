"""Verifying stored rollouts again without sampling: a mended verifier, another reward, rollouts made elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.records import Record, Task

if TYPE_CHECKING:
    from strop.core.tasks.verifiers import Verdict


class _Stored(msgspec.Struct):
    """What rescoring needs of a rollout."""

    id: str
    task: str
    response: str | None = None
    error: str | None = None
    statement_version: int | None = None
    steps: list[dict[str, msgspec.Raw]] = []


class KnownTasks:
    """The tasks that came by. Tasks come before their rollouts, in the stream or in a file of their own."""

    def __init__(self) -> None:
        self._tasks: dict[str, tuple[Record, Task]] = {}

    def add(self, record: Record) -> None:
        """Remembers a task; a later one with the same id replaces it."""
        task = record.view(Task)
        self._tasks[task.id] = (record, task)

    def of(self, record: Record, task: str, statement_version: int | None) -> tuple[Record, Task]:
        """What the rollout `record` attempted. Raises DataError where it is missing or was restated since."""
        found = self._tasks.get(task)
        if found is None:
            raise record.bad(f"no task {task!r} came before this rollout (name a file of tasks with --tasks)", "task")
        if statement_version is not None and statement_version != found[1].statement_version:
            raise record.bad(
                f"an attempt at statement version {statement_version}, the task is at {found[1].statement_version}",
                "statement_version",
            )
        return found


class Rescorer:
    """Keeps the tasks that came by, and gives each rollout the verdict its task's verifier reaches now.

    Memory: the tasks seen.
    """

    def __init__(self, verify: Callable[[str, Record, Task], Verdict]) -> None:
        self._verify = verify
        self._tasks = KnownTasks()
        self.num_rescored = 0
        self.num_changed = 0
        self.num_left = 0

    def add_task(self, record: Record) -> None:
        """Remembers a task; a later one with the same id replaces it."""
        self._tasks.add(record)

    def rescore(self, record: Record) -> None:
        """Sets `reward`, `success` and `verdict` of a rollout in place; an error of the verifier becomes its `error`.

        A rollout of a failed engine or sandbox has no response and stays as it is. Raises DataError where the task is
        missing, was restated since, or no response is stored.
        """
        stored = record.view(_Stored)
        if stored.response is None:
            if stored.error is not None:
                self.num_left += 1
                return
            raise record.bad("missing; only rollouts that hold their response can be verified again", "response")
        task_record, task = self._tasks.of(record, stored.task, stored.statement_version)
        verdict = self._verify(stored.response, task_record, task)
        before = record.get("reward")
        if verdict.error is not None:
            outcome: dict[str, Any] = {"error": verdict.error}
        else:
            outcome = {"reward": verdict.reward, "success": verdict.success}
            outcome |= {"verdict": verdict.details} if verdict.details else {}
            # In one turn the step's reward is the rollout's; over many turns rewards of steps are not a verifier's.
            if len(stored.steps) == 1:
                outcome["steps"] = [{**stored.steps[0], "reward": verdict.reward}]
        # What the old verdict said, and credit that was given for it, must not outlive it.
        for name in {"error", "reward", "success", "verdict", "advantage", "credit"} - set(outcome):
            record.fields.pop(name, None)
        record.set(**outcome)
        self.num_rescored += 1
        self.num_changed += before != record.get("reward")
