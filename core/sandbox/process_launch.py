"""Starts one command of the driver `process`: limits first, then bubblewrap, or the command with a reaper above it.

Run by path as a script of its own, in a Python that imports nothing of ours:

    python -I -S process_launch.py PARENT MEMORY PROCESSES FILE_SIZE (wrap|plain) ARGUMENT...

Without bubblewrap it stays above the command: what the command's descendants orphan becomes its child (a subreaper, on
Linux), and all of it is killed when the command has ended, when SIGTERM comes, or when the process PARENT is gone.
"""

# pathlib and contextlib would double the time that this script takes to start.
# ruff: noqa: PTH116, PTH123, PTH208, SIM105
from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from types import FrameType

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
STOP_TURNS = 20
ON_LINUX = sys.platform.startswith("linux")


def main(parent: int, memory: int, processes: int, file_size: int, how: str, argv: list[str]) -> None:
    """Runs the command; the exit status is its own, or 128 + the signal that ended it."""
    if how == "wrap":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        _leave_if_orphaned(parent)
        _limit(memory, processes, file_size)
        os.execvp(argv[0], argv)  # noqa: S606
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    # Blocked until the child is known, so that none can be missed.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, _end)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _leave_if_orphaned(parent)
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        _limit(memory, processes, file_size)
        try:
            os.execvp(argv[0], argv)  # noqa: S606
        except OSError as error:
            os.write(2, f"{argv[0]}: {error.strerror}\n".encode())
            os._exit(127)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    status = 0
    # Orphans are reaped on the way.
    while (ended := os.wait())[0] != child:
        pass
    status = os.waitstatus_to_exitcode(ended[1])
    kill_descendants()
    os._exit(status if status >= 0 else 128 - status)


def _end(signum: int, frame: FrameType | None) -> None:
    kill_descendants()
    os._exit(128 + signum)


def _prctl(option: int, value: int) -> None:
    if ON_LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


def _leave_if_orphaned(parent: int) -> None:
    # The wish to be told of its death came too late then.
    if os.getppid() != parent:
        os._exit(1)


def _limit(memory: int, processes: int, file_size: int) -> None:
    # Not the address space: runtimes reserve far more of it than they use.
    limits = [(resource.RLIMIT_DATA, memory), (resource.RLIMIT_CORE, 0)]
    if file_size:
        limits.append((resource.RLIMIT_FSIZE, file_size))
    # The kernel counts all threads of the user, and does not hold root to it.
    if ON_LINUX and os.getuid() != 0:
        limits.append((resource.RLIMIT_NPROC, _threads_of_user() + processes))
    for what, limit in limits:
        hard = resource.getrlimit(what)[1]
        value = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        try:
            resource.setrlimit(what, (value, value))
        except (ValueError, OSError):
            continue


def _threads_of_user() -> int:
    count = 0
    for name in os.listdir("/proc"):
        try:
            if name.isdecimal() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                count += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            continue
    return count


def kill_descendants() -> None:
    """Kills everything below this process, or, where there is no /proc, everything in its process group."""
    if not ON_LINUX:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        os.killpg(0, signal.SIGTERM)
        time.sleep(0.05)
        return
    # Stopped first: what stands still starts nothing new.
    known: set[int] = set()
    for _ in range(STOP_TURNS):
        new = _descendants() - known
        if not new:
            break
        known |= new
        for pid in new:
            _kill(pid, signal.SIGSTOP)
    while found := _descendants():
        for pid in found:
            _kill(pid, signal.SIGKILL)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            return
        time.sleep(0.002)


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        pass


def _descendants() -> set[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                with open(f"/proc/{name}/stat", "rb") as file:
                    state, parent = file.read().rpartition(b")")[2].split()[:2]
            except OSError:
                continue
            if state not in (b"Z", b"X") or int(parent) == os.getpid():
                children.setdefault(int(parent), []).append(int(name))
    found: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        below = children.get(waiting.pop(), [])
        found.update(below)
        waiting.extend(below)
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5], sys.argv[6:])
