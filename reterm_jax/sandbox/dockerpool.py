"""Several Docker daemons as one host: each takes its share, and one that is lost is taken out."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import requests  # which `docker` depends on

from reterm_jax.sandbox.base import SandboxError, Snapshot, SnapshotLost
from reterm_jax.sandbox.dockerhost import DockerHost
from reterm_jax.sandbox.dockersandbox import DockerSandbox

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

# What a call of a daemon that is gone, or hangs, ends with.
_NO_ANSWER = (
    ConnectionError,
    requests.exceptions.ConnectionError,
    requests.exceptions.ChunkedEncodingError,
    requests.exceptions.Timeout,
)


class DockerPool:
    """See SandboxHost for the calls. A snapshot lives on the daemon that made it, and so do its forks."""

    def __init__(
        self, run_dir: Path, urls: Sequence[str], *, max_concurrent: int, run_id: str, snapshot_mb: int | None = None
    ) -> None:
        """Raises SandboxUnavailable if one of the daemons does not answer."""
        share = math.ceil(max_concurrent / len(urls))
        megabytes = None if snapshot_mb is None else snapshot_mb // len(urls)
        self._hosts: list[DockerHost] = []
        try:
            for url in urls:
                self._hosts.append(
                    DockerHost(run_dir, max_concurrent=share, run_id=run_id, snapshot_mb=megabytes, url=url)
                )
        except BaseException:
            for host in self._hosts:
                host.remove_all()
            raise
        self._lost: set[int] = set()

    async def start(self, task: Task) -> DockerSandbox:
        while True:
            index = min(set(range(len(self._hosts))) - self._lost, key=lambda i: self._hosts[i].load, default=None)
            if index is None:
                raise SandboxError(f"task {task.id}: none of the {len(self._hosts)} Docker daemons answers any more")
            try:
                return await self._hosts[index].start(task)
            except SandboxError as error:
                if not await self._is_lost(index, error):
                    raise

    async def fork(self, snapshot: Snapshot, task: Task) -> DockerSandbox:
        index = self._holder(snapshot)
        if index is None:
            raise SnapshotLost(f"task {task.id}: snapshot {snapshot.id} of {snapshot.owner} is not held by this host")
        lost = SnapshotLost(f"task {task.id}: snapshot {snapshot.id} is on a Docker daemon that is lost")
        if index in self._lost:
            raise lost
        try:
            return await self._hosts[index].fork(snapshot, task)
        except SandboxError as error:
            if await self._is_lost(index, error):
                raise lost from error
            raise

    async def release(self, snapshot: Snapshot) -> None:
        index = self._holder(snapshot)
        if index is not None and index not in self._lost:
            await self._hosts[index].release(snapshot)

    async def close(self) -> None:
        await asyncio.gather(*(host.close() for host in self._hosts), return_exceptions=True)

    async def _is_lost(self, index: int, fault: SandboxError) -> bool:
        """Whether a daemon that failed is gone; then it is taken out.

        Only a call that it did not answer asks that: any other fault may fall into the moment in which it restarts.
        """
        if not isinstance(fault.__cause__, _NO_ANSWER) or await self._hosts[index].answers():
            return False
        if index not in self._lost:
            logging.warning("a Docker daemon is lost (%s); going on with the others", fault)
        self._lost.add(index)
        return True

    def _holder(self, snapshot: Snapshot) -> int | None:
        return next((i for i, host in enumerate(self._hosts) if host.directory.id == snapshot.owner), None)
