"""From a task record to its world in the env `shell`: the sandbox, the files in it, and who judges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from strop.core.envs.shell import ShellWorld
from strop.core.envs.shell_tools import PROFILES
from strop.core.envs.tool_calls import detect_format
from strop.core.errors import DataError
from strop.core.sandbox.protocol import GIB, Limits, Sandbox, Sandboxes, SandboxLost, SandboxRefused, SandboxSpec
from strop.core.tasks.verifiers.tests import contents, folders_of, judge_sandbox
from strop.core.tasks.verifiers.verdict import Verdict

if TYPE_CHECKING:
    from strop.core.models.tokens import Tokenizer
    from strop.core.records import Record, Task

SETUP_S = 300.0


class SandboxWish(Struct, kw_only=True, forbid_unknown_fields=True):
    """The field `sandbox` of a task: what the agent finds. `setup` is a command that runs before it comes."""

    image: str | None = None
    workdir: str = "/app"
    files: dict[str, str | dict[str, str]] = {}
    setup: str | None = None
    env: dict[str, str] = {}
    network: bool = False
    memory_gib: float = 2.0
    cpus: float = 1.0
    max_time_s: float | None = None


@dataclass(slots=True)
class ShellRoom:
    """Makes the worlds. The driver of the sandboxes is opened when the first one is wanted.

    `image` is for tasks that name none. `tools` is the profile: "leaf", "bash", or "auto", which is leaf for models
    whose chat template knows tools.
    """

    open_driver: Callable[[], Sandboxes]
    image: str | None = None
    tools: str = "auto"
    _driver: Sandboxes | None = None

    def world(self, record: Record, task: Task, seed: int, tokenizer: Tokenizer) -> ShellWorld:
        """The world of one attempt. Raises DataError for a task that does not say what it needs."""
        wish = sandbox_wish(record)
        files = contents(wish.files, "sandbox.files")
        spec = SandboxSpec(
            image=wish.image or self.image, workdir=wish.workdir, env=wish.env, folders=folders_of(task),
            limits=Limits(memory_bytes=round(wish.memory_gib * GIB), cpus=wish.cpus, network=wish.network),
        )  # fmt: skip
        prompt = task.prompt
        if not prompt:
            raise DataError("missing; a task to attempt needs a prompt", field="prompt")
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        driver = self._ready()
        if driver.name == "docker" and not spec.image:
            raise DataError("missing; a sandbox in Docker needs an image (--image is for all)", field="sandbox.image")

        def open_sandbox() -> Sandbox:
            sandbox = driver.start(spec)
            _prepare(sandbox, files, wish.setup)
            return sandbox

        def verify(sandbox: Sandbox) -> Verdict:
            return judge_sandbox(sandbox, task)

        return ShellWorld(messages, open_sandbox, verify, PROFILES[self._profile(tokenizer)])

    def seconds(self, record: Record) -> float | None:
        """The time that the task itself allows."""
        return sandbox_wish(record).max_time_s

    def close(self) -> None:
        """Removes what is left of the sandboxes."""
        driver, self._driver = self._driver, None
        if driver is not None:
            driver.close()

    def _ready(self) -> Sandboxes:
        if self._driver is None:
            self._driver = self.open_driver()
        return self._driver

    def _profile(self, tokenizer: Tokenizer) -> str:
        if self.tools != "auto":
            return self.tools
        return "bash" if detect_format(tokenizer.chat_template) in (None, "bash") else "leaf"


def sandbox_wish(record: Record) -> SandboxWish:
    """What a task asks of its sandbox. Raises DataError."""
    raw = record.fields.get("sandbox")
    if raw is None:
        return SandboxWish()
    try:
        return msgspec.json.decode(raw, type=SandboxWish)
    except msgspec.DecodeError as error:
        message, _, path = str(error).partition(" - at `$")
        raise DataError(message, field="sandbox" + path.rstrip("`")) from None


def _prepare(sandbox: Sandbox, files: dict[str, bytes], setup: str | None) -> None:
    try:
        for name, data in files.items():
            sandbox.put(name, data, executable=data.startswith(b"#!"))
    except SandboxRefused as error:
        raise SandboxLost(f"the task's files cannot be put there: {error}") from None
    if setup is not None:
        done = sandbox.exec(setup, timeout_s=SETUP_S)
        if done.exit_code != 0:
            said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[-300:]
            raise SandboxLost(f"the task's setup ended with {done.exit_code}: {said}")
