"""The verifier `command`: any program judges.

It is started for each response with one JSON object on stdin,

    {"task": THE TASK RECORD, "response": "..."}

and answers with one JSON object on stdout,

    {"reward": 0.5, "success": false, "details": {...}}

`success` may be left out: it is then reward >= 1. A program that cannot judge says {"error": "why"}. Anything else - an
exit status other than 0, an answer that is no verdict, more than a mebibyte of it, no end within `timeout_s` - is an
error of the attempt and never a reward of 0. When the time is up the whole process group is killed.

The program runs with the rights of the user, in the folder strop was started in. A task names it, so tasks that carry
this verifier are as trusted as a script: read those of strangers first.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shlex
import shutil
import signal
import subprocess
import threading
import time
from typing import TYPE_CHECKING, Any

import msgspec

from strop.core.errors import DataError
from strop.core.tasks.verifiers.verdict import Options, Verdict, options_of, shown

if TYPE_CHECKING:
    from strop.core.records import Record, Task

MOST_ANSWER_BYTES = 1 << 20
# The end of what the program said on stderr, for the error message.
TOLD_BYTES = 500
BLOCK_BYTES = 1 << 16


class CommandOptions(Options):
    """`command`: a list of arguments, or a text split as a shell would split it (no shell runs)."""

    command: str | list[str]
    timeout_s: float = 60.0


class Answer(msgspec.Struct):
    """What the program may say."""

    reward: float | None = None
    success: bool | None = None
    details: dict[str, Any] = {}
    error: str | None = None


class CommandVerifier:
    """Runs one program a response; calls of several threads run side by side."""

    def __init__(self) -> None:
        self._running: set[subprocess.Popen[bytes]] = set()
        self._lock = threading.Lock()
        self._closed = False

    def check(self, task: Task) -> None:
        """Raises DataError for options that do not fit, and for a program that is not there."""
        options = options_of(task, CommandOptions)
        if options.timeout_s <= 0:
            raise DataError("must be positive", field="verifier.timeout_s")
        program = _arguments(options)[0]
        if shutil.which(program) is None:
            raise DataError(f"no such program, or not executable: {program!r}", field="verifier.command")

    def require(self) -> None:
        """Nothing is needed; the program is looked for in `check`."""

    def __call__(self, response: str, task: Task, record: Record) -> Verdict:
        """What the program finds."""
        options = options_of(task, CommandOptions)
        raw = msgspec.Raw(record.encode())
        question = msgspec.json.encode({"task": raw, "response": response}) + b"\n"
        try:
            answer = self._run(_arguments(options), question, options.timeout_s)
        except _Failed as failure:
            return Verdict.failed(f"verifier command: {failure}")
        return _verdict(answer)

    def close(self) -> None:
        """Kills what still runs; calls that wait for it return an error, and so do later ones."""
        with self._lock:
            self._closed = True
            for process in self._running:
                kill_group(process)

    def _run(self, arguments: list[str], question: bytes, timeout_s: float) -> bytes:
        with self._lock:
            if self._closed:
                raise _Failed("stopped")
            try:
                process = subprocess.Popen(
                    arguments,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,
                    bufsize=0,
                )
            except OSError as error:
                raise _Failed(f"cannot start {arguments[0]!r}: {error.strerror}") from None
            self._running.add(process)
        try:
            answer, told = _converse(process, question, time.monotonic() + timeout_s)
        except TimeoutError:
            raise _Failed(f"no verdict within {timeout_s:g} s") from None
        finally:
            # The program may have left helpers behind, and these may hold its pipes: all of its group goes. Only
            # then is it reaped: until then its number cannot belong to anybody else.
            with self._lock:
                if process.returncode is None:
                    kill_group(process)
                status = process.wait()
                self._running.discard(process)
            for pipe in (process.stdin, process.stdout, process.stderr):
                if pipe is not None:
                    pipe.close()
        if status != 0:
            how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
            raise _Failed(f"{arguments[0]!r} {how}{_said(told)}")
        return answer


class _Failed(Exception):  # noqa: N818
    """The program gave no verdict."""


def _arguments(options: CommandOptions) -> list[str]:
    try:
        arguments = shlex.split(options.command) if isinstance(options.command, str) else options.command
    except ValueError as error:
        raise DataError(f"cannot be split into arguments: {error}", field="verifier.command") from None
    if not arguments:
        raise DataError("names no program", field="verifier.command")
    return arguments


def _converse(process: subprocess.Popen[bytes], question: bytes, deadline: float) -> tuple[bytes, bytes]:
    """Writes the question while it reads; gives the answer and the end of what was said on stderr.

    Ends when the program has ended, even where a process that it left behind holds the pipes.
    """
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    answer, told, unsent = bytearray(), bytearray(), memoryview(question)
    with selectors.DefaultSelector() as selector:
        os.set_blocking(process.stdin.fileno(), False)
        selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ, answer)
        selector.register(process.stderr, selectors.EVENT_READ, told)
        while any(key.events & selectors.EVENT_READ for key in selector.get_map().values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                raise TimeoutError
            events = selector.select(min(left_s, 0.2))
            if not events and has_ended(process):
                break
            for key, _ in events:
                if key.events & selectors.EVENT_WRITE:
                    unsent = _send(process, selector, unsent)
                elif block := os.read(key.fd, BLOCK_BYTES):
                    key.data.extend(block)
                else:
                    selector.unregister(key.fileobj)
            del told[:-TOLD_BYTES]
            if len(answer) > MOST_ANSWER_BYTES:
                raise _Failed(f"an answer of more than {MOST_ANSWER_BYTES} bytes")
    while not has_ended(process):
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.01)
    return bytes(answer), bytes(told)


def has_ended(process: subprocess.Popen[bytes]) -> bool:
    """Whether it has ended; it is left unreaped where the system knows how (not on old macOS)."""
    if not hasattr(os, "waitid"):
        return process.poll() is not None
    return os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _send(process: subprocess.Popen[bytes], selector: selectors.BaseSelector, unsent: memoryview) -> memoryview:
    assert process.stdin is not None
    with contextlib.suppress(BlockingIOError):
        try:
            unsent = unsent[os.write(process.stdin.fileno(), unsent[:BLOCK_BYTES]) :]
        except BrokenPipeError:
            # It does not read its question: that is its own affair.
            unsent = unsent[:0]
    if not unsent:
        selector.unregister(process.stdin)
        process.stdin.close()
    return unsent


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kills a process that leads a group, and all of the group. It must not have been reaped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _verdict(answer: bytes) -> Verdict:
    try:
        said = msgspec.json.decode(answer, type=Answer)
    except msgspec.DecodeError as error:
        return Verdict.failed(f"verifier command: not a verdict ({error}): {_quoted(answer)}")
    if said.error is not None:
        return Verdict.failed(f"verifier command: {said.error}")
    if said.reward is None:
        return Verdict.failed(f'verifier command: no "reward" in {_quoted(answer)}')
    success = said.reward >= 1 if said.success is None else said.success
    return Verdict(said.reward, success, said.details)


def _quoted(answer: bytes) -> str:
    return repr(shown(answer.decode("utf-8", "replace").strip()))


def _said(told: bytes) -> str:
    text = told.decode("utf-8", "replace").strip()
    return f": {text}" if text else ""
