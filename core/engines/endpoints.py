"""Where servers are, which of them can be used now, and which is the least busy."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from strop.core.errors import UsageError

if TYPE_CHECKING:
    import httpx

log = logging.getLogger("strop.engines")

# Answers of 500 in a row, without one success, after which an endpoint is set aside as if it were down: one that fails
# fast looks idle, and would draw all requests.
FAILURES_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """How long a server is waited for, in seconds, and how often it is asked.

    `connect_s`: to take the connection; `check_s`: to list its models; `read_s`: its silence while it works on a
    request or has it in its queue; `total_s`: one whole try. `attempts`: tries of one request that the server answers
    with a failure. Pauses between them, and rests of an endpoint that fails, double from `first_pause_s` up to
    `longest_pause_s`. `patience_s`: how long no server at all can be used before requests fail.
    """

    connect_s: float = 10.0
    check_s: float = 30.0
    read_s: float = 600.0
    total_s: float = 1800.0
    attempts: int = 6
    first_pause_s: float = 0.5
    longest_pause_s: float = 30.0
    patience_s: float = 120.0

    def pause(self, count: int) -> float:
        """The pause after the `count`-th failure, counted from one."""
        return min(self.longest_pause_s, self.first_pause_s * 2.0 ** min(count - 1, 32))


@dataclass(slots=True, eq=False)
class Endpoint:
    """One server. `ready`: it was seen to serve our model (and adapter) as `model`, and has not failed since.

    `fingerprint` stands for what it then computed of a fixed text.
    """

    url: str
    client: httpx.AsyncClient
    model: str = ""
    fingerprint: str = ""
    in_flight: int = 0
    ready: bool = False
    excluded: str = ""
    failures: int = 0
    failed_at: float = -1.0
    rests_until: float = 0.0
    last_failure: str = ""
    checking: asyncio.Task[None] | None = None

    def succeeded(self) -> None:
        """Notes an answer."""
        self.failures = 0

    def failed(self, message: str, started: float, limits: ServerLimits, *, down: bool) -> None:
        """Notes a failure of something begun at `started`, and sets the endpoint aside if it is down.

        Requests that were under way together fail together; that is one failure.
        """
        self.last_failure = message
        if started < self.failed_at:
            return
        now = time.monotonic()
        self.failures += 1
        self.failed_at = now
        if down or self.failures >= FAILURES_IN_A_ROW:
            if self.ready:
                log.warning("%s is set aside: %s", shown(self.url), message)
            self.ready = False
            self.rests_until = now + limits.pause(self.failures)


class Pool:
    """The endpoints, and since when none of them could be used."""

    def __init__(self, endpoints: list[Endpoint]) -> None:
        self.endpoints = endpoints
        self._down_since: float | None = None

    def choose(self, avoid: Endpoint | None = None) -> Endpoint | None:
        """The least busy endpoint that is ready, `avoid` only where it is the only one; None if there is none."""
        ready = [endpoint for endpoint in self.endpoints if endpoint.ready]
        if ready:
            self._down_since = None
        elif self._down_since is None:
            self._down_since = time.monotonic()
        return min(ready, key=lambda endpoint: (endpoint is avoid, endpoint.in_flight), default=None)

    def rested(self) -> list[Endpoint]:
        """The endpoints that may have come back: their rest is over, and nobody is looking yet."""
        now = time.monotonic()
        return [
            endpoint
            for endpoint in self.endpoints
            if not (endpoint.ready or endpoint.excluded or endpoint.checking) and endpoint.rests_until <= now
        ]

    def checks(self) -> list[asyncio.Task[None]]:
        """The looks that are being taken."""
        return [endpoint.checking for endpoint in self.endpoints if endpoint.checking is not None]

    def seconds_to_next(self) -> float:
        """How long until the first endpoint's rest is over."""
        rests = [endpoint.rests_until for endpoint in self.endpoints if not (endpoint.excluded or endpoint.ready)]
        return max(0.0, min(rests, default=0.0) - time.monotonic())

    def seconds_down(self) -> float:
        """How long no endpoint has been ready, as far as `choose` has seen; endless if all are excluded."""
        if all(endpoint.excluded for endpoint in self.endpoints):
            return float("inf")
        return 0.0 if self._down_since is None else time.monotonic() - self._down_since

    def reasons(self) -> str:
        """What was last wrong with each."""
        return "; ".join(f"{shown(e.url)}: {e.excluded or e.last_failure or 'not tried'}" for e in self.endpoints)


def base_url(text: str) -> str:
    """An endpoint as users write it (`HOST:PORT`, with or without scheme, /v1 and last slash) as a base URL.

    Raises UsageError for what is none.
    """
    url = text if "://" in text else f"http://{text}"
    url = url.rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits:
        raise UsageError(f"--endpoint {shown(text)}: expected http://HOST:PORT")
    return url


def shown(url: str) -> str:
    """The URL without user name and password, for messages."""
    scheme, separator, rest = url.rpartition("://")
    host, slash, path = rest.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}"


def is_loopback(url: str) -> bool:
    """Whether the server is on this machine: no proxy is asked for it then."""
    host = urlsplit(url).hostname or ""
    return host in ("localhost", "::1") or host.startswith("127.")
