"""A bound on what is alive at once, that lets the most urgent in first."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from contextlib import AbstractAsyncContextManager


class PriorityGate:
    """Like a semaphore of `size`, but among those that wait the lowest priority goes first, then who came first."""

    def __init__(self, size: int) -> None:
        self._free = size
        self._waiting: list[tuple[int, int, asyncio.Future[None]]] = []
        self._order = itertools.count()
        self.inside = 0

    def at(self, priority: int) -> AbstractAsyncContextManager[None]:
        """What those of one priority enter; any number of them at once."""
        return _Lane(self, priority)

    async def acquire(self, priority: int) -> None:
        if self._free and not self._waiting:
            self._free -= 1
        else:
            turn = asyncio.get_running_loop().create_future()
            heapq.heappush(self._waiting, (priority, next(self._order), turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._pass_on()  # was let in at the moment of its cancellation
                raise
        self.inside += 1

    def release(self) -> None:
        self.inside -= 1
        self._pass_on()

    def _pass_on(self) -> None:
        while self._waiting:
            _, _, turn = heapq.heappop(self._waiting)
            if not turn.done():
                turn.set_result(None)
                return
        self._free += 1


class _Lane(AbstractAsyncContextManager[None]):
    def __init__(self, gate: PriorityGate, priority: int) -> None:
        self._gate, self._priority = gate, priority

    async def __aenter__(self) -> None:
        await self._gate.acquire(self._priority)

    async def __aexit__(self, *_: object) -> None:
        self._gate.release()
