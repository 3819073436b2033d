"""A polite kill: a training loop finishes its update, saves, and ends; everything else ends at once."""

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from types import FrameType
from typing import Any


class GracefulStop:
    """What SIGTERM does. The run unwinds as from an interrupt, so that sandboxes are removed.

    Inside `deferred` the first signal only sets `requested`, which the loop there looks at when its state is whole; a
    second one does not wait.
    """

    def __init__(self) -> None:
        self.requested = False
        self._deferred = False

    def handle(self, signum: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if not self._deferred or self.requested:
            raise KeyboardInterrupt
        self.requested = True

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """Around a loop that looks at `requested`. Raises KeyboardInterrupt where it ended of itself all the same."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False
        if self.requested:
            raise KeyboardInterrupt

    async def unless_requested(self, work: Coroutine[Any, Any, Any], *, every: float = 0.2) -> Any:
        """The result of `work`, or None where a stop was requested first: then it is cancelled, and has unwound.

        Args:
          every: seconds between looks.
        """
        task = asyncio.ensure_future(work)
        try:
            while not task.done() and not self.requested:
                await asyncio.wait({task}, timeout=every)
            return task.result() if task.done() else None
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
