"""Progress on stderr, by rich, imported only when it is shown and only after a second."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Any, Self

SHOW_AFTER_S = 1.0


class Progress:
    """A counter with a bar; a context manager. `add(n)` counts; nothing is drawn unless `shown`."""

    def __init__(self, what: str, total: int | None, *, shown: bool) -> None:
        self.what = what
        self.total = total
        self.count = 0
        self._shown = shown
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def add(self, amount: int = 1) -> None:
        """Counts `amount` more."""
        self.count += amount
        if not self._shown:
            return
        if self._bar is None and time.monotonic() - self._started > SHOW_AFTER_S:
            self._open()
        if self._bar is not None:
            self._bar.update(self._task, completed=self.count)

    def _open(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
        from rich.progress import Progress as RichProgress

        self._bar = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            transient=True,
        )
        self._bar.start()
        self._task = self._bar.add_task(self.what, total=self.total)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
