"""Sandboxes that are Docker containers: making, saving, forking and removing them (see `dockersandbox.py`)."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import io
import logging
import os
import re
import secrets
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import requests  # which `docker` depends on

from reterm_jax.sandbox import dockercompose, dockerimage, dockernetwork, dockersnapshot, shell
from reterm_jax.sandbox.base import (
    LOG_DIRS,
    SandboxError,
    SandboxUnavailable,
    Snapshot,
    SnapshotLost,
)
from reterm_jax.sandbox.budget import SnapshotBudget
from reterm_jax.sandbox.diskwatch import DiskWatch
from reterm_jax.sandbox.dockerimage import Image, connect
from reterm_jax.sandbox.dockersandbox import DockerSandbox
from reterm_jax.sandbox.environment import wait_healthy
from reterm_jax.sandbox.reaper import HostDir, claim, docker_labels, reap_docker, remove_docker

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

T = TypeVar("T")

_AWAY = (requests.exceptions.ConnectionError, requests.exceptions.ChunkedEncodingError)

PATIENCE = 60.0  # seconds in which a daemon that was restarted must be back
_PAUSE = 0.5  # between two tries
_STARTS, _BUILDS = 8, 2  # at once; commands are as many as there are sandboxes
_NO_QUOTA = re.compile("storage.?opt", re.IGNORECASE)  # in what the daemon answers where it cannot keep one
_NO_GPU = "could not select device driver"
_QUOTA_MARGIN_MB = 256  # beyond the watched limit
_TRY_SECONDS = 60.0  # for a command that does nothing


class DockerHost:
    """Makes containers. See SandboxHost for the calls."""

    def __init__(
        self,
        run_dir: Path,
        *,
        max_concurrent: int,
        run_id: str,
        snapshot_mb: int | None = None,
        url: str | None = None,
    ) -> None:
        """Raises SandboxUnavailable if the `docker` package is missing or no daemon answers (at `url`)."""
        self.client, self.errors = connect(max_concurrent, url)
        self.directory: HostDir = claim(run_dir)
        try:
            reap_docker(self.client, run_dir)
            self._cpus: int = self.client.info()["NCPU"]
        except (self.errors.DockerException, requests.exceptions.RequestException) as error:
            self.directory.remove()
            raise SandboxUnavailable(f"the Docker daemon fails: {error}") from error
        self._labels = docker_labels(run_dir, run_id, self.directory)
        self._run_dir = run_dir
        self._threads = ThreadPoolExecutor(2 * max_concurrent + 4, thread_name_prefix="docker")
        self._slots = asyncio.Semaphore(max_concurrent)
        self._starts, self._builds = asyncio.Semaphore(_STARTS), asyncio.Semaphore(_BUILDS)
        self.load = 0  # sandboxes alive, starting or waiting
        self._away = False  # as far as is known; whoever notices first says so
        self._live: set[DockerSandbox] = set()
        self._images: dict[str, Image] = {}
        self._building: dict[str, asyncio.Lock] = {}
        self._snapshots: dict[str, Image] = {}
        self._budget = SnapshotBudget(snapshot_mb)
        self._tried: set[str] = set()  # images in which a command has run
        self._unwanted: set[str] = set()  # released snapshots that a container still runs from
        self._watch = DiskWatch(self._sizes, self._kill)
        self._quota = True  # until the daemon says that its storage has none
        self._pid = os.getpid()  # a forked child must not clean up after us
        atexit.register(self.remove_all)

    async def start(self, task: Task) -> DockerSandbox:
        key = task.content_hash
        async with self._building.setdefault(key, asyncio.Lock()):
            if key not in self._images:
                tag = f"reterm-environment:{key[:40]}-{self.directory.id}"
                prepare = functools.partial(dockerimage.prepare, self.client, task, tag, self._labels, self._run_dir)
                async with self._builds:
                    self._images[key] = await self.retry(prepare, f"task {task.id}: environment")
        sandbox = await self._make(self._images[key], task)
        if key not in self._tried:
            try:
                result = await sandbox.exec("true", timeout=_TRY_SECONDS, fresh=True)
                if result.exit_code != 0:
                    said = result.output.strip()
                    raise SandboxError(f"task {task.id}: the environment's image is not usable: {said}")
            except BaseException:
                await sandbox.close()
                raise
            self._tried.add(key)
        await wait_healthy(sandbox, task)
        return sandbox

    async def fork(self, snapshot: Snapshot, task: Task) -> DockerSandbox:
        if snapshot.id not in self._snapshots:
            raise self._budget.missing(snapshot, task.id)
        with self._budget.in_use(snapshot.id):
            image = self._snapshots[snapshot.id]
            try:
                return await self._make(image, task)
            except SandboxError as error:
                cause = error.__cause__
                if isinstance(cause, self.errors.ImageNotFound) and image.name in str(cause):  # not that of a sidecar
                    raise SnapshotLost(f"snapshot {snapshot.id}: {error}") from error
                raise

    async def release(self, snapshot: Snapshot) -> None:
        await self._forget(snapshot.id)

    async def _forget(self, name: str) -> None:
        image = self._snapshots.pop(name, None)
        if image is not None:
            self._budget.remove(name)
            self._unwanted.add(image.name)
            await self.retry(self._remove_unwanted, f"removal of snapshot {name}")

    async def answers(self) -> bool:
        """Whether the daemon is there."""
        try:
            return bool(await self.call(self.client.ping))
        except SandboxError:
            return False

    async def close(self) -> None:
        # What does not close is removed by its label below.
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)), return_exceptions=True)
        await asyncio.to_thread(self.remove_all)
        atexit.unregister(self.remove_all)
        self._threads.shutdown(wait=False)
        self.client.close()

    async def call(self, function: Callable[[], T], what: str = "Docker") -> T:
        """Runs a blocking function in a thread; the daemon's errors become SandboxErrors that begin with `what`."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._threads, function)
        except (self.errors.DockerException, OSError) as error:
            if isinstance(error, FileNotFoundError):
                raise
            raise SandboxError(f"{what}: {error}") from error

    async def retry(self, function: Callable[[], T], what: str) -> T:
        """As `call`, for what may be done twice: waits PATIENCE seconds for a daemon that is away, and tries what it
        failed at once more."""
        failures, begun = 0, time.monotonic()
        while True:
            try:
                done = await self.call(function, what)
                if self._away:
                    self._away = False
                    logging.warning("the Docker daemon is back")
                return done
            except SandboxError as error:
                cause = error.__cause__
                failures += 1
                away = isinstance(cause, _AWAY) and time.monotonic() - begun < PATIENCE
                failed = isinstance(cause, self.errors.APIError) and cause.is_server_error() and failures == 1
                if not away and not failed:
                    raise
                if failed:
                    logging.warning("%s; trying again", error)
                elif not self._away:  # said once, not by all that wait
                    self._away = True
                    logging.warning("%s; the Docker daemon is waited for, %.0f s", error, PATIENCE)
            await asyncio.sleep(_PAUSE)

    async def save(self, container: Any, image: Image) -> Snapshot:
        """Commits a container; called by the sandbox, which holds its lock."""
        name = f"snap-{secrets.token_hex(6)}"
        saving = functools.partial(dockersnapshot.save, self.client, container, image, name)
        saved, alive = await self.call(saving, f"snapshot of container {container.name}")
        self._snapshots[name] = saved
        size = saved.size - (image.size if saved.layers > image.layers else 0)
        for old in self._budget.add(name, size):
            await self._forget(old)
        return Snapshot(name, "docker", self.directory.id, alive)

    async def closed(self, sandbox: DockerSandbox, container: Any, image: Image) -> None:
        """Removes an ended sandbox's containers and frees its slot."""

        def remove() -> None:
            self._remove(container, image)
            self._remove_unwanted()

        try:
            await self.retry(remove, f"removal of container {container.name}")
        finally:
            if sandbox in self._live:
                self._live.discard(sandbox)
                self.load -= 1
                self._watch.remove(sandbox.id)
                self._slots.release()

    async def _make(self, image: Image, task: Task) -> DockerSandbox:
        self.load += 1
        try:
            await self._slots.acquire()
        except BaseException:
            self.load -= 1
            raise
        starting = asyncio.ensure_future(self._started(image, f"task {task.id}: start of a container"))
        try:
            container = await asyncio.shield(starting)
        except BaseException:
            self._slots.release()
            self.load -= 1
            # Cancelled while the daemon was at work: the container may come into being after this.
            starting.add_done_callback(functools.partial(self._discard, image))
            raise
        sandbox = DockerSandbox(self, container, image)
        self._live.add(sandbox)
        self._watch.add(sandbox.id, image.limits.disk_mb)
        return sandbox

    async def _sizes(self) -> dict[str, int]:
        filters = {"label": f"reterm.owner={self.directory.id}"}
        found = await self.call(lambda: self.client.api.containers(filters=filters, size=True), "sizes of containers")
        return {entry["Names"][0].lstrip("/"): entry.get("SizeRw", 0) for entry in found if entry["Names"]}

    async def _kill(self, name: str, reason: str) -> None:
        await asyncio.gather(*(sandbox.kill_all(reason) for sandbox in self._live if sandbox.id == name))

    async def _started(self, image: Image, what: str) -> Any:
        try:
            async with self._starts:
                return await self.retry(lambda: self._start(image, f"reterm-{secrets.token_hex(6)}"), what)
        except SandboxError as error:
            if image.gpus and _NO_GPU in str(error):
                raise SandboxError(
                    f"{what}: environment.gpus = {image.gpus}, and the Docker daemon has none for containers: install "
                    "the NVIDIA container toolkit there, or leave the task out"
                ) from error
            raise

    def _discard(self, image: Image, starting: asyncio.Future[Any]) -> None:
        if not starting.cancelled() and starting.exception() is None:
            self._threads.submit(self._remove, starting.result(), image)

    def _remove(self, container: Any, image: Image) -> None:
        for name in [*dockercompose.container_names(container.name, image.services), container.name]:
            with contextlib.suppress(self.errors.NotFound):
                self.client.api.remove_container(name, force=True, v=True)

    def _start(self, image: Image, name: str) -> Any:
        limits = image.limits
        cpus = min(limits.cpus, self._cpus)  # more than there are is an error to Docker
        container = self._create(
            limits.disk_mb,
            image=image.name,
            entrypoint=dockersnapshot.idle(image),
            name=name,
            hostname="sandbox",
            labels=self._labels,
            environment=dict(image.env),
            working_dir=image.workdir,
            network_mode=image.networks.mode,
            cap_drop=["ALL"],
            cap_add=list(image.capabilities),
            security_opt=["no-new-privileges:true"],
            pids_limit=limits.processes,
            mem_limit=f"{limits.memory_mb}m",
            memswap_limit=f"{limits.memory_mb}m",
            nano_cpus=int(cpus * 1e9),
            device_requests=[{"Count": image.gpus, "Capabilities": [["gpu"]]}] if image.gpus else None,
            extra_hosts={**image.networks.extra_hosts, **{service.name: "127.0.0.1" for service in image.services}},
            ulimits=[
                {"Name": "core", "Soft": 0, "Hard": 0},
                {"Name": "fsize", "Soft": limits.file_mb << 20, "Hard": limits.file_mb << 20},
            ],
        )
        try:
            if image.skeleton:  # a snapshot has it already, perhaps changed by the agent
                container.put_archive("/", _skeleton())
            container.start()
            dockersnapshot.restore(self.client, container, image)
            if image.networks.fenced:
                dockernetwork.apply(self.client, container, image.networks, "agent")
            dropped = image.networks.dropped
            dockercompose.start(self.client, container, image.services, limits, self._labels, cpus, dropped)
        except BaseException:
            self._remove(container, image)
            raise
        return container

    def _create(self, disk_mb: int, **options: Any) -> Any:
        """A container, with a quota where the storage has them (overlay2 on xfs mounted with pquota, btrfs, zfs).

        The disk watch keeps the limit of `disk_mb` megabytes; the quota bounds what is written between two looks.
        """
        if self._quota:
            try:
                quota = {"size": f"{disk_mb + _QUOTA_MARGIN_MB}m"}
                return self.client.containers.create(**options, storage_opt=quota)
            except self.errors.APIError as error:
                if not _NO_QUOTA.search(str(error)):
                    raise
                self._quota = False
        return self.client.containers.create(**options)

    def _remove_unwanted(self) -> None:
        for name in list(self._unwanted):
            try:
                self.client.images.remove(name, force=True)
            except self.errors.NotFound:  # two threads may remove the same one
                pass
            except self.errors.APIError as error:
                if error.status_code == 409:  # a fork still runs from it
                    continue
                raise
            self._unwanted.discard(name)

    def remove_all(self) -> None:
        """Removes all that this host made; what a daemon that is away keeps goes at the next start."""
        if os.getpid() == self._pid and self.directory.path.exists():
            try:
                remove_docker(self.client, {"reterm.owner": self.directory.id})
            except (self.errors.DockerException, OSError) as error:
                logging.warning("containers are left (%s): the next run in %s removes them", error, self._run_dir)
            self.directory.remove()


def _skeleton() -> io.BytesIO:
    """A tar stream of what an image need not have: the directories for logs, the shell's script and its state."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as tar:
        for path, mode in [*((path, 0o755) for path in LOG_DIRS), (shell.STATE_DIR, 0o1777)]:
            info = tarfile.TarInfo(path.lstrip("/"))
            info.type, info.mode, info.mtime = tarfile.DIRTYPE, mode, int(time.time())
            tar.addfile(info)
        data = shell.SCRIPT_TEXT.encode()
        info = tarfile.TarInfo(shell.SCRIPT.lstrip("/"))
        info.size, info.mode, info.mtime = len(data), 0o644, int(time.time())
        tar.addfile(info, io.BytesIO(data))
    stream.seek(0)
    return stream
