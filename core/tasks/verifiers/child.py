"""A child process that answers requests one at a time, under a limit of processor time, and is restarted when it dies.

Parsers and scorers of other people run here and not in our process: they may hang, crash, allocate without end, or run
code that stands in a response. The limit is the kernel's (ITIMER_PROF), so that it needs neither the main thread nor a
handler, and a busy machine does not shorten it; a second limit, of wall-clock time, ends what sleeps.

A child is started by `sys.executable` (no fork, so threads and GPUs in the parent do no harm), hears of a Ctrl-C in the
terminal through its parent only, and ends by itself when the parent is gone. Its hash seed is fixed: what it computes
is the same in every run.

Frames on both pipes: four bytes of length, most significant first, then JSON.
"""

from __future__ import annotations

import contextlib
import io
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import msgspec

from strop.core.errors import missing_extra

START_LIMIT_S = 300.0
# A child that got no processor time for so long is stuck, or its machine is.
WALL_PER_CPU = 4.0
WALL_EXTRA_S = 10.0
MOST_REPLY_BYTES = 1 << 28
MEMORY_LIMIT_BYTES = 4 << 30
HEADER_BYTES = 4

BOOT = "from strop.core.tasks.verifiers.child import serve; serve()"


class ChildError(Exception):
    """The child gave no answer."""


class ChildTimeout(ChildError):  # noqa: N818
    """The request used up its time; the child was ended."""


class ChildDied(ChildError):  # noqa: N818
    """The child ended by itself, or was ended by somebody else."""


class ChildRaised(ChildError):  # noqa: N818
    """The handler raised: the message is `TYPE: text`. The child goes on."""


class ResponseFault(Exception):  # noqa: N818 (it says whose fault it is)
    """No answer, and the response is to blame; `details` say how, for a verdict."""

    def __init__(self, details: dict[str, Any]) -> None:
        super().__init__(str(details))
        self.details = details


class MachineFault(Exception):  # noqa: N818
    """No answer, and the response is not to blame."""


class Child:
    """One child process, started at the first call.

    `target` is "module:function"; the function does the heavy imports and returns the handler, which maps a decoded
    request to a value that JSON can hold. Calls of several threads wait for one another.
    """

    def __init__(self, target: str, *, cpu_limit_s: float, confined: bool = True) -> None:
        self._target = target
        self._cpu_limit_s = cpu_limit_s
        self._confined = confined
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._closed = False

    def call(self, request: Any) -> Any:
        """The handler's answer. Raises ChildTimeout, ChildDied, ChildRaised; Unavailable where a package is missing."""
        frame = msgspec.json.encode(request)
        with self._lock:
            process = self._process or self._start()
            try:
                _send(process, frame)
                reply = _receive(process, WALL_PER_CPU * self._cpu_limit_s + WALL_EXTRA_S)
            except _Silent:
                self._end(process)
                raise ChildTimeout("no answer, and hardly any processor time used") from None
            except OSError:
                raise self._death(process) from None
            except BaseException:
                # Stopped in the middle: its answer must not be taken for that to a later request.
                self._end(process)
                raise
        if "raised" in reply:
            raise ChildRaised(reply["raised"])
        return reply["value"]

    def close(self) -> None:
        """Ends the child; a call that waits for it raises ChildDied, and so does every later one."""
        self._closed = True
        process = self._process
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
        with self._lock:
            if self._process is not None:
                self._end(self._process)

    def _start(self) -> subprocess.Popen[bytes]:
        if self._closed:
            raise ChildDied("the verifier is closed")
        # -P: the folder we were called in must not provide modules.
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", BOOT, self._target, str(self._cpu_limit_s), "1" if self._confined else "0"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            bufsize=0,
            env={**os.environ, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )
        self._process = process
        try:
            reply = _receive(process, START_LIMIT_S)
        except _Silent:
            self._end(process)
            raise ChildDied(f"did not start within {START_LIMIT_S:.0f} s") from None
        except OSError:
            raise self._death(process) from None
        if "missing" in reply:
            self._end(process)
            raise missing_extra(reply["missing"], "envs")
        if "raised" in reply:
            self._end(process)
            raise ChildDied(f"could not start: {reply['raised']}")
        return process

    def _death(self, process: subprocess.Popen[bytes]) -> ChildError:
        status = self._end(process)
        if status == -signal.SIGPROF:
            return ChildTimeout(f"used up its {self._cpu_limit_s:g} s of processor time")
        if self._closed:
            return ChildDied("the verifier is closed")
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        return ChildDied(how)

    def _end(self, process: subprocess.Popen[bytes]) -> int:
        """Reaps the child; one that still runs is killed. Gives its exit status."""
        self._process = None
        assert process.stdin is not None
        assert process.stdout is not None
        # A child that closed its end of the pipe is about to end: what it dies of says more than our kill.
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.stdin.close()
            process.wait(0.5)
        process.kill()
        process.stdout.close()
        return process.wait()


def ask(child: Child, request: Any, control: Any) -> Any:
    """The child's answer to `request`, with blame where there is none.

    `control` is a request of the same kind that must be answerable: the reference judged by itself. A response on which
    the verifier hangs, crashes or raises, while it answers the control, is at fault (a failed attempt); if the control
    is not answered either, the machine or the verifier is (no verdict). A child that was killed is asked once more, in
    case that it was not the response that killed it.

    Raises ResponseFault (details: timeout, crashed or raised), MachineFault, and Unavailable for a missing package.
    """
    try:
        try:
            return child.call(request)
        except ChildDied:
            return child.call(request)
    except ChildTimeout:
        details: dict[str, Any] = {"timeout": True}
    except ChildDied as error:
        details = {"crashed": str(error)}
    except ChildRaised as error:
        details = {"raised": str(error)}
    try:
        child.call(control)
    except ChildError as error:
        raise MachineFault(f"cannot judge the reference itself: {error}") from None
    raise ResponseFault(details)


class _Silent(Exception):  # noqa: N818
    """Nothing came in time."""


def _send(process: subprocess.Popen[bytes], frame: bytes) -> None:
    assert process.stdin is not None
    view = memoryview(len(frame).to_bytes(HEADER_BYTES, "big") + frame)
    while view:
        view = view[process.stdin.write(view) or 0 :]


def _receive(process: subprocess.Popen[bytes], limit_s: float) -> dict[str, Any]:
    assert process.stdout is not None
    deadline = time.monotonic() + limit_s
    fd = process.stdout.fileno()
    size = int.from_bytes(_read(fd, HEADER_BYTES, deadline), "big")
    if size > MOST_REPLY_BYTES:
        raise OSError("an answer beyond all bounds")
    reply: dict[str, Any] = msgspec.json.decode(_read(fd, size, deadline))
    return reply


def _read(fd: int, size: int, deadline: float) -> bytes:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    data = bytearray()
    while len(data) < size:
        left_ms = (deadline - time.monotonic()) * 1000
        if left_ms <= 0 or not poll.poll(left_ms):
            raise _Silent
        block = os.read(fd, min(size - len(data), 1 << 20))
        if not block:
            raise OSError("the pipe was closed")
        data += block
    return bytes(data)


def serve() -> None:
    """The child's side: arguments are the target, the limit in seconds of processor time, and whether to confine it."""
    target, limit_s, confined = sys.argv[1], float(sys.argv[2]), sys.argv[3] == "1"
    requests, replies = _private_pipes()
    try:
        module, _, name = target.partition(":")
        handle: Callable[[Any], Any] = getattr(import_module(module), name)()
    except ModuleNotFoundError as error:
        _reply(replies, {"missing": (error.name or "").partition(".")[0]})
        return
    except Exception as error:  # noqa: BLE001 (told to the parent)
        _reply(replies, {"raised": f"{type(error).__name__}: {error}"})
        return
    if confined:
        from strop.core.tasks.verifiers.confine import confine

        confine(MEMORY_LIMIT_BYTES)
    # The default action ends the process; a handler in Python would not run while a long operation in C does.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    _reply(replies, {"value": None})
    while header := requests.read(HEADER_BYTES):
        request = msgspec.json.decode(requests.read(int.from_bytes(header, "big")))
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        try:
            reply = msgspec.json.encode({"value": handle(request)})
        except BaseException as error:  # noqa: BLE001 (SystemExit and time-outs of a scorer as well: told to the parent)
            reply = msgspec.json.encode({"raised": _told(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        _write(replies, reply)


def _private_pipes() -> tuple[io.BufferedReader, int]:
    """Our two pipes, moved away from descriptors 0 and 1: a library's print or input() must not touch them."""
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 0)
    os.dup2(null, 1)
    return io.open(requests, "rb"), replies  # noqa: UP020


def _told(error: BaseException) -> str:
    try:
        text = str(error)
    except BaseException:  # noqa: BLE001 (an exception that cannot be printed is still told of)
        text = ""
    return f"{type(error).__name__}: {text}".encode("utf-8", "replace").decode()[:1000]


def _reply(fd: int, reply: dict[str, Any]) -> None:
    _write(fd, msgspec.json.encode(reply))


def _write(fd: int, frame: bytes) -> None:
    view = memoryview(len(frame).to_bytes(HEADER_BYTES, "big") + frame)
    while view:
        view = view[os.write(fd, view) :]
