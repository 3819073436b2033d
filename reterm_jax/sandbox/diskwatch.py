"""Keeps sandboxes within their disk limits by looking at them now and then: few file systems have quotas for them.

A sandbox over its limit has everything that runs in it killed, once for each further GROWTH: so it can still be cleared
up, and graded, where its files stay. Between two looks a disk can fill by what is written in a second or so, unless
Docker's storage has quotas (see `dockerhost.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Mapping

from reterm_jax.sandbox.base import SandboxError

GROWTH = 32 << 20
_PAUSE = 1.0  # seconds between two looks
_SHARE = 10.0  # and at least so many times what a look took


class DiskWatch:
    """Looks while sandboxes are alive: `add` starts it, it ends by itself after the last `remove`."""

    def __init__(
        self,
        sizes: Callable[[], Awaitable[Mapping[str, int]]],
        kill: Callable[[str, str], Awaitable[None]],
    ) -> None:
        """`sizes` gives bytes by sandbox id; `kill(id, reason)` ends all that runs in a sandbox."""
        self._sizes, self._kill = sizes, kill
        self._limits: dict[str, int] = {}
        self._killed_at: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    def add(self, sandbox: str, limit_mb: int) -> None:
        self._limits[sandbox] = limit_mb
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._run())

    def remove(self, sandbox: str) -> None:
        self._limits.pop(sandbox, None)
        self._killed_at.pop(sandbox, None)
        if not self._limits and self._task is not None:
            self._task.cancel()
            self._task = None

    async def _run(self) -> None:
        pause = _PAUSE
        while self._limits:
            await asyncio.sleep(pause)
            begun = time.monotonic()
            with contextlib.suppress(SandboxError):  # a sandbox, or a daemon, that is just ending
                for sandbox, size in (await self._sizes()).items():
                    await self._check(sandbox, size)
            pause = max(_PAUSE, _SHARE * (time.monotonic() - begun))

    async def _check(self, sandbox: str, size: int) -> None:
        limit = self._limits.get(sandbox)
        if limit is None or size <= limit << 20:
            self._killed_at.pop(sandbox, None)
        elif size > self._killed_at.get(sandbox, 0) + GROWTH:
            self._killed_at[sandbox] = size
            logging.warning("sandbox %s holds %d MB, its limit is %d MB", sandbox, size >> 20, limit)
            await self._kill(sandbox, f"The disk limit of {limit} MB was passed: everything that ran was killed")
