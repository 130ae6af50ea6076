"""Programs that answer requests, one JSON object a line on stdin and stdout: the transport of the env `command`.

A program may be in any language. It is started without a shell in the folder that strop was started in, with the
rights of the user, and leads a process group of its own: what it started goes with it. It should end when its stdin
does. What it says on stderr is for people, and its last lines are part of an error message.

A program that ends, answers with something else than one JSON object on one line, or does not answer in time is ended,
and SandboxLost names it, the request and what came: the machine failed, and not the policy.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from strop.core.errors import Unavailable
from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.verifiers.command import has_ended, kill_group
from strop.core.tasks.verifiers.verdict import shown

MOST_LINE_BYTES = 8 << 20
BLOCK_BYTES = 1 << 16
# The end of what it said on stderr.
TOLD_BYTES = 2_000
TOLD_LINES = 5
# A helper that it left behind may hold the pipes: so often is looked whether the program itself is still there.
LOOK_S = 0.2
# A program whose stdin was closed may end by itself within this time.
FAREWELL_S = 0.5


class Program:
    """One running program. `ask` is called by one thread at a time, `kill` and `close` by any."""

    def __init__(self, arguments: tuple[str, ...], purpose: str = "env command") -> None:
        """Starts it. Raises Unavailable where there is no such program. `purpose` opens the words of every error."""
        self.arguments = arguments
        self._purpose = purpose
        if shutil.which(arguments[0]) is None:
            raise Unavailable(f"{purpose}: no such program, or not executable: {arguments[0]!r}")
        try:
            self._process = subprocess.Popen(
                arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                start_new_session=True, bufsize=0,
            )  # fmt: skip
        except OSError as error:
            raise Unavailable(f"{purpose}: cannot start {arguments[0]!r}: {error.strerror}") from None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        for pipe in (self._stdin, self._stdout, self._stderr):
            os.set_blocking(pipe.fileno(), False)
        self._told = bytearray()
        self._asking = threading.RLock()
        self._reaping = threading.Lock()

    @property
    def pid(self) -> int:
        """The process, which is also its group."""
        return self._process.pid

    def ask(self, request: Mapping[str, Any], *, seconds: float) -> dict[str, Any]:
        """The answer to one request. Raises SandboxLost, after which the program is gone."""
        op = request["op"]
        with self._asking:
            try:
                return _object(self._converse(msgspec.json.encode(request) + b"\n", time.monotonic() + seconds))
            except TimeoutError:
                self._end()
                raise self._lost(op, f"did not answer within {seconds:.3g} s") from None
            except _Ended:
                raise self._lost(op, self._end(patience_s=FAREWELL_S)) from None
            except _Garbage as error:
                self._end()
                raise self._lost(op, str(error)) from None
            except BaseException:
                # Stopped in the middle: its answer must not be taken for that to a later request.
                self._end()
                raise

    def kill(self) -> None:
        """Ends it and all it started; a thread that waits for its answer gets SandboxLost."""
        with self._reaping:
            if self._process.returncode is None:
                kill_group(self._process)

    def close(self) -> None:
        """Ends it and all it started, after a moment to end by itself; may be called again."""
        with self._asking:
            with contextlib.suppress(OSError):
                self._stdin.close()
            self._end(patience_s=FAREWELL_S)

    def _end(self, *, patience_s: float = 0.0) -> str:
        """Kills the group, reaps the program, and says how it ended. Until it is reaped its number is its own."""
        deadline = time.monotonic() + patience_s
        while not (is_over := self._is_over()) and time.monotonic() < deadline:
            time.sleep(0.01)
        with self._reaping:
            if self._process.returncode is None:
                self._read_told()
                kill_group(self._process)
            status = self._process.wait()
        for pipe in (self._stdin, self._stdout, self._stderr):
            with contextlib.suppress(OSError):
                pipe.close()
        if not is_over:
            return "closed its stdout"
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"

    def _is_over(self) -> bool:
        with self._reaping:
            return self._process.returncode is not None or has_ended(self._process)

    def _converse(self, question: bytes, deadline: float) -> bytes:
        """Writes the question while it reads; gives the one line that comes."""
        unsent, line = memoryview(question), bytearray()
        with selectors.DefaultSelector() as selector:
            try:
                selector.register(self._stdin, selectors.EVENT_WRITE)
                selector.register(self._stdout, selectors.EVENT_READ)
                selector.register(self._stderr, selectors.EVENT_READ)
            except ValueError:
                # Closed by somebody else.
                raise _Ended from None
            if early := self._read(self._stdout):
                raise _Garbage(f"said something that it was not asked for: {_quoted(early)}")
            while True:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise TimeoutError
                events = selector.select(min(left_s, LOOK_S))
                if not events and self._is_over():
                    raise _Ended
                for key, _ in events:
                    if key.fileobj is self._stdin:
                        unsent = self._write(unsent)
                        if not unsent:
                            selector.unregister(self._stdin)
                    elif key.fileobj is self._stderr:
                        if not self._read_told():
                            selector.unregister(self._stderr)
                    else:
                        block = self._read(self._stdout)
                        if block == b"":
                            raise _Ended
                        line += block or b""
                if b"\n" in line:
                    break
                if len(line) > MOST_LINE_BYTES:
                    raise _Garbage(f"a line of more than {MOST_LINE_BYTES} bytes")
        found, _, more = line.partition(b"\n")
        if more:
            raise _Garbage(f"more than one line: {_quoted(more)}")
        return bytes(found)

    def _write(self, unsent: memoryview) -> memoryview:
        try:
            return unsent[os.write(self._stdin.fileno(), unsent[:BLOCK_BYTES]) :]
        except BlockingIOError:
            return unsent
        except OSError:
            raise _Ended from None

    def _read(self, pipe: Any) -> bytes | None:
        """A block, b"" at the end, None where there is nothing yet."""
        try:
            return os.read(pipe.fileno(), BLOCK_BYTES)
        except BlockingIOError:
            return None
        except (OSError, ValueError):
            return b""

    def _read_told(self) -> bool:
        block = self._read(self._stderr)
        self._told += block or b""
        del self._told[:-TOLD_BYTES]
        return block != b""

    def _lost(self, op: str, what: str) -> SandboxLost:
        lines = self._told.decode("utf-8", "replace").strip().splitlines()[-TOLD_LINES:]
        said = f"; on stderr: {' | '.join(lines)}" if lines else ""
        return SandboxLost(f"{self._purpose}: {self.arguments[0]!r}, asked to {op}, {what}{said}")


class Programs:
    """Programs that wait for their next episode, by their arguments; as many run as episodes are under way."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, ...], list[Program]] = {}
        self._all: set[Program] = set()
        self._lock = threading.Lock()
        self._closed = False

    def take(self, arguments: tuple[str, ...]) -> Program:
        """One that waits, or a new one. Raises Unavailable; SandboxLost after `close`."""
        with self._lock:
            if self._closed:
                raise SandboxLost("env command: stopped")
            if idle := self._idle.get(arguments):
                return idle.pop()
            program = Program(arguments)
            self._all.add(program)
            return program

    def give(self, program: Program) -> None:
        """Takes back one that has answered all it was asked."""
        with self._lock:
            if not self._closed:
                self._idle.setdefault(program.arguments, []).append(program)

    def drop(self, program: Program) -> None:
        """Ends one."""
        program.kill()
        program.close()
        with self._lock:
            self._all.discard(program)

    def close(self) -> None:
        """Ends all of them; may be called again."""
        with self._lock:
            self._closed = True
            programs, self._all = list(self._all), set()
            idle = {program for waiting in self._idle.values() for program in waiting}
            self._idle.clear()
        for program in set(programs) - idle:
            # Somebody may wait for its answer.
            program.kill()
        for program in programs:
            program.close()


class _Ended(Exception):  # noqa: N818
    """The program is gone, or its pipes are."""


class _Garbage(Exception):  # noqa: N818
    """What came is no answer."""


def _object(line: bytes) -> dict[str, Any]:
    try:
        answer = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _Garbage(f"answered something that is not JSON ({error}): {_quoted(line)}") from None
    if not isinstance(answer, dict):
        raise _Garbage(f"answered something that is no JSON object: {_quoted(line)}")
    return answer


def _quoted(data: bytes | bytearray) -> str:
    return repr(shown(data[:1000].decode("utf-8", "replace").strip()))
