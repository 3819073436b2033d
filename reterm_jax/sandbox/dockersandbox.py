"""One sandbox that is a Docker container.

A container runs as its image says (usually root), but without a single capability, without new privileges, without a
network unless the task asks for one, and with limits on memory, processor time and the number of processes. A snapshot
is a commit of the container, a fork a new container from it: mounts and processes are not part of it. Processes outlive
the command that started them, except after a time limit: then everything that command started is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reterm_jax.sandbox import archive, dockerexec, dockernetwork, shell
from reterm_jax.sandbox.base import ExecResult, SandboxError, Snapshot
from reterm_jax.sandbox.dockerimage import Image
from reterm_jax.sandbox.output import BoundedOutput
from reterm_jax.sandbox.process import disk_errors, scratch_file

if TYPE_CHECKING:
    from reterm_jax.sandbox.dockerhost import DockerHost
    from reterm_jax.tasks.config import Phase


class DockerSandbox:
    """One container; made by DockerHost."""

    lingers = True

    def __init__(self, host: DockerHost, container: Any, image: Image) -> None:
        self.workdir = image.workdir
        self.id: str = container.name
        self._host = host
        self._container = container
        self._image = image
        self._lock = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._runners = dockerexec.Runners(host.client.api, self.id)
        self._killed = ""  # why all that ran was killed from outside, for the agent to read

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        private: bool = False,
    ) -> ExecResult:
        extra = shell.check_env(env or {})
        line = shell.shell_line(dockerexec.COMMAND_FD, workdir=self.workdir, fresh=fresh, env_names=extra)
        who = f"{user or 'root'}:{archive.PRIVATE_GID}" if private else user or ""
        call = dockerexec.Call(command, line, timeout, self._image.limits.processes, who, extra)
        started = time.monotonic()

        def run() -> tuple[int, BoundedOutput]:
            # No shell that the agent could reach serves what is not the agent's.
            return dockerexec.run(self._host.client.api, self.id, call) if fresh or private else self._runners.run(call)

        async with self._use():
            try:
                exit_code, output = await self._host.call(run)
            except dockerexec.Broken as error:
                if self._closing is not None:
                    raise SandboxError(f"sandbox {self.id} was closed while a command ran") from None
                # By the agent itself: `start` has seen commands run
                return ExecResult(f"{error}\n", 126, time.monotonic() - started, False)
        duration = time.monotonic() - started
        if exit_code == 137 and self._killed:
            output, self._killed = BoundedOutput.of(self._killed), ""
        timed_out = shell.hit_time_limit(exit_code, duration, timeout)
        return ExecResult(output.text(), exit_code, duration, timed_out, output.elided)

    async def upload(self, source: Path, target: str, *, private: bool = False) -> None:
        directory, name = archive.split_target(source, target)
        if private and name:
            raise ValueError(f"upload of {source} to {target}: only a directory can be private")

        def put() -> None:
            with scratch_file(Path(tempfile.gettempdir())) as file:
                with disk_errors(Path(tempfile.gettempdir())):
                    if private:
                        archive.pack_private(source, directory, file)
                    else:
                        archive.pack([(source, name)], file)
                if private:
                    file.seek(0)
                    self._container.put_archive("/", file)
                    return
                for attempt in (1, 2):
                    file.seek(0)
                    try:
                        self._container.put_archive(directory, file)
                        return
                    except self._host.errors.NotFound:
                        if attempt == 2:
                            raise
                        self._container.exec_run(["mkdir", "-p", "--", directory])

        async with self._use():
            await self._host.call(put, f"upload of {source} to {target} in container {self.id}")

    async def download(self, source: str, target: Path, *, private: bool = False) -> None:
        path = source.rstrip("/")
        if not path.startswith("/"):
            raise ValueError(f"download source {source!r} must be an absolute path inside the sandbox, not / itself")

        def get() -> None:
            try:
                stream, _ = self._container.get_archive(path)
            except self._host.errors.NotFound:
                raise FileNotFoundError(f"{source} does not exist in the sandbox") from None
            with scratch_file(Path(tempfile.gettempdir())) as file:
                size = 0
                for chunk in stream:
                    size += len(chunk)
                    if size > 2 * archive.MAX_DOWNLOAD:
                        raise SandboxError(f"download of {source} is over {archive.MAX_DOWNLOAD} bytes")
                    file.write(chunk)
                file.seek(0)
                with disk_errors(target):
                    archive.unpack(file, path.rsplit("/", 1)[1], target, private=private)

        async with self._use():
            await self._host.call(get, f"download of {source} from container {self.id}")

    async def set_network(self, phase: Phase) -> None:
        networks = self._image.networks
        if not networks.fenced:
            return

        def apply() -> None:
            dockernetwork.apply(self._host.client, self._container, networks, phase)

        async with self._use():
            await self._host.call(apply, f"network of container {self.id}")

    async def snapshot(self) -> Snapshot:
        async with self._use():
            return await self._host.save(self._container, self._image)

    async def kill_all(self, reason: str) -> None:
        """Ends everything that runs in the container, except its process 1. May be called while a command runs."""
        self._killed = reason
        await self._host.call(
            lambda: self._container.exec_run(["bash", "-c", "kill -9 -1"], user="root", detach=True),
            f"killing what runs in container {self.id}",
        )

    async def close(self) -> None:
        # Shielded, so that a cancelled caller does not leave the container behind.
        if self._closing is None:
            self._runners.close()
            self._closing = asyncio.ensure_future(self._host.closed(self, self._container, self._image))
        await asyncio.shield(self._closing)

    @contextlib.asynccontextmanager
    async def _use(self) -> AsyncIterator[None]:
        async with self._lock:
            if self._closing is not None:
                raise SandboxError(f"sandbox {self.id} is closed")
            yield
