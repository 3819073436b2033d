"""HTTP connections to one server, many at a time."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import httpx2

_SSL = ssl.create_default_context()  # costs more than a client; all share it


class Connections:
    """Each request goes over a connection that an earlier one left open, if there is one that is free.

    One client with all the connections would look through all of them whenever a request begins and ends, which costs
    more than the request itself. So each connection has its own client, and those that are free are a stack.
    """

    def __init__(self) -> None:
        self._free: list[httpx2.AsyncClient] = []

    async def request(self, method: str, url: str, **options: Any) -> httpx2.Response:
        """As `httpx2.AsyncClient.request`."""
        client = self._free.pop() if self._free else _client()
        try:
            return await client.request(method, url, **options)
        finally:
            self._free.append(client)

    async def close(self) -> None:
        """Closes what is open; to be called when no request runs."""
        free, self._free = self._free, []
        await asyncio.gather(*(client.aclose() for client in free))


def _client() -> httpx2.AsyncClient:
    one = httpx2.Limits(max_connections=1, max_keepalive_connections=1)
    return httpx2.AsyncClient(limits=one, trust_env=False, verify=_SSL)
