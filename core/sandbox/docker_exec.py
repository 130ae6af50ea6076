"""One command in a container: its streams, its time, and the end of everything it started.

A command runs below a shell that carries its mark, so that it can be found from inside the container. When its time is
up, a second shell, of the same user, stops and then kills what belongs to it; it needs nothing of the image but `sh`
and /proc (no ps, pkill or timeout). What belongs to a command: its descendants, and every process that started after
it and has lost its parent, as a daemon has. What older processes start meanwhile, and other commands, are let be.
"""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from strop.core.errors import Unavailable
from strop.core.sandbox.capture import Capture
from strop.core.sandbox.docker_engine import engine_errors
from strop.core.sandbox.protocol import ExecResult, SandboxLost

BLOCK_BYTES = 1 << 16
# How often the engine is asked whether a silent command has ended: what it left behind may hold its streams.
FIRST_LOOK_S = 0.05
LAST_LOOK_S = 1.0
KILL_LIMIT_S = 5.0
# What is still to be read after a command has ended, or was killed.
DRAIN_S = 0.3
HEADER_BYTES = 8
# The exit status of a command that was ended by SIGKILL.
KILLED = 137
STDOUT, STDERR = 1, 2

# The shell that a command runs below. It must not replace itself by the command (`exit` keeps it), and $0 is the mark.
RUN = '"$@"; exit $?'
# $1 is the start of the root's command line (read drops the NULs in it). Nothing here forks: the limit on processes may
# be used up. Fields of a stat file are counted after the program's name, which may hold anything.
KILL = r"""
stat_of() {
  text= line=
  { while IFS= read -r line || [ -n "$line" ]; do text="$text $line"; line=; done; } 2>/dev/null <"/proc/$1/stat"
  case $text in *") "*) ;; *) return 1 ;; esac
  set -- ${text##*") "}
  state=$1 parent=$2
  shift 19
  start=$1
}
older() { [ "$start" -lt "$root_start" ] || { [ "$start" -eq "$root_start" ] && [ "$1" -lt "$root" ]; }; }
belongs() {
  one=$1
  while [ "$one" != "$root" ]; do
    stat_of "$one" || return 0
    older "$one" && return 1
    case $parent in 0) return 1 ;; 1) return 0 ;; esac
    one=$parent
  done
}
all() {
  again=
  for one in /proc/[0-9]*; do
    pid=${one#/proc/}
    [ "$pid" = 1 ] || [ "$pid" = $$ ] && continue
    stat_of "$pid" || continue
    case $state in Z | X) continue ;; T) [ "$1" = STOP ] && continue ;; esac
    belongs "$pid" && kill "-$1" "$pid" && again=yes
  done
}
root=
for one in /proc/[0-9]*; do
  pid=${one#/proc/}
  stat_of "$pid" && [ "$parent" = 0 ] && [ "$pid" != $$ ] || continue
  line=
  IFS= read -r line 2>/dev/null <"/proc/$pid/cmdline"
  case $line in "$1"*) stat_of "$pid" && root=$pid root_start=$start ;; esac
done
[ -n "$root" ] || exit 3
for turn in 1 2 3 4 5 6 7 8 9 10; do all STOP; [ -n "$again" ] || break; done
for turn in 1 2 3 4 5 6 7 8 9 10; do all KILL; [ -n "$again" ] || exit 0; done
exit 4
"""


@dataclass(frozen=True, slots=True)
class Command:
    """What to run in a container, as the engine takes it."""

    argv: list[str]
    user: str
    workdir: str
    env: Mapping[str, str]
    stdin: bytes
    timeout_s: float
    output_bytes: int


class Stream:
    """The connection to a running exec or container: framed output comes out, stdin goes in."""

    def __init__(self, connection: Any) -> None:
        self._response = connection._response
        self._socket = getattr(connection, "_sock", connection)
        # Output that came right behind the answer's header lies in the client's buffer and would be lost.
        buffered = self._response.raw._fp.fp
        self._socket.setblocking(False)
        self._early = b""
        with contextlib.suppress(OSError):
            self._early = buffered.read1(len(buffered.peek())) if buffered.peek() else b""
        self._socket.setblocking(True)
        self._poll = select.poll()
        self._poll.register(self._socket.fileno(), select.POLLIN)
        self._header = bytearray()
        self._left = 0
        self._kind = 0

    def read(self, wait_s: float) -> list[tuple[int, bytes]] | None:
        """Blocks of (stream, bytes) that came within the time, [] if none did, None at the end."""
        data, self._early = self._early, b""
        if not data:
            pending = self._socket.pending() if hasattr(self._socket, "pending") else 0
            if not pending and not self._poll.poll(max(0.0, wait_s) * 1000):
                return []
            try:
                data = self._socket.recv(BLOCK_BYTES)
            except ConnectionResetError:
                data = b""
            if not data:
                return None
        return list(self._frames(memoryview(data)))

    def _frames(self, data: memoryview) -> Iterator[tuple[int, bytes]]:
        while data:
            if not self._left:
                need = HEADER_BYTES - len(self._header)
                self._header += data[:need]
                data = data[need:]
                if len(self._header) == HEADER_BYTES:
                    self._kind, self._left = self._header[0], int.from_bytes(self._header[4:], "big")
                    self._header.clear()
            else:
                yield self._kind, bytes(data[: self._left])
                taken = min(self._left, len(data))
                self._left -= taken
                data = data[taken:]

    def send(self, stdin: bytes) -> None:
        """Writes stdin and ends it, beside the reading. Raises Unavailable where a connection cannot be half closed."""
        if hasattr(self._socket, "pending"):
            raise Unavailable("stdin of a command needs an engine at a unix: or plain tcp: address, not behind TLS")
        threading.Thread(target=self._send, args=(stdin,), daemon=True).start()

    def _send(self, stdin: bytes) -> None:
        # A command need not read its stdin, and may end while it is written.
        with contextlib.suppress(OSError):
            self._socket.sendall(stdin)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Lets go of the connection; a container whose stdin it was ends."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        with contextlib.suppress(OSError):
            self._response.close()
        with contextlib.suppress(OSError):
            self._socket.close()


class Execution:
    """One command in a container; `mark` is a text that no other running command of the container has."""

    def __init__(self, api: Any, container: str, command: Command, mark: str) -> None:
        self._api = api
        self._container = container
        self._command = command
        self._mark = mark
        self._exec_id = ""

    def run(self) -> tuple[ExecResult, bool]:
        """The result, and whether something of the command may still run though its time is up. Raises SandboxLost."""
        command = self._command
        outputs = {STDOUT: Capture(command.output_bytes), STDERR: Capture(command.output_bytes)}
        with engine_errors("running a command"):
            self._exec_id = self._create(["sh", "-c", RUN, self._mark, *command.argv], stdin=bool(command.stdin))
            started = time.monotonic()
            stream = Stream(self._api.exec_start(self._exec_id, socket=True))
            try:
                if command.stdin:
                    stream.send(command.stdin)
                timed_out = not self._follow(stream, outputs, started + command.timeout_s)
                survives = timed_out and not self._kill(stream, outputs)
            finally:
                stream.close()
            taken = time.monotonic() - started
            exit_code = None if timed_out else self._exit_code()
        result = ExecResult(
            exit_code, outputs[STDOUT].value(), outputs[STDERR].value(), outputs[STDOUT].truncated,
            outputs[STDERR].truncated, timed_out, taken,
        )  # fmt: skip
        return result, survives

    def _create(self, argv: Sequence[str], *, stdin: bool) -> str:
        command = self._command
        made: dict[str, Any] = self._api.exec_create(
            self._container, list(argv), stdin=stdin, user=command.user, workdir=command.workdir,
            environment=dict(command.env),
        )  # fmt: skip
        return str(made["Id"])

    def _follow(self, stream: Stream, outputs: Mapping[int, Capture], deadline: float) -> bool:
        """Reads until the command has ended; False if the deadline came first."""
        look_s = FIRST_LOOK_S
        while True:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return not self._runs()
            blocks = stream.read(min(look_s, left_s))
            if blocks is None:
                # The streams are closed; what closed them may go on.
                return self._wait(deadline)
            if blocks:
                look_s = FIRST_LOOK_S
                _keep(blocks, outputs)
            elif not self._runs():
                _drain(stream, outputs)
                return True
            else:
                look_s = min(2 * look_s, LAST_LOOK_S)

    def _wait(self, deadline: float) -> bool:
        look_s = 0.01
        while self._runs():
            if time.monotonic() > deadline:
                return False
            time.sleep(min(look_s, max(0.0, deadline - time.monotonic())))
            look_s = min(2 * look_s, LAST_LOOK_S)
        return True

    def _runs(self) -> bool:
        return bool(self._api.exec_inspect(self._exec_id)["Running"])

    def _kill(self, stream: Stream, outputs: Mapping[int, Capture]) -> bool:
        """Kills all that belongs to the command and reads the rest of its output; whether that surely worked."""
        # The engine may refuse (no process to be had, the shell is gone): the caller has a stronger means.
        with contextlib.suppress(SandboxLost), engine_errors("killing a command"):
            start_of_root = "sh-c" + RUN + self._mark
            killer = self._create(["sh", "-c", KILL, "kill", start_of_root], stdin=False)
            told = Stream(self._api.exec_start(killer, socket=True))
            try:
                limit = time.monotonic() + KILL_LIMIT_S
                while time.monotonic() < limit and told.read(0.1) is not None:
                    _keep(stream.read(0) or [], outputs)
            finally:
                told.close()
            if self._api.exec_inspect(killer)["ExitCode"] == 0:
                _drain(stream, outputs)
                return not self._runs()
        return False

    def _exit_code(self) -> int:
        code = self._api.exec_inspect(self._exec_id)["ExitCode"]
        limit = time.monotonic() + KILL_LIMIT_S
        while code is None and time.monotonic() < limit:
            # The stream may end a moment before the engine knows how the command did.
            time.sleep(0.01)
            code = self._api.exec_inspect(self._exec_id)["ExitCode"]
        if code is None or code >= 125:
            self._check_container(patient=code in (None, KILLED))
        return 126 if code is None else int(code)

    def _check_container(self, *, patient: bool) -> None:
        """Raises SandboxLost if the container has ended.

        A container that is being killed takes its commands along a moment before the engine says so: `patient` waits.
        """
        limit = time.monotonic() + (DRAIN_S if patient else 0)
        while (state := self._api.inspect_container(self._container)["State"])["Running"]:
            if time.monotonic() >= limit:
                return
            time.sleep(0.02)
        raise SandboxLost(f"the container ended during a command (exit status {state['ExitCode']})")


def _keep(blocks: list[tuple[int, bytes]], outputs: Mapping[int, Capture]) -> None:
    for kind, block in blocks:
        if kind in outputs:
            outputs[kind].add(block)


def _drain(stream: Stream, outputs: Mapping[int, Capture]) -> None:
    limit = time.monotonic() + DRAIN_S
    while (left_s := limit - time.monotonic()) > 0:
        blocks = stream.read(min(left_s, 0.05))
        if not blocks:
            return
        _keep(blocks, outputs)
