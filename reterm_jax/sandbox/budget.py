"""The disk budget of snapshots: the oldest go where newer ones need the room."""

from __future__ import annotations

import contextlib
from collections import Counter, OrderedDict
from collections.abc import Iterator

from reterm_jax.sandbox.base import Snapshot, SnapshotLost


class SnapshotBudget:
    """Counts the bytes of the snapshots that a host holds, and says which to give up."""

    def __init__(self, megabytes: int | None) -> None:
        """None: no limit."""
        self._limit = None if megabytes is None else megabytes << 20
        self._bytes: OrderedDict[str, int] = OrderedDict()
        self._in_use: Counter[str] = Counter()
        self._evicted: set[str] = set()

    def add(self, snapshot: str, size: int) -> list[str]:
        """Counts a new snapshot of `size` bytes; returns those to be given up for it: the oldest, but never the new one
        nor one that is being forked."""
        self._bytes[snapshot] = size
        given_up: list[str] = []
        while self._limit is not None and sum(self._bytes.values()) > self._limit:
            oldest = next((name for name in self._bytes if name != snapshot and not self._in_use[name]), None)
            if oldest is None:
                break
            del self._bytes[oldest]
            given_up.append(oldest)
        self._evicted.update(given_up)
        return given_up

    def remove(self, snapshot: str) -> None:
        self._bytes.pop(snapshot, None)

    @contextlib.contextmanager
    def in_use(self, snapshot: str) -> Iterator[None]:
        """Keeps a snapshot from being given up while a fork is made from it."""
        self._in_use[snapshot] += 1
        try:
            yield
        finally:
            self._in_use[snapshot] -= 1

    def missing(self, snapshot: Snapshot, task_id: str) -> SnapshotLost:
        """The error for a snapshot that is not held."""
        name = f"task {task_id}: snapshot {snapshot.id}"
        if snapshot.id in self._evicted:
            limit = 0 if self._limit is None else self._limit >> 20
            return SnapshotLost(
                f"{name} was given up for newer ones, as all may take {limit} MB: raise config.sandbox.snapshot_mb"
            )
        return SnapshotLost(f"{name} of {snapshot.owner} is not held by this host")
