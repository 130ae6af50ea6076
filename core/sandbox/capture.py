"""What is kept of an output: its start and its end, never more than a cap while it is read."""

from __future__ import annotations


class Capture:
    """Takes blocks of an output in order.

    >>> capture = Capture(8)
    >>> for block in (b"abcdef", b"ghijkl"):
    ...     capture.add(block)
    >>> capture.value()
    b'abcd\\n[... 4 bytes left out ...]\\nijkl'
    """

    def __init__(self, cap: int) -> None:
        self._head_cap = cap - cap // 2
        self._tail_cap = cap // 2
        self._head = bytearray()
        self._tail = bytearray()
        self.total = 0

    def add(self, block: bytes) -> None:
        """The next block."""
        self.total += len(block)
        room = self._head_cap - len(self._head)
        self._head += block[:room]
        self._tail += block[room:]
        # Cut now and then and not at each block, so that small blocks do not move the whole tail each time.
        if len(self._tail) > 2 * self._tail_cap + 65536:
            self._trim()

    def _trim(self) -> None:
        del self._tail[: max(0, len(self._tail) - self._tail_cap)]

    @property
    def truncated(self) -> bool:
        """Whether something is left out."""
        return self.total > self._head_cap + self._tail_cap

    def value(self) -> bytes:
        """The output, or its start, a line that says how much is missing, and its end."""
        self._trim()
        if not self.truncated:
            return bytes(self._head + self._tail)
        left_out = self.total - self._head_cap - self._tail_cap
        return bytes(self._head) + f"\n[... {left_out} bytes left out ...]\n".encode() + bytes(self._tail)
