"""The one protocol of the sandboxes: a driver starts them, each runs commands and takes and gives files.

What goes wrong has one of four faces:
- a command that fails, is killed or runs out of time is an ordinary result: the policy's affair;
- SandboxRefused: a file operation that the rules forbid (a path that leaves the sandbox, a link on the way, too large);
- SandboxLost: the machine failed, not the policy; a rollout turns it into its `error`;
- errors.Unavailable: an engine, an image, a program is missing; the message says what brings it.

A sandbox belongs to one thread at a time; a driver may be shared by threads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, Self

MIB = 1 << 20
GIB = 1 << 30


class SandboxLost(Exception):  # noqa: N818 (it says what happened)
    """The sandbox or its engine is gone or does not answer: a failure of the machine and never of the policy."""


class SandboxRefused(Exception):  # noqa: N818
    """A file operation that is not allowed: the path leaves the sandbox, goes through a link, or holds too much."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a sandbox may use.

    `memory_bytes` (swap included), `cpus` (1.5 is one and a half) and `pids` (processes and threads) bound the whole
    sandbox in Docker, and each process or the user in the driver `process`. `disk_bytes` bounds what is written where
    the engine's storage can do that, and each single file everywhere; None is no bound. `wall_clock_s` bounds a command
    that names no time of its own. `output_bytes` bounds what is kept of stdout and of stderr, each. `transfer_bytes`
    bounds one put or get.
    """

    memory_bytes: int = 2 * GIB
    cpus: float = 1.0
    pids: int = 256
    disk_bytes: int | None = None
    network: bool = False
    wall_clock_s: float = 60.0
    output_bytes: int = MIB
    transfer_bytes: int = 256 * MIB


@dataclass(frozen=True, slots=True)
class SandboxSpec:
    """What to start.

    `image` names an image for Docker; `rootfs` a folder with a whole system for the driver `process` (default: this
    machine's own, read only). `workdir` is where commands run and relative paths begin; it and `folders` (absolute) are
    made if absent, and the agent may write there. `env` is added for each command. `user` (a name or uid[:gid], Docker
    only) runs the commands; default: the image's own. `capabilities` (Docker only, e.g. "CHOWN") are given back; all
    others are dropped. With one of them, a command that is root can end its own sandbox, which then is lost.
    """

    image: str | None = None
    rootfs: Path | None = None
    workdir: str = "/app"
    folders: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    user: str | None = None
    capabilities: tuple[str, ...] = ()
    limits: Limits = field(default_factory=Limits)


@dataclass(frozen=True, slots=True)
class ExecResult:
    """What became of a command.

    `exit_code` is 128 + N where signal N ended it, 127 where it was not found, and None where its time was up. Of a
    long output the middle is left out: half of the cap from its start, a line that says how much is missing, half from
    its end. `duration_s` is wall-clock time, without the making of the sandbox.
    """

    exit_code: int | None
    stdout: bytes
    stderr: bytes
    stdout_truncated: bool = False
    stderr_truncated: bool = False
    timed_out: bool = False
    duration_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The files of a sandbox at one moment, no processes. Lives until its driver is closed or is told to forget it."""

    id: str
    spec: SandboxSpec


class Sandbox(Protocol):
    """A started sandbox. A context manager: leaving it removes everything."""

    name: str
    spec: SandboxSpec

    def exec(
        self,
        command: Sequence[str] | str,
        *,
        stdin: bytes = b"",
        env: Mapping[str, str] | None = None,
        workdir: str | None = None,
        timeout_s: float | None = None,
        output_bytes: int | None = None,
    ) -> ExecResult:
        """Runs a command: arguments as they are, or a text for `sh -c`. Stdin ends after the given bytes.

        It ends when the command itself has ended. At the end of `timeout_s` the command is killed with everything it
        started, also what has left its session; the sandbox lives on. What a finished command left running goes on
        in Docker until `stop_processes`, and ends with the command in the driver `process`.

        Raises SandboxLost.
        """
        ...

    def put(self, path: str, content: bytes | Path | Mapping[str, bytes], *, executable: bool = False) -> None:
        """Writes a file (bytes, or a Path on this machine), or a folder (a Path, or relative names with contents).

        Relative paths begin at the working directory; folders on the way are made; the files belong to the agent's
        user. Modes of a Path are kept; `executable` is for contents given as bytes.

        Raises SandboxRefused (".." in a path, a link on the way or in the given folder, over `transfer_bytes`),
        SandboxLost.
        """
        ...

    def get(self, path: str) -> bytes:
        """The content of a regular file. Raises FileNotFoundError; SandboxRefused as `put` does; SandboxLost."""
        ...

    def get_folder(self, path: str) -> dict[str, bytes]:
        """The regular files below a folder by relative name, links and the like left out. Raises as `get` does."""
        ...

    def path(self, path: str) -> str:
        """Where a command inside finds what `put` and `get` call `path`. Raises SandboxRefused."""
        ...

    def stop_processes(self) -> None:
        """Kills whatever still runs inside; files stay. Raises SandboxLost."""
        ...

    def snapshot(self) -> Snapshot:
        """Keeps the files as they are now. Raises SandboxLost."""
        ...

    def close(self) -> None:
        """Removes the sandbox. Never raises for what is gone already, and returns within CLOSE_LIMIT_S."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: Any) -> None: ...


class Sandboxes(Protocol):
    """A driver: starts sandboxes and removes all of them, and their snapshots, when it is closed."""

    name: str

    def start(self, spec: SandboxSpec) -> Sandbox:
        """A new sandbox. Raises Unavailable (no such image, no shell in it), SandboxLost."""
        ...

    def restore(self, snapshot: Snapshot) -> Sandbox:
        """A new sandbox with the files of a snapshot of this driver. Raises SandboxLost."""
        ...

    def forget(self, snapshot: Snapshot) -> None:
        """Removes a snapshot."""
        ...

    def reap(self) -> int:
        """Removes what runs of strop that are dead have left; gives how many sandboxes and snapshots that were."""
        ...

    def close(self) -> None:
        """Removes the sandboxes and snapshots that are left."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(self, *failure: Any) -> None: ...
