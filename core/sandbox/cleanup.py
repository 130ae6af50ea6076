"""Clean-up that a first Ctrl-C does not cut short, and that cannot hang for ever."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable

# The house gives clean-up ten seconds (design, section 3); this leaves the caller one to end in.
CLOSE_LIMIT_S = 9.0
WORKERS = 8

log = logging.getLogger("strop.sandbox")


def run_all(jobs: Iterable[Callable[[], None]], limit_s: float = CLOSE_LIMIT_S) -> bool:
    """Runs the jobs, some at a time, off this thread; whether all of them did their work within the limit.

    A first interrupt (whatever a signal handler raises) waits until the jobs have ended, a second one goes through at
    once. What a job raises is logged.
    """
    waiting: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
    count = 0
    for job in jobs:
        waiting.put(job)
        count += 1
    ended: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def work() -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                job = waiting.get_nowait()
                done = False
                try:
                    job()
                    done = True
                except Exception as error:  # noqa: BLE001 (one that cannot be removed must not keep the others)
                    log.warning("clean-up: %s", error)
                ended.put(done)

    try:
        for _ in range(min(count, WORKERS)):
            # Daemon threads: one that hangs must not keep the interpreter.
            threading.Thread(target=work, daemon=True).start()
    except RuntimeError:
        # The interpreter is ending and starts no more threads.
        work()
    return _wait(ended, count, time.monotonic() + limit_s)


def _wait(ended: queue.SimpleQueue[bool], count: int, deadline: float) -> bool:
    interrupt: BaseException | None = None
    all_done = True
    while count and (left_s := deadline - time.monotonic()) > 0:
        try:
            all_done &= ended.get(timeout=left_s)
            count -= 1
        except queue.Empty:
            break
        except BaseException as error:
            if interrupt is not None:
                raise
            interrupt = error
    if count:
        log.warning("clean-up took over %g s; %d things may be left, which the next run removes", CLOSE_LIMIT_S, count)
    if interrupt is not None:
        raise interrupt
    return all_done and not count
