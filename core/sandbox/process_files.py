"""Files below a folder of this machine, reached part by part so that no link can lead out of it."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from strop.core.sandbox.files import Entry
from strop.core.sandbox.protocol import SandboxRefused

BLOCK_BYTES = 1 << 20
LOOK = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC
# A pipe that somebody left must not make us wait for a writer.
READ = LOOK | os.O_NONBLOCK


@contextlib.contextmanager
def opened_folder(root: Path, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
    """A descriptor of the folder `parts` below `root`. Raises SandboxRefused for a link, FileNotFoundError."""
    fd = os.open(root, LOOK | os.O_DIRECTORY)
    try:
        for count, part in enumerate(parts):
            try:
                if make:
                    with contextlib.suppress(FileExistsError):
                        os.mkdir(part, 0o755, dir_fd=fd)
                below = os.open(part, LOOK | os.O_DIRECTORY, dir_fd=fd)
            except OSError as error:
                if error.errno in (errno.ELOOP, errno.ENOTDIR):
                    raise SandboxRefused(f"a link, or no folder, on the way: /{'/'.join(parts[: count + 1])}") from None
                raise
            os.close(fd)
            fd = below
        yield fd
    finally:
        os.close(fd)


def write_file(root: Path, parts: Sequence[str], entry: Entry) -> None:
    """Writes one file. What is there is replaced and not written into: it may be a hard link to something else."""
    *folders, name = parts
    with opened_folder(root, folders, make=True) as folder:
        _refuse_other(folder, name, parts)
        part = f".strop-{secrets.token_hex(8)}"
        fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            with os.fdopen(fd, "wb") as target, entry.open() as source:
                shutil.copyfileobj(source, target, BLOCK_BYTES)
                os.fchmod(target.fileno(), entry.mode)
            os.rename(part, name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(part, dir_fd=folder)
            raise


def _refuse_other(folder: int, name: str, parts: Sequence[str]) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            raise SandboxRefused(f"a link, or not a regular file: /{'/'.join(parts)}")


def read_file(root: Path, parts: Sequence[str], most_bytes: int) -> bytes:
    """One file. Raises FileNotFoundError, SandboxRefused."""
    *folders, name = parts
    with opened_folder(root, folders) as folder:
        _refuse_other(folder, name, parts)
        return _read(folder, name, most_bytes, parts)


def read_folder(root: Path, parts: Sequence[str], most_bytes: int) -> dict[str, bytes]:
    """The regular files below a folder by relative name. Raises FileNotFoundError, SandboxRefused."""
    found: dict[str, bytes] = {}
    with opened_folder(root, parts) as top:
        for folder, _, names, fd in os.fwalk(".", dir_fd=top, follow_symlinks=False):
            for name in sorted(names):
                if stat.S_ISREG(os.stat(name, dir_fd=fd, follow_symlinks=False).st_mode):
                    content = _read(fd, name, most_bytes, parts)
                    most_bytes -= len(content)
                    found[os.path.normpath(f"{folder}/{name}")] = content
    return found


def _read(folder: int, name: str, most_bytes: int, parts: Sequence[str]) -> bytes:
    with os.fdopen(os.open(name, READ, dir_fd=folder), "rb") as source:
        content = source.read(most_bytes + 1)
    if len(content) > most_bytes:
        raise SandboxRefused(f"too many bytes to get from /{'/'.join(parts)}")
    return content


def copy_tree(source: Path, target: Path) -> None:
    """Copies folders, files and links (as links); pipes, sockets and devices are left out."""

    def special(folder: str, names: list[str]) -> list[str]:
        kinds = {name: os.lstat(os.path.join(folder, name)).st_mode for name in names}  # noqa: PTH118
        return [
            name for name, mode in kinds.items() if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode) or stat.S_ISLNK(mode))
        ]

    shutil.copytree(source, target, symlinks=True, ignore=special)


def remove_tree(path: Path) -> None:
    """Removes a folder of ours, also where modes inside forbid it; nothing if it is not there. Raises OSError."""
    shutil.rmtree(path, ignore_errors=True)
    if not path.exists():
        return
    path.chmod(0o700)
    for folder, names, _ in os.walk(path):
        for name in names:
            # Before the walk goes into it; a link may point anywhere and is left as it is.
            if not (below := Path(folder, name)).is_symlink():
                below.chmod(0o700)
    shutil.rmtree(path)
