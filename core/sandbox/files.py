"""What goes into a sandbox and out of it: names that stay inside, contents of bounded size, tar archives."""

from __future__ import annotations

import io
import os
import posixpath
import stat
import tarfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from strop.core.sandbox.protocol import SandboxRefused

FILE_MODE = 0o644
PROGRAM_MODE = 0o755
# What Linux takes: bytes of a name, and of a path with its end.
NAME_BYTES, PATH_BYTES = 255, 4096


@dataclass(frozen=True, slots=True)
class Entry:
    """One file to put: where (absolute, clean), what, and its mode."""

    path: str
    content: bytes | Path
    mode: int

    @property
    def size(self) -> int:
        """Bytes of the content."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size

    def open(self) -> IO[bytes]:
        """The content, to be read."""
        return io.BytesIO(self.content) if isinstance(self.content, bytes) else self.content.open("rb")


def inside(path: str, workdir: str) -> str:
    """The absolute, clean form of a path in a sandbox.

    Raises SandboxRefused for "..", NUL, an empty path, and one that is too long.
    """
    if not path or "\0" in path:
        raise SandboxRefused(f"not a path: {path!r}")
    if ".." in path.split("/"):
        raise SandboxRefused(f'a path must not hold "..": {path!r}')
    clean = "/" + posixpath.normpath(posixpath.join(workdir, path)).lstrip("/")
    names = clean.encode("utf-8", "surrogatepass").split(b"/")
    if max(map(len, names)) > NAME_BYTES or sum(map(len, names)) + len(names) > PATH_BYTES:
        raise SandboxRefused(f"a path that is too long: {path[:NAME_BYTES]!r}...")
    return clean


def prefixes(path: str) -> Iterator[str]:
    """`/a`, `/a/b`, `/a/b/c` of the absolute path `/a/b/c`.

    >>> list(prefixes("/a/b"))
    ['/a', '/a/b']
    """
    parts = [part for part in path.split("/") if part]
    for count in range(1, len(parts) + 1):
        yield "/" + "/".join(parts[:count])


def entries_of(
    path: str, content: bytes | Path | Mapping[str, bytes], *, executable: bool, most_bytes: int
) -> list[Entry]:
    """The files that `put` is to write at the absolute `path`. Raises SandboxRefused as `put` does, and OSError."""
    mode = PROGRAM_MODE if executable else FILE_MODE
    if isinstance(content, bytes):
        entries = [Entry(path, content, mode)]
    elif isinstance(content, Path):
        entries = list(_entries_of_path(path, content))
    else:
        entries = [Entry(_below(path, name), data, mode) for name, data in content.items()]
    total = 0
    for entry in entries:
        total += entry.size
        if total > most_bytes:
            raise SandboxRefused(f"more than {most_bytes} bytes to put at {path}")
    if path == "/" and not isinstance(content, Mapping | Path):
        raise SandboxRefused("a file needs a name")
    return entries


def _below(folder: str, name: str) -> str:
    if name.startswith("/"):
        raise SandboxRefused(f"the names of files in a folder are relative: {name!r}")
    path = inside(name, folder)
    if path == folder:
        raise SandboxRefused(f"not the name of a file: {name!r}")
    return path


def _entries_of_path(path: str, source: Path) -> Iterator[Entry]:
    if not source.is_dir():
        yield _entry_of_file(path, source)
        return
    for folder, names, files in os.walk(source):
        names.sort()
        for name in [*names, *sorted(files)]:
            found = Path(folder, name)
            if found.is_symlink():
                raise SandboxRefused(f"a link in the folder to put: {found}")
            if name in files:
                yield _entry_of_file(posixpath.join(path, found.relative_to(source).as_posix()), found)


def _entry_of_file(path: str, source: Path) -> Entry:
    found = source.stat()
    if not stat.S_ISREG(found.st_mode):
        raise SandboxRefused(f"not a regular file: {source}")
    return Entry(path, source, stat.S_IMODE(found.st_mode) & 0o777)


def archive(entries: list[Entry], uid: int, gid: int, made: list[str], target: IO[bytes]) -> None:
    """Writes a tar of the entries, and of the folders `made` on the way to them, with names relative to "/"."""
    with tarfile.open(fileobj=target, mode="w", format=tarfile.GNU_FORMAT) as tar:
        for folder in made:
            tar.addfile(_member(folder, PROGRAM_MODE, uid, gid, tarfile.DIRTYPE))
        for entry in entries:
            member = _member(entry.path, entry.mode, uid, gid, tarfile.REGTYPE)
            member.size = entry.size
            with entry.open() as content:
                tar.addfile(member, content)


def _member(path: str, mode: int, uid: int, gid: int, kind: bytes) -> tarfile.TarInfo:
    member = tarfile.TarInfo(path.lstrip("/"))
    member.mode, member.uid, member.gid, member.type = mode, uid, gid, kind
    member.mtime = int(time.time())
    return member


class Bounded(io.RawIOBase):
    """Blocks of bytes as a file to read, refused once they are more than `most_bytes`."""

    def __init__(self, blocks: Iterator[bytes], most_bytes: int, what: str) -> None:
        self._blocks = blocks
        self._left = most_bytes
        self._message = f"more than {most_bytes} bytes to get from {what}"
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: object) -> int:
        """Fills the buffer, from one block at most. Raises SandboxRefused past the bound."""
        view = memoryview(buffer)  # type: ignore[arg-type]
        while not self._rest:
            block = next(self._blocks, None)
            if block is None:
                return 0
            self._left -= len(block)
            if self._left < 0:
                raise SandboxRefused(self._message)
            self._rest = block
        count = min(len(view), len(self._rest))
        view[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def regular_files(tar: tarfile.TarFile, most_bytes: int, what: str) -> Iterator[tuple[str, bytes]]:
    """The regular files of an archive by name; holes of sparse files count. Raises SandboxRefused past the bound."""
    left = most_bytes
    for member in tar:
        if not member.isreg():
            continue
        left -= member.size
        if left < 0:
            raise SandboxRefused(f"more than {most_bytes} bytes to get from {what}")
        content = tar.extractfile(member)
        assert content is not None
        yield member.name, content.read()
