"""Child processes that wait for their next episode: where other people's simulators run (see tasks/verifiers/child.py).

They keep state in globals, leak, or compute for hours when a policy asks them to; a child holds one episode at a time.
"""

from __future__ import annotations

import threading

from strop.core.sandbox.protocol import SandboxLost
from strop.core.tasks.verifiers.child import Child


class Children:
    """Children of one kind; as many live as episodes are under way."""

    def __init__(self, target: str, *, cpu_limit_s: float, confined: bool) -> None:
        """As for Child: `target` is "module:function", and each request has `cpu_limit_s` of processor time."""
        self._target = target
        self._cpu_limit_s = cpu_limit_s
        self._confined = confined
        self._idle: list[Child] = []
        self._all: set[Child] = set()
        self._lock = threading.Lock()
        self._closed = False

    def take(self) -> Child:
        """One that waits, or a new one. Raises SandboxLost after `close`."""
        with self._lock:
            if self._closed:
                raise SandboxLost("stopped")
            if self._idle:
                return self._idle.pop()
            child = Child(self._target, cpu_limit_s=self._cpu_limit_s, confined=self._confined)
            self._all.add(child)
            return child

    def give(self, child: Child) -> None:
        """Takes one back."""
        with self._lock:
            if not self._closed:
                self._idle.append(child)

    def close(self) -> None:
        """Ends all of them; who waits for one gets ChildDied."""
        with self._lock:
            self._closed = True
            children, self._all = self._all, set()
            self._idle.clear()
        for child in children:
            child.close()
