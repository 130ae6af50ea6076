"""The env `functions`: a user who asks in several turns, and simulated APIs that the policy calls (BFCL, multi-turn).

A message with calls gets their results; a message without a call ends the user's turn, and the next one follows, until
the last is over. A turn of more than 20 messages with calls ends the episode, and no turn passes (the package's
MAXIMUM_STEP_LIMIT). Functions that a case holds back come with their turn, which says "I have updated some more
functions you can choose from. What about now?".

An attempt is a success if after every turn for which the reference has calls (a) the policy has called something, (b)
its APIs are in the state of the reference's, and (c) it has seen, in this turn or before, all that the calls of the
reference answered. These are the assertions `turn N calls`, `turn N state`, `turn N response`; a turn that was not
reached fails.

The task's field `world` (see tasks/bfcl.py): `classes` of functions, `config` their first state by class, `turns` the
user's messages after the prompt, `held_back` names of functions by the number of their turn (text, from "0"),
`long_context`. The reference is {"calls": [["cd(folder='x')", ...], ...]}, one list a turn.

Two differences from the package's own loop: a call that cannot be read is answered with what is wrong, and the turn
goes on; and a function that is held back cannot be called before it is there.

The APIs run in a child process: some compute for hours if a policy wants it. A call that uses up its processor time or
kills the process is answered with an error, and the process is replaced by one to which all earlier calls are made
again, which brings it to the same state: the APIs draw from seeds of their own.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from strop.core.envs.children import Children
from strop.core.envs.tool_calls import BadCall, Call
from strop.core.envs.world import Opening, Outcome, ToolResult
from strop.core.errors import DataError
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.bfcl import data_folder, parse_call
from strop.core.tasks.reports import Assertion
from strop.core.tasks.verifiers.child import Child, ChildDied, ChildError, ChildTimeout
from strop.core.tasks.verifiers.verdict import Verdict

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

NAME = "functions"
WORKER = "strop.core.envs.functions_worker:worker"
CALL_LIMIT_S = 10.0
MOST_STEPS = 20
MORE_FUNCTIONS = "I have updated some more functions you can choose from. What about now?"

# The package's files of function docs, by class.
DOCS = {
    "GorillaFileSystem": "gorilla_file_system", "MathAPI": "math_api", "MessageAPI": "message_api",
    "TwitterAPI": "posting_api", "TicketAPI": "ticket_api", "TradingBot": "trading_bot",
    "TravelAPI": "travel_booking", "VehicleControlAPI": "vehicle_control",
}  # fmt: skip
# The package's type names as those of JSON Schema.
TYPES = {"dict": "object", "float": "number", "tuple": "array", "bool": "boolean", "list": "array"}

CHECKS = ("calls", "state", "response")


class Case(Struct, kw_only=True, forbid_unknown_fields=True):
    """The field `world` of a task."""

    classes: list[str]
    config: dict[str, dict[str, Any]] = {}
    turns: list[list[dict[str, Any]]] = []
    held_back: dict[str, list[str]] = {}
    long_context: bool = False


class Reference(Struct):
    """The field `reference` of a task."""

    calls: list[list[str]]


class FunctionsWorld:
    """One episode."""

    def __init__(
        self, children: Children, prompt: list[dict[str, Any]], case: Case, reference: Reference,
        tools: Mapping[str, dict[str, Any]],
    ) -> None:  # fmt: skip
        """`tools` by name, as chat templates take them: all of the case's classes."""
        self._children = children
        self._case = case
        self._turns = [prompt, *case.turns]
        self._reference = reference.calls
        self._all_tools = tools
        self._child: Child | None = None
        # All requests since the opening, to bring another child to the same state.
        self._log: list[dict[str, Any]] = []
        self._turn = 0
        self._num_steps = 0
        self._has_called = False
        self._found: dict[int, dict[str, bool]] = {}
        self._is_over = self._is_forced = False

    def reset(self) -> Opening:
        """Begins the first turn. Raises SandboxLost, Unavailable."""
        return self.restore({"log": []})

    def act(self, text: str, calls: Sequence[Call | BadCall], *, seconds_left: float) -> Outcome:
        """Runs the calls, or ends the turn where there are none. Raises SandboxLost, Unavailable."""
        if not calls:
            return self._end_turn()
        outcome = Outcome()
        for call in calls:
            if isinstance(call, BadCall):
                self._has_called |= call.name is not None
                outcome.results.append(ToolResult(call.message, valid=False))
            else:
                self._has_called = True
                outcome.results.append(self._call({"do": "call", "name": call.name, "arguments": call.arguments}))
        self._num_steps += 1
        if self._num_steps > MOST_STEPS:
            self._is_forced = outcome.done = True
        return outcome

    def judge(self) -> Verdict:
        """The verdict by the rule in the module's docstring."""
        assertions = []
        for turn, calls in enumerate(self._reference):
            found = {} if self._is_forced else self._found.get(turn, {})
            for check in CHECKS if calls else ():
                status = "passed" if found.get(check) else "failed"
                assertions.append(Assertion(f"turn {turn + 1} {check}", status))
        success = self._is_over and all(assertion.status == "passed" for assertion in assertions)
        details = {"turns": len(self._found), **({"forced": True} if self._is_forced else {})}
        return Verdict(float(success), success, details, assertions=assertions)

    def snapshot(self) -> dict[str, Any]:
        """The episode so far as JSON, to `restore` later, in this world or another of the same task."""
        return copy.deepcopy({
            "log": self._log, "turn": self._turn, "num_steps": self._num_steps, "has_called": self._has_called,
            "found": [[turn, found] for turn, found in self._found.items()], "is_over": self._is_over,
            "is_forced": self._is_forced,
        })  # fmt: skip

    def restore(self, snapshot: Mapping[str, Any]) -> Opening:
        """Goes on from a snapshot, by making all its calls again. Raises SandboxLost, Unavailable."""
        self._log = copy.deepcopy(snapshot["log"])
        self._turn = snapshot.get("turn", 0)
        self._num_steps = snapshot.get("num_steps", 0)
        self._has_called = snapshot.get("has_called", False)
        self._found = {turn: dict(found) for turn, found in snapshot.get("found", [])}
        self._is_over, self._is_forced = snapshot.get("is_over", False), snapshot.get("is_forced", False)
        self._rebuild()
        return Opening(self._messages(), self._tools())

    def close(self) -> None:
        """Gives the child back; may be called again."""
        child, self._child = self._child, None
        if child is not None:
            self._children.give(child)

    def _end_turn(self) -> Outcome:
        request = {"do": "turn", "calls": self._reference[self._turn]}
        self._found[self._turn] = {**self._ask(request), "calls": self._has_called}
        self._log.append(request)
        self._turn += 1
        self._num_steps, self._has_called = 0, False
        if self._turn == len(self._turns):
            self._is_over = True
            return Outcome(done=True, stop="agent")
        tools = self._tools() if str(self._turn) in self._case.held_back else None
        return Outcome(messages=self._messages(), tools=tools)

    def _messages(self) -> list[dict[str, Any]]:
        turn = min(self._turn, len(self._turns) - 1)
        return copy.deepcopy(self._turns[turn]) or [{"role": "user", "content": MORE_FUNCTIONS}]

    def _tools(self) -> list[dict[str, Any]]:
        """The functions of this turn; those that were held back stand at the end, as in the package."""
        turns = sorted(self._case.held_back, key=int)
        late = {name: int(turn) for turn in turns for name in self._case.held_back[turn]}
        names = [name for name in self._all_tools if name not in late]
        names += [name for name, turn in late.items() if turn <= self._turn]
        return [copy.deepcopy(self._all_tools[name]) for name in names]

    def _call(self, request: dict[str, Any]) -> ToolResult:
        """A call that ends the process is the policy's affair where all earlier ones can be made again."""
        try:
            try:
                text, is_run = self._child_now().call(request)
            except ChildDied:
                # Somebody else may have killed it.
                self._rebuild()
                text, is_run = self._child_now().call(request)
        except ChildTimeout:
            self._rebuild()
            return ToolResult("Error during execution: the call took too long", valid=False)
        except ChildError as error:
            self._rebuild()
            return ToolResult(f"Error during execution: {error}", valid=False)
        self._log.append(request)
        return ToolResult(text, valid=is_run)

    def _ask(self, request: dict[str, Any]) -> Any:
        try:
            return self._child_now().call(request)
        except ChildError as error:
            raise SandboxLost(f"env functions: {error}") from None

    def _child_now(self) -> Child:
        if self._child is None:
            raise SandboxLost("env functions: the episode is closed")
        return self._child

    def _rebuild(self) -> None:
        if self._child is None:
            self._child = self._children.take()
        case = self._case
        self._ask({"do": "open", "classes": case.classes, "config": case.config, "long_context": case.long_context})
        for request in self._log:
            self._ask(request)


@dataclass(slots=True)
class FunctionsRoom:
    """Makes worlds; the child processes are shared by the episodes that follow one another. `close` ends them."""

    _children: Children = field(default_factory=lambda: Children(WORKER, cpu_limit_s=CALL_LIMIT_S, confined=True))
    _tools: dict[str, dict[str, dict[str, Any]]] = field(default_factory=dict)

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer | None = None) -> FunctionsWorld:
        """The world of a task. Raises DataError for one that is not whole, Unavailable without bfcl-eval."""
        case = _convert(task.world, Case, "world")
        reference = _convert(task.reference, Reference, "reference")
        prompt = [{"role": "user", "content": task.prompt}] if isinstance(task.prompt, str) else task.prompt
        if not prompt:
            raise DataError("missing; the user's first message", field="prompt")
        if len(reference.calls) != len(case.turns) + 1:
            words = f"{len(reference.calls)} turns; the user has {len(case.turns) + 1}"
            raise DataError(words, field="reference.calls")
        tools: dict[str, dict[str, Any]] = {}
        for i, name in enumerate(case.classes):
            if name not in DOCS:
                raise DataError(f"unknown class {name!r} (known: {', '.join(DOCS)})", field=f"world.classes[{i}]")
            tools |= self._of_class(name)
        for turn, names in case.held_back.items():
            unknown = [name for name in names if name not in tools]
            if not turn.isdecimal() or unknown:
                raise DataError(f"turn {turn!r} holds back {unknown or names}", field="world.held_back")
        for turn, calls in enumerate(reference.calls):
            for text in calls:
                _check_call(text, tools, f"reference.calls[{turn}]")
        return FunctionsWorld(self._children, prompt, case, reference, tools)

    def seconds(self, record: Record) -> None:
        """A task allows no time of its own."""

    def close(self) -> None:
        """Ends the child processes."""
        self._children.close()

    def _of_class(self, name: str) -> dict[str, dict[str, Any]]:
        if name not in self._tools:
            file = data_folder() / "multi_turn_func_doc" / f"{DOCS[name]}.json"
            docs = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
            self._tools[name] = {doc["name"]: tool_of(doc) for doc in docs}
        return self._tools[name]


def tool_of(doc: Mapping[str, Any]) -> dict[str, Any]:
    """A function of the package's docs as chat templates take it (the package's convert_to_tool)."""
    return {"type": "function", "function": {**doc, "parameters": _schema(doc["parameters"])}}


def _schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    made = dict(schema)
    if "type" in made:
        made["type"] = TYPES.get(made["type"], made["type"])
    if schema.get("type") == "float":
        made |= {"format": "float", "description": made.get("description", "") + " This is a float type value."}
    if "properties" in made:
        made["properties"] = {name: _schema(member) for name, member in made["properties"].items()}
    if "items" in made:
        made["items"] = _schema(made["items"])
    return made


def _check_call(text: str, tools: Mapping[str, Any], where: str) -> None:
    try:
        name = parse_call(text)[0]
    except ValueError as error:
        raise DataError(str(error), field=where) from None
    if name not in tools:
        raise DataError(f"there is no function {name!r}", field=where)


def _convert(value: Any, kind: Any, where: str) -> Any:
    if value is None:
        raise DataError("missing; tasks of the env functions have it (see strop synth-tasks bfcl:...)", field=where)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DataError(message, field=where + path.rstrip("`")) from None
