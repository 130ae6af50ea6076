"""Sandboxes as processes of this machine, for trusted tasks and for machines without Docker.

With bubblewrap a command sees this machine's programs (or a folder `rootfs`) read only, a /tmp and working folders of
its own, its own processes and no network. Without it a command is an ordinary process in a temporary folder: it can
read what the user can, and the network is not cut off. Limits are those of a process (memory of each, size of a file)
and, for a user that is not root, the number of processes. What a command leaves running ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Self

from strop.core.errors import Unavailable, UsageError
from strop.core.sandbox import process_files as tree
from strop.core.sandbox import process_launch
from strop.core.sandbox.cleanup import run_all
from strop.core.sandbox.files import entries_of, inside
from strop.core.sandbox.owner import Owner, new_run_id
from strop.core.sandbox.process_run import run
from strop.core.sandbox.protocol import ExecResult, SandboxLost, SandboxRefused, SandboxSpec, Snapshot

log = logging.getLogger("strop.sandbox")

PREFIX = "strop-sandbox-"
OWNER_FILE = "owner"
# What a command sees of a system; whatever else lies there (homes, data) stays outside.
SYSTEM = ("usr", "bin", "sbin", "lib", "lib32", "lib64", "libx32", "etc", "opt")
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
RUN = '"$@"; exit $?'
ENTER = 'cd "$1" || exit 126; unset OLDPWD; shift; '


class ProcessSandboxes:
    """This machine."""

    name = "process"

    def __init__(self, *, run_id: str | None = None, bubblewrap: bool | None = None, instead_of: str = "") -> None:
        """`bubblewrap`: None uses it where it works, True insists; `instead_of` says why not Docker, for the log.

        Raises Unavailable for True where bubblewrap does not work.
        """
        self.run_id = run_id or new_run_id()
        trouble = "" if bubblewrap is False else _trouble_with_bubblewrap()
        if bubblewrap and trouble:
            raise Unavailable(f"{trouble}; on Debian: apt install bubblewrap")
        self.wraps = bubblewrap is not False and not trouble
        how = "" if self.wraps else f", and without bubblewrap{trouble and f' ({trouble})'} the network is not cut off"
        why = instead_of and f"{instead_of}; "
        log.warning("%ssandboxes are processes of this machine, for trusted tasks only%s", why, how)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._folders: list[Path] = []
        self._running: set[subprocess.Popen[bytes]] = set()
        self.closed = False
        atexit.register(self.close)

    def start(self, spec: SandboxSpec) -> ProcessSandbox:
        """A new folder; an image in the spec is not looked at. Raises Unavailable for a rootfs without `sh`."""
        if spec.rootfs is not None and not self.wraps:
            raise Unavailable("a rootfs needs bubblewrap; on Debian: apt install bubblewrap")
        sandbox = ProcessSandbox(self, self.new_folder(), spec)
        sandbox.make_folders()
        if self.wraps and (result := sandbox.exec(":", timeout_s=20.0)).exit_code != 0:
            sandbox.close()
            told = result.stderr.decode("utf-8", "replace").strip()
            raise Unavailable(f"no sandbox can be started here ({spec.rootfs or 'this system'}): {told}")
        return sandbox

    def restore(self, snapshot: Snapshot) -> ProcessSandbox:
        """A copy of a snapshot's files."""
        folder = self.new_folder()
        _copy(Path(snapshot.id), folder)
        return ProcessSandbox(self, folder, snapshot.spec)

    def forget(self, snapshot: Snapshot) -> None:
        """Removes a snapshot."""
        self.remove(Path(snapshot.id))

    def new_folder(self) -> Path:
        """An empty folder that says whose it is."""
        with self._lock:
            if self.closed:
                raise SandboxLost("the driver is closed")
            try:
                folder = Path(tempfile.mkdtemp(prefix=f"{PREFIX}{self.run_id}-{next(self._numbers)}-"))
                self._folders.append(folder)
                (folder / OWNER_FILE).write_text(str(Owner.here()), encoding="utf-8")
            except OSError as error:
                raise SandboxLost(f"no temporary folder: {error}") from None
        return folder

    def remove(self, folder: Path) -> None:
        """Removes a folder of this run."""
        run_all([lambda: tree.remove_tree(folder)])
        with self._lock, contextlib.suppress(ValueError):
            self._folders.remove(folder)

    def started(self, process: subprocess.Popen[bytes]) -> None:
        """Takes note of a command that runs, so that `close` can end it."""
        with self._lock:
            self._running.add(process)
            if self.closed:
                process.terminate()

    def ended(self, process: subprocess.Popen[bytes]) -> None:
        """Takes note of its end."""
        with self._lock:
            self._running.discard(process)

    def reap(self) -> int:
        """Removes the folders of dead owners from the folder for temporary files."""
        dead = []
        for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError, ValueError):
                owner = Owner.parse((folder / OWNER_FILE).read_text(encoding="utf-8"))
                if owner is not None and owner.is_dead() and folder.lstat().st_uid == os.getuid():
                    dead.append(folder)
        run_all([lambda folder=folder: tree.remove_tree(folder) for folder in dead])  # type: ignore[misc]
        return len(dead)

    def close(self) -> None:
        """Ends what runs and removes all folders, within CLOSE_LIMIT_S."""
        atexit.unregister(self.close)
        with self._lock:
            self.closed = True
            folders = self._folders[:]
            self._folders.clear()
            for process in self._running:
                process.terminate()
        run_all([lambda folder=folder: tree.remove_tree(folder) for folder in folders])  # type: ignore[misc]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


class ProcessSandbox:
    """One folder: `files` holds the working folders by their absolute names, `tmp` is /tmp, and home."""

    def __init__(self, driver: ProcessSandboxes, folder: Path, spec: SandboxSpec) -> None:
        self.name = folder.name
        self.spec = spec
        self._driver = driver
        self._folder = folder
        wanted = sorted({inside(one, "/") for one in (spec.workdir, *spec.folders)})
        if "/" in wanted:
            raise UsageError("the root folder cannot be a working folder of a sandbox of kind process")
        self._wanted = wanted
        self._tops = [one for one in wanted if not any(_is_below(one, other) for other in wanted if other != one)]

    def make_folders(self) -> None:
        """Makes the working folders."""
        try:
            (self._folder / "tmp").mkdir()
            for one in self._wanted:
                (self._folder / "files" / one.lstrip("/")).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SandboxLost(f"no working folder: {error}") from None

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
        """Runs a command, as the protocol says."""
        limits = self.spec.limits
        argv = ["sh", "-c", command] if isinstance(command, str) else list(command)
        # A folder of the system may be worked in too: it can be read.
        where = inside(workdir or ".", self.spec.workdir)
        home = "/tmp" if self._driver.wraps else str(self._folder / "tmp")  # noqa: S108
        variables = {"PATH": PATH, "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **self.spec.env, **(env or {})}
        launch = [
            sys.executable, "-I", "-S", process_launch.__file__, str(os.getpid()), str(limits.memory_bytes),
            str(limits.pids), str(limits.disk_bytes or 0), "wrap" if self._driver.wraps else "plain",
        ]  # fmt: skip
        cwd = str(self._folder)
        if self._driver.wraps:
            launch += [*self._wrapping(where), "--", "sh", "-c", RUN, "sh", *argv]
        else:
            launch += ["sh", "-c", ENTER + RUN, "sh", self._outside(where), *argv]
        known: list[subprocess.Popen[bytes]] = []

        def started(process: subprocess.Popen[bytes]) -> None:
            known.append(process)
            self._driver.started(process)

        try:
            result = run(
                launch, env=variables, cwd=cwd, stdin=stdin, started=started,
                timeout_s=limits.wall_clock_s if timeout_s is None else timeout_s,
                output_bytes=limits.output_bytes if output_bytes is None else output_bytes,
            )  # fmt: skip
        except (OSError, ValueError) as error:
            raise SandboxLost(f"a command cannot be started: {error}") from None
        finally:
            for process in known:
                self._driver.ended(process)
        if self._driver.closed:
            raise SandboxLost("the driver was closed during a command")
        return result

    def _wrapping(self, workdir: str) -> list[str]:
        """The arguments of bubblewrap."""
        words = ["bwrap", "--die-with-parent", "--new-session", "--unshare-all", "--unshare-user", "--cap-drop", "ALL"]
        if self.spec.limits.network:
            words.append("--share-net")
        root = Path("/") if self.spec.rootfs is None else self.spec.rootfs
        for name in SYSTEM:
            place = root / name
            if place.is_symlink():
                words += ["--symlink", str(place.readlink()), f"/{name}"]
            elif place.is_dir():
                words += ["--ro-bind", str(place), f"/{name}"]
        words += ["--proc", "/proc", "--dev", "/dev", "--bind", str(self._folder / "tmp"), "/tmp"]  # noqa: S108
        for one in self._tops:
            words += ["--bind", str(self._folder / "files" / one.lstrip("/")), one]
        return [*words, "--hostname", "sandbox", "--chdir", workdir]

    def _parts(self, path: str) -> list[str]:
        """The parts of a path below the sandbox's own folder. Raises SandboxRefused."""
        target = inside(path, self.spec.workdir)
        for own in ("files", "tmp"):
            # A command without bubblewrap sees, and says, the real names.
            if not self._driver.wraps and _is_below(target, f"{self._folder}/{own}"):
                return list(PurePosixPath(target).relative_to(self._folder).parts)
        if any(_is_below(target, top) for top in self._tops):
            return ["files", *target.lstrip("/").split("/")]
        if _is_below(target, "/tmp"):  # noqa: S108
            return target.lstrip("/").split("/")
        raise SandboxRefused(f"outside the folders of the sandbox ({', '.join([*self._tops, '/tmp'])}): {target}")  # noqa: S108

    def _outside(self, path: str) -> str:
        try:
            return str(self._folder.joinpath(*self._parts(path)))
        except SandboxRefused:
            return path

    def path(self, path: str) -> str:
        """As commands see it: with bubblewrap as it is, without it the real name."""
        parts = self._parts(path)
        return inside(path, self.spec.workdir) if self._driver.wraps else str(self._folder.joinpath(*parts))

    def put(self, path: str, content: bytes | Path | Mapping[str, bytes], *, executable: bool = False) -> None:
        """Writes files, as the protocol says."""
        parts = self._parts(path)
        target = "/" + "/".join(parts)
        entries = entries_of(target, content, executable=executable, most_bytes=self.spec.limits.transfer_bytes)
        with self._lost("putting files"):
            if isinstance(content, Mapping) or (isinstance(content, Path) and content.is_dir()):
                with tree.opened_folder(self._folder, parts, make=True):
                    pass
            for entry in entries:
                tree.write_file(self._folder, entry.path.lstrip("/").split("/"), entry)

    def get(self, path: str) -> bytes:
        """A file, as the protocol says."""
        with self._lost("getting a file"):
            return tree.read_file(self._folder, self._parts(path), self.spec.limits.transfer_bytes)

    def get_folder(self, path: str) -> dict[str, bytes]:
        """A folder's files, as the protocol says."""
        with self._lost("getting files"):
            return tree.read_folder(self._folder, self._parts(path), self.spec.limits.transfer_bytes)

    @contextlib.contextmanager
    def _lost(self, doing: str) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if isinstance(error, FileNotFoundError) and self._folder.is_dir():
                raise FileNotFoundError(f"no such file in the sandbox: {error.filename}") from None
            raise SandboxLost(f"{doing}: {error}") from None

    def stop_processes(self) -> None:
        """Nothing runs between commands."""

    def snapshot(self) -> Snapshot:
        """A copy of the folder."""
        folder = self._driver.new_folder()
        _copy(self._folder, folder)
        return Snapshot(str(folder), self.spec)

    def close(self) -> None:
        """Removes the folder."""
        self._driver.remove(self._folder)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


def _is_below(path: str, top: str) -> bool:
    return path == top or path.startswith(top.rstrip("/") + "/")


def _copy(source: Path, target: Path) -> None:
    for part in ("files", "tmp"):
        try:
            tree.copy_tree(source / part, target / part)
        except (OSError, shutil.Error) as error:
            raise SandboxLost(f"copying the files of a sandbox: {error}") from None


def _trouble_with_bubblewrap() -> str:
    """Why bubblewrap cannot be used here, or ""."""
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    trial = ["bwrap", "--unshare-all", "--unshare-user", "--ro-bind", "/", "/", "--proc", "/proc", "true"]
    try:
        done = subprocess.run(trial, capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not work here: {error}"
    return "" if done.returncode == 0 else f"bubblewrap does not work here: {done.stderr.strip()}"
