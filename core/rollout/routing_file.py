"""The sidecar of a rollout stream: which experts were used, as arrays in one binary file that records point into.

The file has no header and is only ever appended to. What belongs to a chunk is found by the offset in its record, and
an array is handed to the operating system whole before its record is written; what a killed run left behind its last
record is pointed to by nobody, and a later run appends behind it.

A record holds the file's name as it was given to `rollout`, and a relative one is looked up from the folder that the
reader runs in, as on any command line.
"""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from strop.core.errors import DataError, OutputFailed, UsageError
from strop.core.records import RoutingRef

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from strop.core.models.routing import RoutingShape
    from strop.core.records import Record

DTYPES = {"uint8": "<u1", "uint16": "<u2"}


class RoutingFault(DataError):  # noqa: N818 (as the errors of core/errors.py)
    """Routing is missing or bad. It ends a run even where bad records are set aside.

    Rollouts whose routing is lost are not a random part of the batch, so that to leave them out would bias it (T1).
    """


class RoutingWriter:
    """Appends arrays to the file at `path`; one process at a time. Raises UsageError, OutputFailed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if path.exists() and not path.is_file():
            raise UsageError(f"--routing {path}: a file is needed, since records point to places in it")
        try:
            # Unbuffered: what `append` has returned survives the end of this process.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise OutputFailed(f"{path}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise OutputFailed(f"{path}: another run is writing to it") from None

    def append(self, rows_TLK: NDArray[Any]) -> RoutingRef:
        """Writes an array of uint8 or uint16 [T, L, K]; where it lies. Raises OutputFailed."""
        name = rows_TLK.dtype.name
        data = memoryview(rows_TLK.astype(DTYPES[name]).tobytes())
        try:
            offset = self._file.seek(0, 2)
            while data:
                data = data[self._file.write(data) :]
        except OSError as error:
            raise OutputFailed(f"{self.path}: {error.strerror}") from None
        return RoutingRef(str(self.path), offset, list(rows_TLK.shape), name)

    def close(self) -> None:
        """Ends the writing and lets others write."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


class RoutingReader:
    """Reads what records point to, of any number of files, by mapping them: pages are read when they are used."""

    def __init__(self) -> None:
        self._maps: dict[str, NDArray[Any]] = {}

    def read(self, record: Record, index: int, ref: RoutingRef, num_tokens: int, shape: RoutingShape) -> NDArray[Any]:
        """The routing [num_tokens - 1, L, K] of chunk number `index`, checked against the model's `shape`.

        Raises RoutingFault with file, line and field: where the file is missing or ends too early, where rows, layers
        or experts are not those of chunk and model, and where a token does not have K different experts.
        """
        import numpy as np

        def bad(field: str, message: str) -> RoutingFault:
            return RoutingFault(message, where=record.where, field=f"chunks[{index}].routing.{field}")

        if ref.dtype not in DTYPES:
            raise bad("dtype", f"{ref.dtype!r}, expected uint8 or uint16")
        wanted = [num_tokens - 1, len(shape.layers), shape.top_k]
        if ref.shape != wanted:
            why = f"{num_tokens} tokens in a model of {wanted[1]} layers with {wanted[2]} experts a token"
            raise bad("shape", f"{ref.shape}, expected {wanted} for {why}")
        dtype = np.dtype(DTYPES[ref.dtype])
        size = int(np.prod(wanted)) * dtype.itemsize
        if ref.offset < 0:
            raise bad("offset", f"{ref.offset} is below zero")
        try:
            bytes_ = self._mapped(ref.path, ref.offset + size)
        except OSError as error:
            raise bad("path", f"{ref.path}: {error.strerror}") from None
        if len(bytes_) < ref.offset + size:
            message = f"{ref.path} has {len(bytes_)} bytes, and {size} from {ref.offset} on are asked for"
            raise bad("offset", message)
        rows_TLK = bytes_[ref.offset : ref.offset + size].view(dtype).reshape(wanted)
        if size and int(rows_TLK.max()) >= shape.num_experts:
            raise bad("offset", f"{ref.path}: expert {rows_TLK.max()} of a model of {shape.num_experts} experts")
        ordered_TLK = np.sort(rows_TLK, -1)
        if (ordered_TLK[..., 1:] == ordered_TLK[..., :-1]).any():
            raise bad("offset", f"{ref.path}: a token names an expert twice; this is no routing, or not its place")
        return rows_TLK

    def _mapped(self, path: str, end: int) -> NDArray[Any]:
        """The bytes of the file; mapped anew where it has grown since. Raises OSError."""
        import numpy as np

        known = self._maps.get(path)
        if known is None or len(known) < end:
            file = Path(path)
            # An empty file cannot be mapped.
            known = np.memmap(file, np.uint8, "r") if file.stat().st_size else np.zeros(0, np.uint8)
            self._maps[path] = known
        return known
