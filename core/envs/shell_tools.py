"""The tools of the env `shell` on a sandbox: Read, Write, Edit, Glob, Bash (FrogNano's Leaf, section 1.4), and `bash`.

What a tool says is text for the model, errors included; what the machine does wrong is SandboxLost. The limits are
those of the released harness: a file is cut at 20,000 characters, a command's output at 30,000, a list at 1,000 files,
and a command has 120 s unless the call says otherwise (more than 1,000 is taken for milliseconds).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from strop.core.envs.tool_calls import BASH_TOOL, BadCall, Call
from strop.core.envs.tool_schemas import Tools, tool_schemas
from strop.core.envs.world import ToolResult
from strop.core.sandbox.protocol import Sandbox, SandboxRefused

READ_CHARS = 20_000
OUTPUT_CHARS = 30_000
GLOB_FILES = 1_000
PATTERN_CHARS = 1_000
NOTHING = re.compile(r"(?!)")
COMMAND_S = 120.0
MOST_SECONDS = 1_000.0
# Linux gives a program no argument of more bytes than this, its end included.
COMMAND_BYTES = 128 << 10


def _tool(name: str, description: str, required: tuple[str, ...], **properties: tuple[str, str]) -> dict[str, Any]:
    arguments = {key: {"type": kind, "description": text} for key, (kind, text) in properties.items()}
    parameters = {"type": "object", "properties": arguments, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


LEAF = [
    _tool("Read", "Read a text file. Lines come numbered from 1.", ("path",), path=("string", "The file."),
          offset=("integer", "The first line to show."), limit=("integer", "How many lines to show.")),
    _tool("Write", "Write a text file; what was in it is replaced.", ("path", "content"), path=("string", "The file."),
          content=("string", "All of its new text.")),
    _tool("Edit", "Replace a text in a file. It has to occur exactly once, unless replace_all is true.",
          ("path", "old_string", "new_string"), path=("string", "The file."), old_string=("string", "What is there."),
          new_string=("string", "What shall be there."), replace_all=("boolean", "Replace it wherever it occurs.")),
    _tool("Glob", "List files by a pattern such as **/*.py.", ("pattern",), pattern=("string", "The pattern."),
          path=("string", "The folder to search.")),
    _tool("Bash", "Run a command in bash.", ("command",), command=("string", "The command."),
          timeout=("number", "Seconds it may take.")),
]  # fmt: skip
FENCED = [_tool(BASH_TOOL, "Run a command in bash.", ("command",), command=("string", "The command."))]


@dataclass(frozen=True, slots=True)
class Profile:
    """A set of tools: as chat templates take it, and by name with argument schemas."""

    name: str
    tools: list[dict[str, Any]]
    schemas: Tools

    @property
    def fenced(self) -> bool:
        """Whether a call is a block of bash, which needs nothing of the chat template."""
        return self.tools is FENCED


PROFILES = {name: Profile(name, tools, tool_schemas(tools)) for name, tools in (("leaf", LEAF), ("bash", FENCED))}


def run_call(call: Call | BadCall, sandbox: Sandbox, *, seconds_left: float | None = None) -> ToolResult:
    """Runs a call. `seconds_left` bounds a command from above; whatever comes of it is cut. Raises SandboxLost."""
    if isinstance(call, BadCall):
        return ToolResult(call.message, valid=False)
    try:
        result = _RUN[call.name](sandbox, call.arguments, seconds_left)
    except SandboxRefused as error:
        result = ToolResult(f"Error: {error}", valid=False)
    except FileNotFoundError:
        result = ToolResult(f"Error: there is no file {call.arguments.get('path')}", valid=False)
    return ToolResult(_cut(result.text, OUTPUT_CHARS), result.valid)


def _read(sandbox: Sandbox, arguments: Mapping[str, Any], _: float | None) -> ToolResult:
    data = sandbox.get(arguments["path"])
    if b"\0" in data[:8192]:
        return ToolResult(f"Error: {arguments['path']} is not text ({len(data)} bytes)", valid=False)
    first = max(int(arguments.get("offset") or 1), 1)
    lines = data.decode("utf-8", "replace").split("\n")
    if lines and not lines[-1]:
        lines.pop()
    last = len(lines) if arguments.get("limit") is None else first - 1 + max(int(arguments["limit"]), 0)
    text = "\n".join(f"{number:6}\t{line}" for number, line in enumerate(lines[first - 1 : last], first))
    return ToolResult(_cut(text, READ_CHARS) or "(no lines)")


def _write(sandbox: Sandbox, arguments: Mapping[str, Any], _: float | None) -> ToolResult:
    data = arguments["content"].encode("utf-8", "surrogatepass")
    sandbox.put(arguments["path"], data)
    return ToolResult(f"Wrote {len(data)} bytes to {arguments['path']}")


def _edit(sandbox: Sandbox, arguments: Mapping[str, Any], _: float | None) -> ToolResult:
    old, new = arguments["old_string"], arguments["new_string"]
    if not old:
        return ToolResult("Error: old_string is empty; Write makes a file", valid=False)
    # Bytes that are no UTF-8 stay what they were.
    text = sandbox.get(arguments["path"]).decode("utf-8", "surrogateescape")
    found = text.count(old)
    if not found:
        return ToolResult(f"Error: old_string does not occur in {arguments['path']}", valid=False)
    if found > 1 and not arguments.get("replace_all"):
        return ToolResult(f"Error: old_string occurs {found} times; give more of it, or replace_all", valid=False)
    sandbox.put(arguments["path"], text.replace(old, new).encode("utf-8", "surrogateescape"))
    return ToolResult(f"Replaced {found} in {arguments['path']}")


def _glob(sandbox: Sandbox, arguments: Mapping[str, Any], _: float | None) -> ToolResult:
    folder = arguments.get("path") or "."
    if len(arguments["pattern"]) > PATTERN_CHARS:
        return ToolResult(f"Error: a pattern has at most {PATTERN_CHARS} characters", valid=False)
    find = ["find", "-L", sandbox.path(folder), "-type", "f", "-printf", "%P\\0"]
    done = sandbox.exec(find, timeout_s=COMMAND_S, output_bytes=1 << 23)
    if done.timed_out or (done.exit_code and not done.stdout):
        reason = "it took too long" if done.timed_out else done.stderr.decode("utf-8", "replace").strip()
        return ToolResult(f"Error: {_cut(reason, 500)}", valid=False)
    matches = _glob_matcher(arguments["pattern"])
    names = (name for name in done.stdout.decode("utf-8", "replace").split("\0") if name)
    found = sorted(name for name in names if matches(name))
    shown = [name if folder == "." else f"{folder.rstrip('/')}/{name}" for name in found[:GLOB_FILES]]
    more = [f"({len(found) - GLOB_FILES} more)"] if len(found) > GLOB_FILES else []
    return ToolResult("\n".join([*shown, *more]) or "No files match.")


def _glob_matcher(pattern: str) -> Callable[[str], bool]:
    """A folder of `**` is any number of folders, `*` and `?` stay within one name, `[...]` is a class.

    Parts are matched from left to right, all ways at once: a policy's pattern cannot make it slow.
    """
    parts = pattern.removeprefix("./").split("/")
    wanted = [None if part == "**" else re.compile(fnmatch.translate(part.replace("[^", "[!"))) for part in parts]

    def skipping(places: set[int]) -> set[int]:
        """Also the places behind a `**` that stands for no folder; the last one stands for something."""
        found = set(places)
        for place in sorted(places):
            while place < len(wanted) - 1 and wanted[place] is None:
                place += 1
                found.add(place)
        return found

    def matches(path: str) -> bool:
        places = skipping({0})
        for name in path.split("/"):
            after = set()
            for place in places:
                part = wanted[place] if place < len(wanted) else NOTHING
                if part is None:
                    after |= {place, place + 1} if place == len(wanted) - 1 else {place}
                elif part.match(name):
                    after.add(place + 1)
            places = skipping(after)
        return len(wanted) in places

    return matches


def _bash(sandbox: Sandbox, arguments: Mapping[str, Any], seconds_left: float | None) -> ToolResult:
    command = arguments["command"]
    if "\0" in command or len(command.encode("utf-8", "surrogatepass")) >= COMMAND_BYTES:
        return ToolResult(f"Error: a command is a text of less than {COMMAND_BYTES} bytes without NUL", valid=False)
    asked = arguments.get("timeout")
    seconds = COMMAND_S if not asked or asked <= 0 else float(asked)
    if seconds > MOST_SECONDS:
        seconds /= 1000
    if seconds_left is not None:
        seconds = min(seconds, max(seconds_left, 0.1))
    done = sandbox.exec(["bash", "-lc", command], timeout_s=seconds, output_bytes=4 * OUTPUT_CHARS)
    code = f"timed out after {seconds:g} s" if done.timed_out else f"exit code: {done.exit_code}"
    parts = [code]
    for name, data in ("stdout", done.stdout), ("stderr", done.stderr):
        if data:
            parts.append(f"{name}:\n{data.decode('utf-8', 'replace')}")
    return ToolResult("\n".join(parts))


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n[{len(text) - limit} characters left out]"


_RUN: dict[str, Callable[[Sandbox, Mapping[str, Any], float | None], ToolResult]] = {
    "Read": _read, "Write": _write, "Edit": _edit, "Glob": _glob, "Bash": _bash, BASH_TOOL: _bash,
}  # fmt: skip
