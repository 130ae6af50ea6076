"""Files of a container through the engine's archive calls: nothing in the container takes part in it.

The engine resolves paths inside the container's own tree, so none can reach this machine. What is refused here is a
path that a link inside the container would lead elsewhere: an agent could plant one where hidden tests are to go.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import tarfile
import tempfile
from collections.abc import Iterator
from typing import Any

from strop.core.errors import Unavailable
from strop.core.sandbox.files import Bounded, Entry, archive, prefixes, regular_files
from strop.core.sandbox.protocol import SandboxLost, SandboxRefused

# Bits of Go's os.FileMode.
IS_LINK = 1 << 27
IS_FOLDER = 1 << 31
IS_SPECIAL = (1 << 26) | (1 << 25) | (1 << 24) | (1 << 21) | (1 << 19)
# An archive that is larger waits on the disk and not in memory.
SPOOL_BYTES = 8 << 20
# Headers and padding of an archive beside the contents that are counted.
ARCHIVE_EXTRA_BYTES = 16 << 20


def stat_of(api: Any, container: str, path: str) -> int | None:
    """The file mode, as Go has it, of a path in a container; a link is not followed. None if there is none."""
    answer = api.head(api._url("/containers/{0}/archive", container), params={"path": path}, timeout=api.timeout)
    told = answer.headers.get("X-Docker-Container-Path-Stat")
    if answer.status_code == 404 and told is None:
        # Without a body nothing says whether the path or the whole container is missing.
        api.inspect_container(container)
        return None
    if told is None:
        raise SandboxLost(f"the engine answers {answer.status_code} to a question for {path}")
    return int(json.loads(base64.b64decode(told))["mode"])


def follow(api: Any, container: str, path: str) -> tuple[list[str], int | None]:
    """The folders on the way to `path` (itself not among them) that do not exist, and its mode or None.

    Raises SandboxRefused if a part of the path, the last one too, is a link, or one on the way is no folder.
    """
    parts = list(prefixes(path))
    for count, part in enumerate(parts):
        mode = stat_of(api, container, part)
        if mode is None:
            return parts[count:-1], None
        if mode & IS_LINK:
            raise SandboxRefused(f"a link on the way: {part}")
        if part == path:
            return [], mode
        if not mode & IS_FOLDER:
            raise SandboxRefused(f"not a folder: {part}")
    return [], IS_FOLDER


def put_entries(api: Any, container: str, entries: list[Entry], folders: list[str], owner: tuple[int, int]) -> None:
    """Writes the files, and makes the folders on the way and those named. Raises SandboxRefused as `follow` does."""
    made: dict[str, None] = {}
    known: set[str] = set()
    for path, is_file in [*((folder, False) for folder in folders), *((entry.path, True) for entry in entries)]:
        parent = path.rpartition("/")[0]
        if is_file and parent in known:
            # Beside a file that was looked at; only the last part is new.
            mode = None if parent in made else stat_of(api, container, path)
            missing: list[str] = []
            if mode is not None and mode & IS_LINK:
                raise SandboxRefused(f"a link on the way: {path}")
        else:
            missing, mode = follow(api, container, path)
        known.add(parent)
        if is_file and mode is not None and mode & (IS_FOLDER | IS_SPECIAL):
            raise SandboxRefused(f"not a regular file: {path}")
        if not is_file and mode is not None and not mode & IS_FOLDER:
            raise SandboxRefused(f"not a folder: {path}")
        made.update(dict.fromkeys(missing))
        if not is_file and mode is None:
            made[path] = None
    if not entries and not made:
        return
    with tempfile.SpooledTemporaryFile(max_size=SPOOL_BYTES) as spool:
        archive(entries, *owner, list(made), spool)
        spool.seek(0)
        api.put_archive(container, "/", spool)


def get_files(api: Any, container: str, path: str, most_bytes: int) -> Iterator[tuple[str, bytes]]:
    """The regular files at or below `path`, by the name in the archive: it begins with the last part of the path.

    Raises FileNotFoundError, SandboxRefused.
    """
    blocks, _ = api.get_archive(container, path)
    with contextlib.closing(blocks):
        bounded = Bounded(iter(blocks), most_bytes + ARCHIVE_EXTRA_BYTES, path)
        with tarfile.open(fileobj=io.BufferedReader(bounded), mode="r|") as tar:
            yield from regular_files(tar, most_bytes, path)


def ids_of(api: Any, container: str, user: str) -> tuple[int, int]:
    """The numbers of `user` (name or number, group or not) by the container's own lists. Raises Unavailable."""
    name, _, group = user.partition(":")
    uid, gid = _number(name), _number(group)
    if uid is None or (gid is None and not group):
        for line in _lines(api, container, "/etc/passwd"):
            if len(line) > 3 and (line[0] == name or line[2] == name):
                uid, gid = int(line[2]), int(line[3]) if gid is None and not group else gid
                break
    if group and gid is None:
        gid = next((int(line[2]) for line in _lines(api, container, "/etc/group") if line[0] == group), None)
        if gid is None:
            raise Unavailable(f"the image has no group {group!r}")
    if uid is None:
        raise Unavailable(f"the image has no user {name!r}")
    return uid, gid or 0


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _lines(api: Any, container: str, path: str) -> list[list[str]]:
    if stat_of(api, container, path) is None:
        return []
    found = list(get_files(api, container, path, 1 << 20))
    text = found[0][1].decode("utf-8", "replace") if found else ""
    return [line.split(":") for line in text.splitlines() if ":" in line]
