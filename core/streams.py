"""Reading and writing streams of records: framing by jsonlines, places for errors, rejects, atomic output, resume.

Lines end at a line feed and nowhere else; a byte-order mark and CRLF are accepted, blank lines skipped, and bytes that
are not UTF-8 are bad data. Files are opened as bytes, so the locale never matters.
"""

from __future__ import annotations

import errno
import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from strop.core.errors import DataError, InputMissing, OutputFailed, Where
from strop.core.records import Record

BLOCK_BYTES = 1 << 20
FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS)


def read_records(
    sources: Iterable[str], stdin: IO[bytes], on_bad: Callable[[DataError, bytes], None] | None = None,
    kind_if_none: str | None = None,
) -> Iterator[Record]:  # fmt: skip
    """The records of the files in order ("-" is `stdin`); those without `kind` are bad, or of `kind_if_none`.

    A bad line raises DataError; with `on_bad` it is handed over instead, with its bytes, and reading goes on.
    Raises InputMissing for a file that cannot be opened.
    """
    for source in sources:
        if source == "-":
            yield from _read_one(stdin, source, on_bad, kind_if_none)
            continue
        try:
            file = Path(source).open("rb", buffering=BLOCK_BYTES)  # noqa: SIM115
        except OSError as error:
            raise InputMissing(f"{source}: {error.strerror}") from None
        with file:
            yield from _read_one(file, source, on_bad, kind_if_none)


def _read_one(
    file: IO[bytes], source: str, on_bad: Callable[[DataError, bytes], None] | None, kind_if_none: str | None = None
) -> Iterator[Record]:
    # Imported here and in Output: jsonlines costs 30 ms of start-up, which --help and a usage error need not pay.
    import jsonlines

    current: list[Any] = [0, b""]

    def lines() -> Iterator[bytes]:
        for number, line in enumerate(file, 1):
            current[0] = number
            # An empty JSON-less line is skipped here: jsonlines would count it as an error.
            if line.strip():
                current[1] = line
                yield line

    def loads(line: str | bytes) -> Record:
        return Record.parse(line if isinstance(line, str) else line.decode(), Where(source, current[0]), kind_if_none)

    reader = jsonlines.Reader(lines(), loads=loads)
    while True:
        try:
            record: Any = reader.read()
        except EOFError:
            return
        except (DataError, jsonlines.InvalidLineError) as error:
            bad = error if isinstance(error, DataError) else DataError("not UTF-8", where=Where(source, current[0]))
            if on_bad is None:
                raise bad from None
            on_bad(bad, current[1])
            continue
        except OSError as error:
            # A directory, a closed stdin, a failing disk: opening it is no proof that it can be read.
            name = "<stdin>" if source == "-" else source
            raise InputMissing(f"{name}: {(error.strerror or str(error)).lower()}") from None
        yield record


class Output:
    """Where records go: a file descriptor, a file written atomically, or a file that is continued.

    Writes in blocks, or record by record with `flush_each`. Used as a context manager: leaving it without an error
    completes the file; leaving it with an error leaves an atomic file's old content in place, while what went to a
    descriptor or a continued file stays written.
    """

    def __init__(
        self, *, fd: int | None = None, path: Path | None = None, append: bool = False, flush_each: bool = False
    ) -> None:
        import jsonlines

        self.path = path
        self._temporary: Path | None = None
        self._flush_each = flush_each
        self.num_records = 0
        try:
            if path is None:
                self._file: IO[bytes] = os.fdopen(1 if fd is None else fd, "wb", buffering=BLOCK_BYTES, closefd=False)
            elif append or _is_special(path):
                self._file = path.open("ab", buffering=BLOCK_BYTES)
            else:
                handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
                self._temporary = Path(name)
                self._file = os.fdopen(handle, "wb", buffering=BLOCK_BYTES)
        except OSError as error:
            raise OutputFailed(f"{path}: {error.strerror}") from None
        self._writer = jsonlines.Writer(self._file, dumps=_dumps)

    def write(self, record: Record) -> None:
        """Appends one record. Raises OutputFailed; a closed pipe raises BrokenPipeError."""
        with self._failures():
            self._writer.write(record)
            if self._flush_each:
                self._file.flush()
            # Counted under the guard: a signal that waited for this write is raised as the guard ends.
            self.num_records += 1

    def write_text(self, text: str) -> None:
        """Appends lines that are not records: the table of a tool whose output is for people."""
        with self._failures():
            self._file.write(text.encode("utf-8", "backslashreplace") + b"\n")

    def flush(self) -> None:
        """Hands over what is buffered."""
        with self._failures():
            self._file.flush()

    def close(self, *, complete: bool) -> None:
        """Ends the output; an atomic file appears only if `complete`."""
        with self._failures():
            if self._temporary is None:
                self._file.flush()
                if self.path is not None:
                    self._file.close()
                return
            if complete:
                self._file.flush()
                os.fsync(self._file.fileno())
                # mkstemp makes files private; give the one that stays the mode an ordinary open would have.
                umask = os.umask(0)
                os.umask(umask)
                os.fchmod(self._file.fileno(), 0o666 & ~umask)
                self._file.close()
                self._temporary.replace(self.path)  # type: ignore[arg-type]
                self._temporary = None
        if self._temporary is not None:
            self._discard()

    @property
    def is_atomic(self) -> bool:
        """Whether the file appears only at the end."""
        return self._temporary is not None

    def keep_partial(self) -> Path | None:
        """Moves what an atomic file holds so far to FILE.part, whole lines only, and returns that name.

        None if the output is not atomic or nothing was written: there is then nothing to save.
        """
        if self._temporary is None or self.path is None or not self.num_records:
            return None
        partial = self.path.with_name(f"{self.path.name}.part")
        with self._failures():
            self._file.flush()
            self._temporary.replace(partial)
            self._temporary = None
        return partial

    def _discard(self) -> None:
        temporary, self._temporary = self._temporary, None
        if temporary is not None:
            temporary.unlink(missing_ok=True)

    def _failures(self) -> _WriteFailures:
        return _WriteFailures(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=kind is None)


class WriteGuard:
    """Lets a signal handler wait for the end of a write, so that no line is torn.

    While `num_writes` is not 0, a handler puts its exception into `stop` and returns; the outermost write raises it
    when it is done. Used as a context manager it is such a write around others: of files that belong together either
    all are put in place or none.
    """

    num_writes = 0
    stop: BaseException | None = None

    def __enter__(self) -> None:
        WriteGuard.num_writes += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        WriteGuard.num_writes -= 1
        if WriteGuard.num_writes == 0 and error is None:
            stop, WriteGuard.stop = WriteGuard.stop, None
            if stop is not None:
                raise stop


class _WriteFailures(WriteGuard):
    """Turns a failed write into OutputFailed with the file's name, and removes a temporary file that stays behind."""

    def __init__(self, output: Output) -> None:
        self._output = output

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, OSError) and not isinstance(error, BrokenPipeError):
            self._output._discard()
            raise OutputFailed(f"{self._output.path or '<stdout>'}: {error.strerror}") from None


def _is_special(path: Path) -> bool:
    """A device or pipe (/dev/full, a FIFO) cannot be replaced by a rename."""
    return path.exists() and not path.is_file()


def _dumps(record: Any) -> bytes:
    # jsonlines asks with an empty dict whether text or bytes come out.
    return record.encode() if isinstance(record, Record) else b"{}"


class Resumed:
    """What a killed run already wrote to a file: a torn last line is cut off, the rest is known by id and by bytes.

    Records that a tool makes are asked for by (kind, id). Records that it passes through are compared by their bytes
    and counted, so that equal lines are not merged.
    """

    def __init__(self, path: Path, kind_if_none: str | None = None) -> None:
        self.path = path
        self.ids: set[tuple[str, str]] = set()
        self.num_torn_bytes = 0
        self._lines: Counter[bytes] = Counter()
        if path.exists():
            self._cut_torn_line()
            with path.open("rb") as file:
                for record in _read_one(file, str(path), None, kind_if_none):
                    self._lines[_digest(record)] += 1
                    name = record.get("id")
                    if isinstance(name, str):
                        self.ids.add((record.kind, name))

    def take_line(self, record: Record) -> bool:
        """Whether this very line was written already; the answer uses one such line up."""
        digest = _digest(record)
        if self._lines[digest] > 0:
            self._lines[digest] -= 1
            return True
        return False

    def _cut_torn_line(self) -> None:
        size = self.path.stat().st_size
        with self.path.open("r+b") as file:
            end, block = size, 1 << 16
            while end > 0:
                start = max(0, end - block)
                file.seek(start)
                found = file.read(end - start).rfind(b"\n")
                if found >= 0:
                    end = start + found + 1
                    break
                end = start
            if end < size:
                self.num_torn_bytes = size - end
                file.truncate(end)


def _digest(record: Record) -> bytes:
    # Costs start-up time, which only a run that is continued need pay.
    from hashlib import blake2b

    return blake2b(record.encode(), digest_size=16).digest()
