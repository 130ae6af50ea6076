"""The engine's client: reaching it, and what its failures are called here."""

from __future__ import annotations

import contextlib
import os
import tarfile
from collections.abc import Callable, Iterator
from typing import Any

from strop.core.errors import Unavailable, missing_extra
from strop.core.sandbox.protocol import SandboxLost

# For calls that answer at once, and for those that move a whole tree of files.
CALL_S, COPY_S = 30, 600


@contextlib.contextmanager
def engine_errors(doing: str) -> Iterator[None]:
    """Turns what the engine's client raises into SandboxLost."""
    import docker.errors
    import requests
    import urllib3

    try:
        yield
    except docker.errors.APIError as error:
        raise SandboxLost(f"{doing}: {error.explanation or error}") from None
    except (
        docker.errors.DockerException, requests.RequestException, urllib3.exceptions.HTTPError, tarfile.TarError,
        OSError,
    ) as error:  # fmt: skip
        raise SandboxLost(f"{doing}: the engine does not answer: {error}") from None


def connect(connect_s: float) -> tuple[Any, Any]:
    """Two clients of one engine, for quick and for long calls. Raises Unavailable where no engine answers."""
    try:
        import docker
    except ModuleNotFoundError:
        raise missing_extra("docker", "sandbox") from None
    import requests

    try:
        quick = docker.from_env(timeout=connect_s, max_pool_size=64).api
        quick.ping()
        quick.timeout = CALL_S
        return quick, docker.from_env(timeout=COPY_S).api
    except (docker.errors.DockerException, requests.RequestException, OSError, ValueError) as error:
        host = os.environ.get("DOCKER_HOST") or "the default socket"
        raise Unavailable(
            f"no Docker engine answers at {host} ({_reason(error)}); start one (systemctl start docker), or name one "
            "in DOCKER_HOST"
        ) from None


def _reason(error: BaseException) -> str:
    """What the system said, below the layers that wrap it."""
    below: BaseException | None = error
    while below is not None:
        if isinstance(below, OSError) and below.strerror:
            return below.strerror
        below = below.__cause__ or below.__context__
    return str(error)


def gone_is_fine(remove: Callable[[], object], doing: str) -> None:
    """Removes something; if it is gone, or another call removes it at this moment, all is well. Raises SandboxLost."""
    import docker.errors

    with engine_errors(doing):
        try:
            remove()
        except docker.errors.NotFound:
            pass
        except docker.errors.APIError as error:
            # Another call removes it at this moment.
            if error.response is None or error.response.status_code != 409 or "progress" not in str(error):
                raise
