"""Sandboxes in Docker, through its SDK (extra `sandbox`).

A container has an init as PID 1 and one idle shell below it. The idle shell has a user of its own, so that no command
can kill it, and waits at the end of a connection that this process holds: when this process dies, however, it reads an
end, and the container stops with everything in it. What is left is a stopped container, which the next `reap` removes.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from strop.core.errors import Unavailable, UsageError
from strop.core.sandbox.cleanup import CLOSE_LIMIT_S, run_all
from strop.core.sandbox.docker_engine import CALL_S, connect, engine_errors, gone_is_fine
from strop.core.sandbox.docker_exec import Command, Execution, Stream
from strop.core.sandbox.docker_files import IS_FOLDER, IS_SPECIAL, follow, get_files, ids_of, put_entries
from strop.core.sandbox.files import entries_of, inside
from strop.core.sandbox.owner import Owner, new_run_id
from strop.core.sandbox.protocol import ExecResult, SandboxLost, SandboxRefused, SandboxSpec, Snapshot

log = logging.getLogger("strop.sandbox")

RUN_LABEL, OWNER_LABEL = "strop.run", "strop.owner"
SNAPSHOTS = "strop-snapshot"
# Nobody's number: with no capabilities, neither root nor another user may signal its processes.
IDLE_USER = "64999:64999"
IDLE = "echo ready; while read -r line; do :; done"
READY_S = 20.0


class DockerSandboxes:
    """The engine that DOCKER_HOST names, or the default one."""

    name = "docker"

    def __init__(self, *, run_id: str | None = None, connect_s: float = 10.0) -> None:
        """Raises Unavailable where the SDK is missing or no engine answers."""
        self.run_id = run_id or new_run_id()
        self.api, self.slow_api = connect(connect_s)
        with engine_errors("asking for the engine's processors"):
            self._cpus = float(self.api.info()["NCPU"])
        self.labels = {RUN_LABEL: self.run_id, OWNER_LABEL: str(Owner.here())}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._settled = threading.Condition(self._lock)
        self._num_making = 0
        self._containers: dict[str, DockerSandbox | None] = {}
        self._images: list[str] = []
        self._bounds_disk = True
        self._closed = False
        atexit.register(self.close)

    def start(self, spec: SandboxSpec) -> DockerSandbox:
        """A container of `spec.image`, which must be here: nothing is pulled. Raises as the protocol says."""
        if not spec.image:
            raise UsageError("a sandbox in Docker needs the name of an image")
        return self._start(spec.image, spec)

    def restore(self, snapshot: Snapshot) -> DockerSandbox:
        """A container of a snapshot's image."""
        try:
            return self._start(snapshot.id, snapshot.spec, has_folders=True)
        except Unavailable as error:
            raise SandboxLost(str(error)) from None

    def _start(self, image: str, spec: SandboxSpec, *, has_folders: bool = False) -> DockerSandbox:
        user = spec.user or self._user_of(image) or "0:0"
        with self._making():
            name = f"strop-{self.run_id}-{next(self._numbers)}"
            # Known before it is made, so that an interrupt in between leaves nothing behind.
            self._containers[name] = None
            try:
                sandbox = DockerSandbox(self, name, spec, user)
                with engine_errors("starting a container"):
                    self._create(name, image, spec, sandbox.engine_workdir)
                self._check_open()
                sandbox.boot(image, has_folders=has_folders)
                with self._lock:
                    self._check_open()
                    self._containers[name] = sandbox
            except BaseException:
                # The name stays known: an engine that was interrupted may still make it, and `close` tries once more.
                run_all([lambda: self._remove_container(name)])
                raise
        return sandbox

    @contextlib.contextmanager
    def _making(self) -> Iterator[None]:
        """While something is made, `close` waits: the engine may make it just after it was looked for in vain."""
        with self._lock:
            self._check_open()
            self._num_making += 1
        try:
            yield
        finally:
            with self._settled:
                self._num_making -= 1
                self._settled.notify_all()

    def _check_open(self) -> None:
        if self._closed:
            raise SandboxLost("the driver is closed")

    def _user_of(self, image: str) -> str:
        """Whom the image runs as, "" if it does not say. Raises Unavailable."""
        import docker.errors

        with engine_errors("looking for an image"):
            try:
                return str((self.api.inspect_image(image)["Config"] or {}).get("User") or "")
            except docker.errors.ImageNotFound:
                raise Unavailable(f"the engine has no image {image!r}; bring it with: docker pull {image}") from None

    def _create(self, name: str, image: str, spec: SandboxSpec, workdir: str) -> None:
        import docker.errors

        # The engine gives a command no capability that its first process has not.
        idle_user = "0:0" if spec.capabilities else IDLE_USER

        def create() -> None:
            self.api.create_container(
                image, ["-c", IDLE], name=name, hostname="sandbox", entrypoint=["sh"], user=idle_user,
                working_dir=workdir, stdin_open=True, labels=self.labels, healthcheck={"test": ["NONE"]},
                host_config=self._host_config(spec),
            )  # fmt: skip

        try:
            create()
        except docker.errors.APIError as error:
            if spec.limits.disk_bytes is None or "storage" not in str(error).lower():
                raise
            self._bounds_disk = False
            log.warning("the engine's storage cannot bound a container's disk; each file in it is bounded")
            create()

    def _host_config(self, spec: SandboxSpec) -> Any:
        from docker.types import LogConfig, Ulimit

        limits = spec.limits
        ulimits = [Ulimit(name="core", soft=0, hard=0)]
        storage = None
        if limits.disk_bytes is not None:
            ulimits.append(Ulimit(name="fsize", soft=limits.disk_bytes, hard=limits.disk_bytes))
            storage = {"size": str(limits.disk_bytes)} if self._bounds_disk else None
        return self.api.create_host_config(
            network_mode="default" if limits.network else "none",
            mem_limit=limits.memory_bytes,
            memswap_limit=limits.memory_bytes,
            nano_cpus=int(min(limits.cpus, self._cpus) * 1e9),
            pids_limit=limits.pids,
            ulimits=ulimits,
            storage_opt=storage,
            cap_drop=["ALL"],
            cap_add=list(spec.capabilities),
            security_opt=["no-new-privileges:true"],
            init=True,
            log_config=LogConfig(type="none"),
        )

    def remove(self, name: str) -> None:
        """Removes a container of this run, within CLOSE_LIMIT_S; one that is gone is none to worry about."""
        if run_all([lambda: self._remove_container(name)]):
            with self._lock:
                self._containers.pop(name, None)

    def _remove_container(self, name: str) -> None:
        gone_is_fine(lambda: self.api.remove_container(name, v=True, force=True), "removing a container")

    def _remove_image(self, image: str) -> None:
        gone_is_fine(lambda: self.slow_api.remove_image(image, force=True), "removing a snapshot")

    def _remove_images(self, images: Sequence[str]) -> None:
        for image in images:
            self._remove_image(image)

    def commit(self, sandbox: DockerSandbox) -> Snapshot:
        """Makes an image of a sandbox's files; its processes stand still meanwhile."""
        with self._making():
            tag = f"{self.run_id}-{next(self._numbers)}"
            image = f"{SNAPSHOTS}:{tag}"
            self._images.append(image)
            config = {"Labels": self.labels, "User": sandbox.user}
            with engine_errors("taking a snapshot"):
                self.slow_api.commit(sandbox.name, repository=SNAPSHOTS, tag=tag, conf=config)
            if self._closed:
                self._remove_image(image)
                self._check_open()
        return Snapshot(image, sandbox.spec)

    def forget(self, snapshot: Snapshot) -> None:
        """Removes a snapshot; sandboxes that were made of it go on."""
        self._remove_image(snapshot.id)
        with self._lock, contextlib.suppress(ValueError):
            self._images.remove(snapshot.id)

    def reap(self) -> int:
        """Removes the containers and images of dead owners."""
        with engine_errors("looking for leftovers"):
            containers = [one["Id"] for one in self._labelled(self.api.containers, all=True)]
            images = [one["Id"] for one in self._labelled(self.api.images)]
        run_all([lambda one=one: self._remove_container(one) for one in containers])  # type: ignore[misc]
        # One after the other, the newest first: a snapshot may stand on an older one.
        run_all([lambda: self._remove_images(images)])
        return len(containers) + len(images)

    def _labelled(self, listing: Callable[..., list[dict[str, Any]]], **options: Any) -> list[dict[str, Any]]:
        found = listing(filters={"label": OWNER_LABEL}, **options)
        owned = [(Owner.parse((one["Labels"] or {}).get(OWNER_LABEL, "")), one) for one in found]
        dead = [one for owner, one in owned if owner is not None and owner.is_dead()]
        return sorted(dead, key=lambda one: int(one["Created"]), reverse=True)

    def close(self) -> None:
        """Removes the containers and images of this run, within CLOSE_LIMIT_S."""
        atexit.unregister(self.close)
        with self._lock:
            self._closed = True
            containers, images = self._containers.copy(), self._images[::-1]
            self._containers.clear()
            self._images.clear()
        limit = time.monotonic() + CLOSE_LIMIT_S
        run_all([lambda name=name: self._remove_container(name) for name in containers])  # type: ignore[misc]
        if images:
            run_all([lambda: self._remove_images(images)], max(1.0, limit - time.monotonic()))
        with self._settled:
            # What is being made is removed by those who make it.
            self._settled.wait_for(lambda: not self._num_making, max(0.0, limit - time.monotonic()))
        for sandbox in containers.values():
            if sandbox is not None:
                sandbox.hang_up()
        self.api.close()
        self.slow_api.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()


class DockerSandbox:
    """One container."""

    def __init__(self, driver: DockerSandboxes, name: str, spec: SandboxSpec, user: str) -> None:
        self.name = name
        self.spec = spec
        self._driver = driver
        self.user = user
        self._ids = (0, 0)
        self._marks = itertools.count(1)
        self._line: Stream | None = None

    @property
    def engine_workdir(self) -> str:
        """The folder that the engine itself is to make: it belongs to root, and saves a fifth of a second."""
        return inside(self.spec.workdir, "/") if self.user.partition(":")[0] in ("0", "root") else "/"

    def boot(self, image: str, *, has_folders: bool) -> None:
        """Makes the working folders and starts the container. Raises Unavailable for an image without a shell."""
        api = self._driver.api
        with engine_errors("preparing a container"):
            self._ids = ids_of(api, self.name, self.user)
            folders = [inside(folder, "/") for folder in (self.spec.workdir, *self.spec.folders)]
            if not has_folders:
                put_entries(api, self.name, [], [one for one in folders if one != self.engine_workdir], self._ids)
        if not self._wake():
            raise Unavailable(f"the image {image!r} has no shell: a sandbox needs `sh` in it")

    def _wake(self) -> bool:
        """Starts the container; whether its shell answers."""
        import docker.errors

        api = self._driver.api
        with engine_errors("starting a container"):
            line = Stream(api.attach_socket(self.name, {"stdin": 1, "stdout": 1, "stream": 1}))
            self._line = line
            try:
                api.start(self.name)
            except docker.errors.APIError as error:
                if "docker-init" in str(error):
                    raise Unavailable("the engine has no docker-init; on Debian: apt install tini") from None
                raise
            limit, said = time.monotonic() + READY_S, b""
            while b"ready" not in said:
                blocks = line.read(limit - time.monotonic())
                if not blocks:
                    break
                said += b"".join(block for _, block in blocks)
            if b"ready" in said:
                return True
            code = api.inspect_container(self.name)["State"]["ExitCode"]
        if code not in (126, 127):
            raise SandboxLost(f"the container did not start (exit status {code})")
        return False

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
        run = Command(
            ["sh", "-c", command] if isinstance(command, str) else list(command),
            self.user,
            inside(workdir or ".", self.spec.workdir),
            {**self.spec.env, **(env or {})},
            stdin,
            limits.wall_clock_s if timeout_s is None else timeout_s,
            limits.output_bytes if output_bytes is None else output_bytes,
        )
        # The dot ends the number, so that no mark is the start of another.
        mark = f"strop-{next(self._marks)}."
        result, survives = Execution(self._driver.api, self.name, run, mark).run()
        if survives:
            log.info("a command could not be killed alone; all processes of %s are", self.name)
            self.stop_processes()
        return result

    def put(self, path: str, content: bytes | Path | Mapping[str, bytes], *, executable: bool = False) -> None:
        """Writes files, as the protocol says."""
        target = self.path(path)
        entries = entries_of(target, content, executable=executable, most_bytes=self.spec.limits.transfer_bytes)
        is_folder = isinstance(content, Mapping) or (isinstance(content, Path) and content.is_dir())
        with engine_errors("putting files"):
            put_entries(self._driver.slow_api, self.name, entries, [target] if is_folder else [], self._ids)

    def get(self, path: str) -> bytes:
        """A file, as the protocol says."""
        target, mode = self._look(path)
        if mode & (IS_FOLDER | IS_SPECIAL):
            raise SandboxRefused(f"not a regular file: {target}")
        for _, content in self._files(target):
            return content
        raise SandboxRefused(f"not a regular file: {target}")

    def get_folder(self, path: str) -> dict[str, bytes]:
        """A folder's files, as the protocol says."""
        target, mode = self._look(path)
        if not mode & IS_FOLDER:
            raise SandboxRefused(f"not a folder: {target}")
        return {name.partition("/")[2]: content for name, content in self._files(target)}

    def _look(self, path: str) -> tuple[str, int]:
        target = self.path(path)
        with engine_errors("looking for a file"):
            _, mode = follow(self._driver.api, self.name, target)
        if mode is None:
            raise FileNotFoundError(f"no such file in the sandbox: {target}")
        return target, mode

    def _files(self, target: str) -> list[tuple[str, bytes]]:
        with engine_errors("getting files"):
            return list(get_files(self._driver.slow_api, self.name, target, self.spec.limits.transfer_bytes))

    def path(self, path: str) -> str:
        """The absolute path."""
        return inside(path, self.spec.workdir)

    def stop_processes(self) -> None:
        """Stops and starts the container; its files stay."""
        api = self._driver.api
        with engine_errors("stopping processes"):
            api.kill(self.name)
            api.wait(self.name, timeout=CALL_S)
        self.hang_up()
        if not self._wake():
            raise SandboxLost("the shell of the container is gone")

    def snapshot(self) -> Snapshot:
        """An image of the files as they are."""
        return self._driver.commit(self)

    def close(self) -> None:
        """Removes the container."""
        self._driver.remove(self.name)
        self.hang_up()

    def hang_up(self) -> None:
        """Lets go of the connection that keeps the container running."""
        if self._line is not None:
            self._line.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *failure: Any) -> None:
        self.close()
