"""Connections to a server that counts those that are open."""

import asyncio

import pytest

from reterm_jax.rollout.samplers import connections
from reterm_jax.rollout.samplers.connections import Connections


class Server:
    """Answers after `delay` seconds; `open` are the connections that the client has not closed."""

    def __init__(self, delay=0.05):
        self.delay, self.open, self.made = delay, 0, 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _serve(self, reader, writer):
        self.open += 1
        self.made += 1
        try:
            while True:
                await reader.readuntil(b"\r\n\r\n")
                await asyncio.sleep(self.delay)
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nok")
        except asyncio.IncompleteReadError:
            self.open -= 1
        finally:
            writer.close()

    async def left(self, count):
        """Waits until so many are open."""
        async with asyncio.timeout(5):
            while self.open != count:
                await asyncio.sleep(0.01)


def test_connections_are_used_again_and_closed_when_they_are_idle(monkeypatch):
    monkeypatch.setattr(connections, "_IDLE_SECONDS", 0.5, raising=False)

    async def go():
        async with Server() as server:
            made = Connections()
            for _ in range(2):
                await asyncio.gather(*(made.request("GET", server.url) for _ in range(8)))
            assert server.made == server.open == 8
            await asyncio.sleep(0.6)
            await made.request("GET", server.url)
            await server.left(1)
            await made.close()
            await server.left(0)

    asyncio.run(go())


def test_nothing_is_left_open_after_close():
    async def go():
        async with Server(delay=0.2) as server:
            made = Connections()
            running = asyncio.ensure_future(made.request("GET", server.url))
            await asyncio.sleep(0.1)
            await made.close()
            assert (await running).content == b"ok"
            await server.left(0)
            with pytest.raises(RuntimeError, match="closed before"):
                await made.request("GET", server.url)
            assert server.made == 1

    asyncio.run(go())
