"""Takes from a child process what a grader never needs: writing files, starting programs, the network, much memory.

Some graders evaluate the text that they grade (sympy's parser does). An audit hook refuses what such a text could do
harm with. It is a guard against accidents and against what a policy stumbles on, not a sandbox against an attacker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import sys
from typing import Any

FORBIDDEN = (
    "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork", "os.forkpty", "os.startfile", "os.kill",
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.truncate", "os.chmod", "os.chown",
    "os.utime", "os.setxattr", "os.removexattr", "subprocess.Popen", "shutil.", "socket.", "ctypes.", "pty.spawn",
    "tempfile.", "urllib.Request", "ftplib.", "http.client.", "smtplib.", "signal.pthread_kill", "sys.addaudithook",
    "sqlite3.", "webbrowser.open", "winreg.", "code.__new__",
)  # fmt: skip
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def confine(memory_limit_bytes: int) -> None:
    """Confines this process for good. Called after all imports, since loading a library may need what is taken here."""
    for what, limit in (
        (resource.RLIMIT_AS, memory_limit_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0),
    ):  # fmt: skip
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(what, (limit, limit))
    sys.dont_write_bytecode = True
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[Any, ...]) -> None:
    if event == "open":
        mode, flags = args[1], args[2]
        writes = isinstance(mode, str) and any(letter in mode for letter in "wax+")
        if writes or (isinstance(flags, int) and flags & WRITING):
            raise PermissionError(f"a grader does not write files: {args[0]!r}")
    elif event.startswith(FORBIDDEN):
        raise PermissionError(f"a grader does not do this: {event}")
