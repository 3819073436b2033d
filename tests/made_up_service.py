"""A rollout service over HTTP in a thread, whose rollouts are made up."""

import asyncio
import contextlib
import dataclasses
import threading
from types import SimpleNamespace

from made_up import MadeUpRoller, task

from reterm_jax.rollout.http_server import HttpServer
from reterm_jax.rollout.pool import PoolConfig
from reterm_jax.rollout.protocol import Opening
from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.rollout.scheduler import Schedule
from reterm_jax.rollout.service import RolloutService, ServiceParts
from reterm_jax.rollout.store import GroupStore
from reterm_jax.serving.published import read_manifest

IDENTITY = {"seed": 0, "rl.forks": 2, "agent.max_turns": 4}
SCHEDULE = Schedule(seed=0, steps=4, tasks=2, attempts=2, states=2, forks=2, max_staleness=1)


def named(name):
    made = task(name)
    made.path, made.fingerprint = f"tasks/{name}", lambda: f"hash of {name}"
    return made


TASKS = [named(name) for name in "abcdefv"]


class Sampler(contextlib.AbstractAsyncContextManager):
    """Serves what it is told to, unless a test says otherwise."""

    def __init__(self, roller):
        self.roller, self.problems, self.fault, self.serving = roller, {}, None, False

    async def __aexit__(self, *_):
        pass

    async def update(self, directory):
        if self.fault:
            raise SamplerError(self.fault)
        self.roller.version = read_manifest(directory).version


class Running:
    """A service in a thread of its own; `kill` takes away everything but its store."""

    def __init__(self, path, token="", roller=None, schedule=SCHEDULE, port=0, patience=0.0):
        self.roller, self.path, self.token = roller or MadeUpRoller(), path, token
        self.schedule, self.port, self.patience = schedule, port, patience
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()))
        self._thread.start()
        assert self._ready.wait(30)

    async def _run(self):
        self.loop, self._ended = asyncio.get_running_loop(), asyncio.Event()
        self.sampler = Sampler(self.roller)
        with GroupStore(self.path, IDENTITY) as store:
            parts = ServiceParts(
                IDENTITY, self.schedule, PoolConfig(), TASKS, store,
                new_chat=lambda directory: SimpleNamespace(stop_id=9),
                new_sampler=lambda stop_id: self.sampler,
                new_roller=lambda sampler, chat: self.roller,
                patience=self.patience,
            )  # fmt: skip
            self.service = RolloutService(parts)
            async with self.service:
                self.server = server = HttpServer(self.service, ("127.0.0.1", self.port), self.token)
                self.url = server.url
                self._ready.set()
                await self._ended.wait()
                await server.close()

    def end(self):
        self.loop.call_soon_threadsafe(self._ended.set)
        self._thread.join(30)


def opening(**changes):
    tasks = {t.id: t.fingerprint() for t in TASKS[:6]}
    made = Opening(dict(IDENTITY), tasks, {"v": "hash of v"}, "", 0)
    return dataclasses.replace(made, **changes)
