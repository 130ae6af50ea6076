"""Reading ahead in a thread, so that a slow writer upstream never keeps an engine with work to do waiting."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from enum import Enum
from typing import Generic, TypeVar

T = TypeVar("T")


class Signal(Enum):
    """What `take` answers when there is no item."""

    NOTHING_YET = 0
    END = 1


class ReadAhead(Generic[T]):
    """Items of an iterable, fetched by a daemon thread into a queue of at most `size`.

    An exception of the iterable comes out of `take` where it belongs in the order, once; after it, and after the last
    item, `take` answers END.
    """

    def __init__(self, items: Iterable[T], size: int) -> None:
        self._queue: queue.Queue[T | BaseException | Signal] = queue.Queue(max(1, size))
        self._ended = False
        threading.Thread(target=self._fetch, args=(items,), daemon=True, name="read-ahead").start()

    def _fetch(self, items: Iterable[T]) -> None:
        try:
            for item in items:
                self._queue.put(item)
        except BaseException as error:  # noqa: BLE001 (raised again by `take`, in the main thread)
            self._queue.put(error)
        self._queue.put(Signal.END)

    def take(self, *, wait: bool) -> T | Signal:
        """The next item; without `wait` NOTHING_YET where none has arrived."""
        if self._ended:
            return Signal.END
        try:
            item = self._queue.get(block=wait)
        except queue.Empty:
            return Signal.NOTHING_YET
        if isinstance(item, BaseException):
            raise item
        if item is Signal.END:
            self._ended = True
        return item
