"""HTTP connections to one server, many at a time."""

from __future__ import annotations

import collections
import ssl
import time
from typing import Any

import httpx2

_SSL = ssl.create_default_context()  # costs more than a client; all share it
_IDLE_SECONDS = 5.0  # after which a connection is not used again


class Connections:
    """Each request goes over a connection that an earlier one left open, if there is one that is free.

    One client with all the connections would look through all of them whenever a request begins and ends, which costs
    more than the request itself. So each connection has its own client, and those that are free are a stack. Those at
    its bottom are closed when they have not been used for a while: a client does not notice that its server has gone.
    """

    def __init__(self) -> None:
        self._free: collections.deque[tuple[httpx2.AsyncClient, float]] = collections.deque()  # with time of last use
        self._closed = False

    async def request(self, method: str, url: str, **options: Any) -> httpx2.Response:
        """As `httpx2.AsyncClient.request`. Raises RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError(f"{method} {url}: its connections were closed before")
        client = self._free.pop()[0] if self._free else _client()
        try:
            return await client.request(method, url, **options)
        finally:
            now = time.monotonic()
            self._free.append((client, now))
            while self._free and (self._closed or self._free[0][1] < now - _IDLE_SECONDS):
                await self._free.popleft()[0].aclose()

    async def close(self) -> None:
        """Closes what is open; the connection of a request that still runs is closed when it ends."""
        self._closed = True
        while self._free:
            await self._free.popleft()[0].aclose()


def _client() -> httpx2.AsyncClient:
    one = httpx2.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=_IDLE_SECONDS)
    return httpx2.AsyncClient(limits=one, trust_env=False, verify=_SSL)
