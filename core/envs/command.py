"""The env `command`: any program is the environment. A task says `"env": "command:PROG ARGS..."` (no shell runs).

The program reads one JSON object a line and answers each with one line (see programs.py):

    {"op": "reset", "task": THE TASK RECORD, "seed": INT}  -> {"observation": TEXT or [MESSAGES], "tools": [...]?}
    {"op": "step", "action": TEXT, "calls": [CALLS]}       -> {"observation"?, "results"?, "reward"?, "done"?, ...}
    {"op": "snapshot"}                                     -> {"state": ANY}
    {"op": "restore", "task": ..., "seed": ..., "state": ANY}  -> as reset

Any answer may be {"error": TEXT}: an error of the machine, and no reward. A request without an answer in time is one
too; the time is `request_s`, or less where the episode's own time ends before.

A program without tools takes the policy's whole message as `action`, and its observation is what the policy hears. One
with tools (as chat templates take them) gets the calls, {"name", "arguments", "valid", "error"} each, and answers with
as many `results`, each a text or {"text", "valid"}; for a call that could not be read (`valid` false) the policy is
told what was wrong, whatever stands there. An observation follows the results as a message of the user. A message
without a call is the program's affair: it answers with an observation, or ends the episode.

A step's `valid` false says that the action made no sense there. The verdict: `success` is what the last answer that
said it said; where none did, a reward of 1 or more at the end (`done`). The reward is the sum of the steps' rewards;
where none was given, 1 for a success and 0 without. `assertions` are those of the last answer that had some.

A task names the program, so tasks with this env are as trusted as a script.
"""

from __future__ import annotations

import math
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.envs.programs import Program, Programs
from strop.core.envs.tool_calls import BadCall, Call
from strop.core.envs.world import Opening, Outcome, ToolResult
from strop.core.errors import DataError
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.reports import Assertion
from strop.core.tasks.verifiers.verdict import Verdict

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

NAME = "command"
REQUEST_S = 60.0
# Beyond the end of an episode's time a program may still finish its answer.
GRACE_S = 5.0


class Result(msgspec.Struct):
    """The answer to one call."""

    text: str
    valid: bool = True


class Answer(msgspec.Struct):
    """What a program may say; what it says beyond this is its own affair."""

    observation: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    results: list[str | Result | None] | None = None
    reward: float | None = None
    done: bool = False
    success: bool | None = None
    valid: bool = True
    assertions: list[Assertion] | None = None
    state: Any = None
    error: str | None = None


@dataclass(slots=True)
class Score:
    """What an episode has brought so far."""

    reward: float | None = None
    success: bool | None = None
    done: bool = False
    assertions: list[Assertion] | None = None

    def add(self, answer: Answer) -> None:
        """Counts a step in."""
        if answer.reward is not None:
            self.reward = answer.reward + (self.reward or 0.0)
        self.success = self.success if answer.success is None else answer.success
        self.done = self.done or answer.done
        self.assertions = self.assertions if answer.assertions is None else answer.assertions

    def verdict(self) -> Verdict:
        """The verdict on the episode as it stands."""
        success = self.success
        if success is None:
            success = self.done and (self.reward or 0.0) >= 1
        reward = float(success) if self.reward is None else self.reward
        return Verdict(reward, success, {"done": self.done}, assertions=self.assertions)


class CommandWorld:
    """One episode in a program."""

    def __init__(
        self, programs: Programs, arguments: tuple[str, ...], task: bytes, seed: int, *, request_s: float = REQUEST_S
    ) -> None:
        """`task` is the record as it came, `reference` and all: the program judges."""
        self._programs = programs
        self._arguments = arguments
        self._begin = {"task": msgspec.Raw(task), "seed": seed}
        self._request_s = request_s
        self._program: Program | None = None
        self._has_tools = False
        self._score = Score()

    def reset(self) -> Opening:
        """Takes a program and begins. Raises SandboxLost, Unavailable."""
        return self._open({"op": "reset", **self._begin})

    def act(self, text: str, calls: Sequence[Call | BadCall], *, seconds_left: float) -> Outcome:
        """One step. Raises SandboxLost."""
        told = [] if not self._has_tools else [_told(call) for call in calls]
        # What is no text (a lone surrogate) cannot be written as JSON.
        clean = text.encode("utf-8", "replace").decode()
        answer = self._ask({"op": "step", "action": clean, "calls": told}, seconds_left)
        if answer.reward is not None and not math.isfinite(answer.reward):
            raise self._bad("step", f"the reward {answer.reward} is no finite number")
        self._score.add(answer)
        outcome = Outcome(done=answer.done, reward=answer.reward, tools=answer.tools)
        if not self._has_tools:
            if isinstance(answer.observation, list):
                raise self._bad("step", "its observation is a list of messages; without tools it is a text")
            if answer.observation is None and not answer.done:
                raise self._bad("step", 'no "observation" and not "done"')
            outcome.results = [ToolResult(answer.observation or "", answer.valid)]
            return outcome
        outcome.results = self._results(calls, answer)
        outcome.messages = [] if answer.observation is None else _messages(answer.observation)
        if not calls and not outcome.messages and not answer.done:
            raise self._bad("step", 'to a message without a call it said neither "observation" nor "done"')
        return outcome

    def judge(self) -> Verdict:
        """The program's verdict, by the rule in the module's docstring."""
        return self._score.verdict()

    def snapshot(self) -> dict[str, Any]:
        """The state of the episode as JSON, to `restore` later, in this world or another of the same task."""
        answer = self._ask({"op": "snapshot"})
        score = msgspec.to_builtins(self._score)
        return {"state": answer.state, "score": score}

    def restore(self, snapshot: Mapping[str, Any]) -> Opening:
        """Goes on from a snapshot; what the program says is where it stands now."""
        opening = self._open({"op": "restore", **self._begin, "state": snapshot["state"]})
        self._score = msgspec.convert(snapshot["score"], Score)
        return opening

    def close(self) -> None:
        """Gives the program back; may be called again."""
        program, self._program = self._program, None
        if program is not None:
            self._programs.give(program)

    def _open(self, request: dict[str, Any]) -> Opening:
        if self._program is None:
            self._program = self._programs.take(self._arguments)
        self._score = Score()
        answer = self._ask(request)
        if answer.observation is None:
            raise self._bad(request["op"], 'no "observation"')
        self._has_tools = bool(answer.tools)
        return Opening(_messages(answer.observation), answer.tools or [])

    def _ask(self, request: dict[str, Any], seconds_left: float = math.inf) -> Answer:
        if self._program is None:
            raise SandboxLost("env command: the episode is closed")
        seconds = min(self._request_s, max(seconds_left, 0.0) + GRACE_S)
        try:
            said = self._program.ask(request, seconds=seconds)
        except BaseException:
            program, self._program = self._program, None
            self._programs.drop(program)
            raise
        try:
            answer = msgspec.convert(said, Answer)
        except msgspec.ValidationError as error:
            raise self._bad(request["op"], str(error)) from None
        if answer.error is not None:
            raise self._bad(request["op"], answer.error)
        return answer

    def _results(self, calls: Sequence[Call | BadCall], answer: Answer) -> list[ToolResult]:
        said = answer.results or []
        if len(said) != len(calls) and not (answer.done and not said):
            raise self._bad("step", f"{len(said)} results for {len(calls)} calls")
        results = []
        for call, result in zip(calls, said or [None] * len(calls), strict=True):
            if isinstance(call, BadCall):
                results.append(ToolResult(call.message, valid=False))
            elif isinstance(result, Result):
                results.append(ToolResult(result.text, result.valid and answer.valid))
            elif result is None and not answer.done:
                raise self._bad("step", f"no result for the call of {call.name}")
            else:
                results.append(ToolResult(result or "", answer.valid))
        return results

    def _bad(self, op: str, what: str) -> SandboxLost:
        return SandboxLost(f"env command: {self._arguments[0]!r}, asked to {op}: {what}")


@dataclass(slots=True)
class CommandRoom:
    """Makes worlds; the programs are shared by the episodes that follow one another. `close` ends all of them."""

    request_s: float = REQUEST_S
    _programs: Programs = field(default_factory=Programs)

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer | None = None) -> CommandWorld:
        """The world of a task. Raises DataError for an env that names no program, or one that is not there."""
        return CommandWorld(self._programs, arguments_of(task.env), record.encode(), seed, request_s=self.request_s)

    def seconds(self, record: Record) -> None:
        """A task allows no time of its own."""

    def close(self) -> None:
        """Ends the programs; episodes under way get SandboxLost."""
        self._programs.close()


def arguments_of(env: str) -> tuple[str, ...]:
    """The program and its arguments in `command:PROG ARGS...`. Raises DataError."""
    try:
        arguments = tuple(shlex.split(env.partition(":")[2]))
    except ValueError as error:
        raise DataError(f"{env!r} cannot be split into arguments: {error}", field="env") from None
    if not arguments:
        raise DataError(f"{env!r} names no program; the env is written command:PROG ARGS...", field="env")
    if shutil.which(arguments[0]) is None:
        raise DataError(f"no such program, or not executable: {arguments[0]!r}", field="env")
    return arguments


def _told(call: Call | BadCall) -> dict[str, Any]:
    if isinstance(call, BadCall):
        return {"name": call.name, "arguments": {}, "valid": False, "error": call.message}
    return {"name": call.name, "arguments": call.arguments, "valid": True, "error": None}


def _messages(observation: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
