"""One command as a process of this machine: its streams, its time, and the end of its group."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from strop.core.sandbox.capture import Capture
from strop.core.sandbox.protocol import ExecResult

BLOCK_BYTES = 1 << 16
# The launcher kills what is below it; after this time it is killed itself.
KILL_LIMIT_S = 3.0
LOOK_S = 0.1


def run(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    cwd: str,
    stdin: bytes,
    timeout_s: float,
    output_bytes: int,
    started: Callable[[subprocess.Popen[bytes]], None],
) -> ExecResult:
    """Runs a launcher to its end; `started` is told of it at once. Raises OSError if it cannot start."""
    begin = time.monotonic()
    process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True, bufsize=0,
        env=dict(env), cwd=cwd,
    )  # fmt: skip
    out, err = Capture(output_bytes), Capture(output_bytes)
    try:
        started(process)
        timed_out = not _follow(process, stdin, out, err, begin + timeout_s)
        if timed_out:
            process.terminate()
            if not _follow(process, b"", out, err, time.monotonic() + KILL_LIMIT_S):
                _kill_group(process)
                _follow(process, b"", out, err, time.monotonic() + LOOK_S)
    finally:
        if not _has_ended(process):
            process.terminate()
            limit = time.monotonic() + KILL_LIMIT_S
            while not _has_ended(process) and time.monotonic() < limit:
                time.sleep(0.01)
        # Only then is it reaped: until then its number cannot belong to anybody else.
        _kill_group(process)
        status = process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
    exit_code = None if timed_out else status if status >= 0 else 128 - status
    return ExecResult(
        exit_code, out.value(), err.value(), out.truncated, err.truncated, timed_out, time.monotonic() - begin
    )


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _follow(process: subprocess.Popen[bytes], stdin: bytes, out: Capture, err: Capture, deadline: float) -> bool:
    """Reads and writes until the process has ended; False if the deadline came first."""
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    unsent = memoryview(stdin)
    with selectors.DefaultSelector() as selector:
        if not process.stdin.closed:
            os.set_blocking(process.stdin.fileno(), False)
            selector.register(process.stdin, selectors.EVENT_WRITE)
        selector.register(process.stdout, selectors.EVENT_READ, out)
        selector.register(process.stderr, selectors.EVENT_READ, err)
        while any(key.events & selectors.EVENT_READ for key in selector.get_map().values()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                return _has_ended(process)
            events = selector.select(min(left_s, LOOK_S))
            if not events and _has_ended(process):
                # Something that got away holds the pipes.
                return True
            for key, _ in events:
                if key.events & selectors.EVENT_WRITE:
                    unsent = _send(process, selector, unsent)
                elif block := os.read(key.fd, BLOCK_BYTES):
                    key.data.add(block)
                else:
                    selector.unregister(key.fileobj)
    while not _has_ended(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


def _has_ended(process: subprocess.Popen[bytes]) -> bool:
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
            # A command need not read its stdin.
            unsent = unsent[:0]
    if not unsent:
        selector.unregister(process.stdin)
        process.stdin.close()
    return unsent
