"""Hidden tests: they enter a sandbox from outside, after the agent has stopped, and are compared after they ran."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from strop.core.sandbox.protocol import ExecResult, Sandbox, SandboxRefused


@dataclass(frozen=True, slots=True)
class HiddenRun:
    """What became of hidden tests.

    `tampered` names, by path in the sandbox, the hidden files that were changed, replaced or removed when the command
    had ended; `planted` what lay in their folder before they came. Where either holds something, `result` proves
    nothing.
    """

    result: ExecResult
    tampered: tuple[str, ...] = ()
    planted: tuple[str, ...] = ()


def run_hidden(
    sandbox: Sandbox,
    files: Mapping[str, bytes] | Path,
    folder: str,
    command: Sequence[str] | str,
    *,
    env: Mapping[str, str] | None = None,
    workdir: str | None = None,
    timeout_s: float | None = None,
    keep_processes: bool = False,
) -> HiddenRun:
    """Puts `files` (relative names with contents, or a folder on this machine) into `folder`, and runs the command.

    What the agent left running is killed first, so that nothing of it sees them; `keep_processes` is for tasks that are
    to leave a service running. The folder should be one that the image does not have.

    Raises SandboxRefused if the folder cannot be reached (the agent put a link in its place: a failure of the policy),
    SandboxLost.
    """
    if not keep_processes:
        sandbox.stop_processes()
    planted = tuple(sorted(_digests(sandbox, folder)))
    sandbox.put(folder, files)
    ours = _ours(files)
    result = sandbox.exec(command, env=env, workdir=workdir, timeout_s=timeout_s)
    try:
        now = _digests(sandbox, folder)
    except SandboxRefused:
        # The folder itself was replaced, or filled beyond what can be taken out.
        now = {}
    tampered = sorted(name for name, digest in ours.items() if now.get(name) != digest)
    top = folder.rstrip("/")
    return HiddenRun(result, tuple(f"{top}/{name}" for name in tampered), tuple(f"{top}/{name}" for name in planted))


def _digests(sandbox: Sandbox, folder: str) -> dict[str, str]:
    try:
        found = sandbox.get_folder(folder)
    except FileNotFoundError:
        return {}
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}


def _ours(files: Mapping[str, bytes] | Path) -> dict[str, str]:
    if isinstance(files, Path):
        files = {path.relative_to(files).as_posix(): path.read_bytes() for path in files.rglob("*") if path.is_file()}
    return {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
