"""Whose a sandbox is: a mark that says which process made it, and whether that process is dead.

A process is named by its pid and the time it started (a pid is used again), in its pid namespace, since that boot, on
that machine: several machines, or containers with the engine's socket, may share one engine. Only where all of this can
be judged from here is an owner said to be dead.
"""

from __future__ import annotations

import os
import subprocess
import uuid
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self


@dataclass(frozen=True, slots=True)
class Owner:
    """One process. `started` is empty where the system does not tell it."""

    pid: int
    started: str
    namespace: str
    boot: str
    machine: str

    @classmethod
    def here(cls) -> Self:
        """This process."""
        pid = os.getpid()
        return cls(pid, _started(pid) or "", *_place())

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """What `str` of an owner gave, or None for anything else."""
        parts = text.split("|")
        if len(parts) != 5 or not parts[0].isdecimal():
            return None
        return cls(int(parts[0]), *parts[1:])

    def __str__(self) -> str:
        """The five parts in a line."""
        return "|".join((str(self.pid), self.started, self.namespace, self.boot, self.machine))

    def is_dead(self) -> bool:
        """Whether it surely runs no more; False also where that cannot be judged from here."""
        namespace, boot, machine = _place()
        if self.machine != machine:
            return False
        if self.boot != boot:
            return True
        if self.namespace != namespace:
            return False
        started = _started(self.pid)
        return started is None or bool(self.started and started and started != self.started)


def new_run_id() -> str:
    """An id that no other run has."""
    return uuid.uuid4().hex[:12]


@cache
def _place() -> tuple[str, str, str]:
    """This pid namespace, this boot and this machine, as far as the system names them."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    boot = _line("/proc/sys/kernel/random/boot_id")
    return namespace, boot, f"{os.uname().nodename}/{_line('/etc/machine-id')}".replace("|", "/")


def _line(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""


def _started(pid: int) -> str | None:
    """When the process started, in the system's own words; None if there is none (a zombie is none), "" if unknown."""
    try:
        # The name of the program stands in parentheses and may hold any character: fields are counted after the last.
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except FileNotFoundError:
        if Path("/proc/self/stat").exists():
            return None
    except OSError:
        return None
    else:
        return None if fields[0] in (b"Z", b"X") else fields[19].decode()
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    told = subprocess.run(["ps", "-o", "lstart=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return told.stdout.strip().replace("|", "/")
