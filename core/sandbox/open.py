"""Which driver: Docker where an engine answers, else processes of this machine."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from strop.core.errors import Unavailable, UsageError

if TYPE_CHECKING:
    from strop.core.sandbox.protocol import Sandboxes

KINDS = ("auto", "docker", "process")

log = logging.getLogger("strop.sandbox")


def open_sandboxes(kind: str = "auto", *, run_id: str | None = None, reap: bool = True) -> Sandboxes:
    """A driver of that kind, a context manager; what dead runs have left is removed first.

    "auto" takes Docker, or processes with one line on the log that says why. `run_id` labels what is made; default: a
    new one. Raises Unavailable for "docker" where no engine answers or the SDK is missing, UsageError for another kind.
    """
    if kind not in KINDS:
        raise UsageError(f"no sandbox {kind!r}; known: {', '.join(KINDS)}")
    driver = _open(kind, run_id)
    if reap:
        try:
            count = driver.reap()
        except BaseException:
            driver.close()
            raise
        if count:
            log.info("removed %d leftovers of dead runs", count)
    return driver


def _open(kind: str, run_id: str | None) -> Sandboxes:
    from strop.core.sandbox.process import ProcessSandboxes

    if kind == "process":
        return ProcessSandboxes(run_id=run_id)
    from strop.core.sandbox.docker import DockerSandboxes

    try:
        return DockerSandboxes(run_id=run_id)
    except Unavailable as error:
        if kind == "docker":
            raise
        return ProcessSandboxes(run_id=run_id, instead_of=str(error))
