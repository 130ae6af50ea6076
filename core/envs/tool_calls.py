"""Tool calls, read from the model's own words and answered in its template's words.

Three formats: "hermes" (Hermes, Qwen: JSON between tags), "xml" (Qwen3-Coder: tagged parameters between tags) and
"bash" (fenced blocks; the single-tool profile, for models whose template knows no tools):

    <tool_call>                          <tool_call>                     ```bash
    {"name": "Read",                     <function=Read>                 cat a.txt
     "arguments": {"path": "a.txt"}}     <parameter=path>                ```
    </tool_call>                         a.txt
                                         </parameter>
                                         </function>
                                         </tool_call>

A call that cannot be run is a `BadCall` with the words that go back to the model; nothing a model says is an exception.
(FrogNano's released harness takes malformed arguments for {}; here the model is told.) Reading is linear in the text:
each marker is searched once over it, and no expression backtracks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import msgspec

from strop.core.envs.tool_schemas import MAX_NAME, Tools, argument_problem, kind_of, mapping_of, types_of

Format = Literal["hermes", "xml", "bash"]

BASH_TOOL = "bash"
# More calls in one message than this are a loop the model fell into, and each of them would be answered.
MAX_CALLS = 128

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = re.compile(r"[ \t\r\n]*+")
_CALL_OPEN = re.compile(re.escape(OPEN))
_CALL_CLOSE = re.compile(re.escape(CLOSE))
# A value may hold the text "</parameter>"; its end is the one after which the call goes on.
_VALUE_END = re.compile(r"</parameter>[ \t\r\n]*+(?:<parameter=|</function>)")
_CALL_BEGINS = re.compile(r"<tool_call>[ \t\r\n]*+<function=")
_FENCE = re.compile(r"```+")
_json = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class Call:
    """A call that can be run; `raw` is the text it was read from."""

    name: str
    arguments: dict[str, Any]
    raw: str = ""
    valid: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class BadCall:
    """A call that cannot be run. `message` tells the model what is wrong; `name` is the tool, where one was named."""

    message: str
    raw: str = ""
    name: str | None = None
    valid: ClassVar[bool] = False


@dataclass(slots=True)
class ParsedMessage:
    """A message taken apart: reasoning, text around the calls (both without white space around), calls in order."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call | BadCall] = field(default_factory=list)


def detect_format(chat_template: str | None) -> Format | None:
    """The format in which a chat template shows tool calls; None where it knows no tools, or another format.

    A template of None (a base model) and one without tools leave "bash", which needs nothing of the template.
    """
    text = (chat_template or "").replace('\\"', '"')
    if "<function=" in text and "<parameter=" in text:
        return "xml"
    # Others (GLM) put something else than JSON between the same tags.
    if OPEN in text and '"name"' in text and '"arguments"' in text and "<arg_key>" not in text:
        return "hermes"
    return "bash" if "```bash" in text else None


def has_tool_role(chat_template: str | None) -> bool:
    """Whether a chat template treats messages of the role "tool" apart from others."""
    return any(word in (chat_template or "") for word in ("'tool'", '"tool"'))


def parse_message(
    text: str, form: Format, tools: Tools | None = None, *, reasoning_is_open: bool = False
) -> ParsedMessage:
    """What a model's message says: reasoning, text, and calls, each checked against `tools` (None: not checked).

    `text` is the message without its end token. Reasoning is what stands in a leading <think>...</think>;
    `reasoning_is_open` says that the prompt has already opened it. Calls inside it are thoughts and are not read;
    reasoning without an end is all of the message. Never raises.
    """
    reasoning, rest = split_reasoning(text, is_open=reasoning_is_open)
    found = _parse_fenced(rest) if form == "bash" else _parse_tagged(rest, form, tools)
    found.reasoning = reasoning.strip()
    found.calls = [_check_call(call, tools) if isinstance(call, Call) else call for call in found.calls]
    return found


def split_reasoning(text: str, *, is_open: bool = False) -> tuple[str, str]:
    """The leading <think>...</think> of a message without its tags, and what follows; see `parse_message`."""
    start = _skip_space(text, 0)
    if text.startswith("<think>", start):
        start += len("<think>")
    elif not is_open:
        return "", text
    end = text.find("</think>", start)
    return (text[start:], "") if end < 0 else (text[start:end], text[end + len("</think>") :])


def render_call(call: Call, form: Format) -> str:
    """A call as the model writes it in a format. Raises ValueError for what the format cannot hold."""
    if form == "hermes":
        body = json.dumps({"name": call.name, "arguments": call.arguments}, ensure_ascii=False, allow_nan=False)
        return f"{OPEN}\n{body}\n{CLOSE}"
    if form == "bash":
        command = call.arguments.get("command")
        if call.name != BASH_TOOL or set(call.arguments) != {"command"} or not isinstance(command, str):
            raise ValueError(f"a fenced block holds a call of {BASH_TOOL} with a command, nothing else")
        fence = "`" * max(3, *(len(run) + 1 for run in ["", *_FENCE.findall(command)]))
        return f"{fence}bash\n{command}\n{fence}"
    values = {
        key: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, allow_nan=False)
        for key, value in call.arguments.items()
    }
    parameters = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    text = f"{OPEN}\n<function={call.name}>\n{parameters}</function>\n{CLOSE}"
    if _parse_tagged(text, form, None).calls != [Call(call.name, dict(values), text)]:
        raise ValueError("a name or value holds tags of the format itself")
    return text


def result_messages(
    results: Sequence[tuple[Call | BadCall, str]], form: Format, *, tool_role: bool
) -> list[dict[str, Any]]:
    """The chat messages that hand results back, in order of the calls; the result of a `BadCall` is its `message`.

    `tool_role` (see `has_tool_role`): a message of the role "tool" each. Else all go into one message of the user: in
    <tool_response> tags, as templates that know the role write it themselves; in the format "bash", which needs no
    tools of the template, always and without tags.
    """
    if not results:
        return []
    if tool_role and form != "bash":
        return [{"role": "tool", "name": call.name or "", "content": text} for call, text in results]
    if form == "bash":
        return [{"role": "user", "content": "\n\n".join(text for _, text in results)}]
    tagged = [f"<tool_response>\n{text}\n</tool_response>" for _, text in results]
    return [{"role": "user", "content": "\n".join(tagged)}]


# --- calls between tags


class _Next:
    """Where a marker stands next. Asked for growing positions, it searches each part of the text once."""

    def __init__(self, text: str, marker: re.Pattern[str]) -> None:
        self._text = text
        self._marker = marker
        self._found = -1
        self._is_over = False

    def at_or_after(self, position: int) -> int | None:
        if self._found < position and not self._is_over:
            match = self._marker.search(self._text, position)
            self._is_over = match is None
            self._found = match.start() if match else -1
        return None if self._is_over else self._found


class _Malformed(Exception):  # noqa: N818 (never leaves this module)
    """The call cannot be read; the words for the model."""


def _parse_tagged(text: str, form: Format, tools: Tools | None) -> ParsedMessage:
    pieces: list[str] = []
    calls: list[Call | BadCall] = []
    opens, closes = _Next(text, _CALL_OPEN), _Next(text, _CALL_CLOSE)
    reader = _XmlReader(text, tools) if form == "xml" else _HermesReader(text)
    position = 0
    while (start := opens.at_or_after(position)) is not None:
        pieces.append(text[position:start])
        if len(calls) >= MAX_CALLS:
            message = f"There are more than {MAX_CALLS} tool calls in one message; the rest was not read."
            calls.append(BadCall(message, text[start:]))
            return ParsedMessage("".join(pieces).strip(), calls=calls)
        try:
            found, end = reader.read(start + len(OPEN))
            # An end of the message right after the call closes it too: the end tag may have been the stop string.
            if text.startswith(CLOSE, end):
                end += len(CLOSE)
            elif end < len(text):
                raise _Malformed(f"after the call comes something else than {CLOSE}")
            position = end
            calls += [Call(name, arguments, text[start:end]) for name, arguments in found]
        except _Malformed as problem:
            # Nothing of a malformed call is run, also not what looks like a call inside it.
            close = closes.at_or_after(start)
            position = len(text) if close is None else close + len(CLOSE)
            calls.append(BadCall(f"The tool call was not run: {problem}.", text[start:position]))
    pieces.append(text[position:])
    return ParsedMessage("".join(pieces).strip(), calls=calls)


class _HermesReader:
    """{"name": ..., "arguments": {...}}, or a list of such objects."""

    def __init__(self, text: str) -> None:
        self._text = text

    def read(self, position: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """The calls that begin at `position`, and where their text ends."""
        start = _skip_space(self._text, position)
        try:
            # The scanner finds the end (a string may hold the end tag); msgspec refuses what is no JSON for others.
            _, end = _json.raw_decode(self._text, start)
            value = msgspec.json.decode(self._text[start:end])
        except json.JSONDecodeError as error:
            raise _Malformed(f"it is not JSON ({error.msg}, character {error.pos - start})") from None
        except (ValueError, RecursionError) as error:
            raise _Malformed(f"it is not JSON ({str(error)[:MAX_NAME]})") from None
        members = value if isinstance(value, list) else [value]
        if not 0 < len(members) <= MAX_CALLS:
            raise _Malformed(f"a list of {len(members)} calls")
        return [self._member(member) for member in members], _skip_space(self._text, end)

    @staticmethod
    def _member(value: Any) -> tuple[str, dict[str, Any]]:
        if not isinstance(value, dict) or not isinstance(value.get("name"), str):
            raise _Malformed('it has to be an object {"name": "...", "arguments": {...}}')
        arguments = value.get("arguments", {})
        if not isinstance(arguments, dict):
            raise _Malformed(f'"arguments" has to be an object, not {kind_of(arguments)}')
        return value["name"], arguments


class _XmlReader:
    """<function=NAME> with a <parameter=KEY> for each argument."""

    def __init__(self, text: str, tools: Tools | None) -> None:
        self._text = text
        self._tools = tools or {}
        self._ends, self._calls = _Next(text, _VALUE_END), _Next(text, _CALL_BEGINS)

    def read(self, position: int) -> tuple[list[tuple[str, dict[str, Any]]], int]:
        """The call that begins at `position`, and where its text ends."""
        name, position = self._tag("function", _skip_space(self._text, position))
        properties = mapping_of(self._tools.get(name, {}).get("properties"))
        arguments: dict[str, Any] = {}
        while self._text.startswith("<parameter=", position):
            key, value_start = self._tag("parameter", position, skip=False)
            end = self._ends.at_or_after(value_start)
            inner = self._calls.at_or_after(value_start)
            # A value that runs on into the next call has lost its end; better to say so than to write a wrong file.
            if end is None or (inner is not None and inner < end):
                words = "is not closed by </parameter> and then </function> or the next parameter"
                raise _Malformed(f"the parameter {key[:MAX_NAME]!r} {words}")
            if key in arguments:
                raise _Malformed(f"the parameter {key[:MAX_NAME]!r} is given twice")
            value = self._text[value_start:end].removeprefix("\n").removesuffix("\n")
            arguments[key] = _from_text(value, mapping_of(properties.get(key)))
            position = _skip_space(self._text, end + len("</parameter>"))
        if not self._text.startswith("</function>", position):
            raise _Malformed("where a <parameter=...> or </function> should stand is something else")
        return [(name, arguments)], _skip_space(self._text, position + len("</function>"))

    def _tag(self, word: str, position: int, *, skip: bool = True) -> tuple[str, int]:
        start = position + len(word) + 2
        end = self._text.find(">", start, start + MAX_NAME + 1)
        if end <= start or not self._text.startswith(f"<{word}=", position):
            raise _Malformed(f"it has to be <{word}=NAME> and so on")
        return self._text[start:end].strip(), _skip_space(self._text, end + 1) if skip else end + 1


def _from_text(value: str, schema: Mapping[str, Any]) -> Any:
    """A parameter's text as the type that the schema asks for; text stays text, and so does what cannot be read."""
    types = types_of(schema)
    spelled = value.strip()
    if "null" in types and spelled in ("null", "None"):
        return None
    if not types or "string" in types:
        return value
    if "boolean" in types and spelled in ("True", "False"):
        return spelled == "True"
    try:
        return msgspec.json.decode(spelled)
    except (ValueError, RecursionError):
        return value


# --- fenced blocks


def _parse_fenced(text: str) -> ParsedMessage:
    pieces: list[str] = []
    calls: list[Call | BadCall] = []
    position = kept = 0
    while (fence := _next_fence(text, position)) is not None:
        start, num_ticks, info, body = fence
        position = body
        if "`" in info:
            continue
        end, position = _closing_fence(text, body, num_ticks)
        if info != "bash":
            continue
        pieces.append(text[kept:start])
        kept = position
        raw = text[start:position]
        if len(calls) >= MAX_CALLS:
            calls.append(BadCall(f"There are more than {MAX_CALLS} blocks in one message; the rest was not run.", raw))
            break
        if end is None:
            calls.append(BadCall("The block was not run: it has no closing fence.", raw, BASH_TOOL))
        elif not (command := text[body:end].removesuffix("\n")).strip():
            calls.append(BadCall("The block was not run: it is empty.", raw, BASH_TOOL))
        else:
            calls.append(Call(BASH_TOOL, {"command": command}, raw))
    pieces.append(text[kept:])
    return ParsedMessage("".join(pieces).strip(), calls=calls)


def _next_fence(text: str, position: int) -> tuple[int, int, str, int] | None:
    """The next run of backticks at the start of a line (up to three spaces before it, as in CommonMark).

    Its place and length, the rest of its line, and where the next line begins.
    """
    while (match := _FENCE.search(text, position)) is not None:
        start, position = match.span()
        indented = text[max(0, start - 4) : start].rpartition("\n")
        if not indented[2].strip(" ") and (indented[1] or start <= 3):
            line_end = text.find("\n", position)
            line_end = len(text) if line_end < 0 else line_end
            return start, position - start, text[position:line_end].strip(), min(len(text), line_end + 1)
    return None


def _closing_fence(text: str, position: int, num_ticks: int) -> tuple[int | None, int]:
    """Where the line of the fence that closes a block begins, and where that line ends; (None, end) without one."""
    while (fence := _next_fence(text, position)) is not None:
        start, length, info, position = fence
        if length >= num_ticks and not info:
            return text.rfind("\n", 0, start) + 1, position
    return None, len(text)


# --- both


def _check_call(call: Call, tools: Tools | None) -> Call | BadCall:
    if tools is None:
        return call
    name = call.name[:MAX_NAME]
    if call.name not in tools:
        return BadCall(f"There is no tool {name!r}; the tools are: {', '.join(sorted(tools))}.", call.raw, name)
    problem = argument_problem(call.arguments, tools[call.name])
    return call if problem is None else BadCall(f"{name} was not run: {problem}.", call.raw, name)


def _skip_space(text: str, position: int) -> int:
    match = _SPACE.match(text, position)
    return match.end() if match else position
