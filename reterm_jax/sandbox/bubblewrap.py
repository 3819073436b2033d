"""Sandboxes made of a private directory and bubblewrap: the embedded default, for one machine without Docker.

A sandbox is a directory that is `/` inside (see `jail.py`); starting, saving and forking copy it. Processes end with
the command that started them, so a snapshot never misses any and `live_processes` is always empty. There is one user:
`user` may be None, "root" or "agent", which are the same.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import secrets
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reterm_jax.sandbox import archive, environment, shell
from reterm_jax.sandbox.base import ExecResult, SandboxError, Snapshot
from reterm_jax.sandbox.budget import SnapshotBudget
from reterm_jax.sandbox.diskwatch import DiskWatch
from reterm_jax.sandbox.environment import Environment
from reterm_jax.sandbox.jail import Jail, open_jail
from reterm_jax.sandbox.output import BoundedOutput
from reterm_jax.sandbox.process import Finished, disk_errors, disk_full, memory_file, run_program, scratch_file
from reterm_jax.sandbox.reaper import HostDir, claim

if TYPE_CHECKING:
    from reterm_jax.tasks.config import Phase
    from reterm_jax.tasks.task import Task

_USERS = (None, "", "root", "agent")
_FILE_DEADLINE = 300.0  # seconds for copying a tree or an archive
_LATE = 10.0  # seconds after which a command that its own `timeout` did not end is killed from outside


class BubblewrapSandbox:
    """A directory in which commands run through bubblewrap; made by BubblewrapHost."""

    lingers = False

    def __init__(self, host: BubblewrapHost, place: Path, env: Environment) -> None:
        self.workdir = env.workdir
        self.id = place.name
        self._host = host
        self._place = place
        self._environment = env
        self._lock = asyncio.Lock()
        self._closing: asyncio.Future[None] | None = None
        self._running: asyncio.Future[Finished] | None = None
        self._killed = ""  # why the command that ran was killed from outside

    @property
    def busy(self) -> bool:
        """Whether a command runs."""
        return self._running is not None and not self._running.done()

    @property
    def root(self) -> Path:
        """The host directory that is `/` inside."""
        return self._place / "root"

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        private: bool = False,  # means nothing here: no process outlives its command
    ) -> ExecResult:
        if user not in _USERS:
            raise SandboxError(f"user {user!r} needs Docker: a bubblewrap sandbox has one user, 'agent'")
        extra = shell.check_env(env or {})
        async with self._use(), _command_fd(command) as fd:
            line = shell.shell_line(
                fd,
                workdir=self.workdir,
                fresh=fresh,
                env_names=extra,
                ulimits=shell.ulimits(self._environment.limits, timeout),
            )
            limit = ["/usr/bin/timeout", "-k", f"{shell.GRACE:g}", shell.seconds(timeout)]
            started = time.monotonic()
            done = await self._run(
                [*limit, "/usr/bin/bash", "-c", line, "bash"],
                env={**self._environment.env, **extra},
                deadline=timeout + shell.GRACE + _LATE,
                fds=[fd],
            )
            if self._killed:
                reason, self._killed = self._killed, ""
                return ExecResult(f"{reason}\n", 137, time.monotonic() - started, False)
            duration = time.monotonic() - started
            if os.lseek(fd, 0, os.SEEK_CUR) == 0:  # bash has not even read the command
                problem = await asyncio.to_thread(self._host.jail.probe)
                if problem:
                    raise SandboxError(f"cannot run a command in sandbox {self._place}: {problem}")
                # In a new directory it works, so the agent has destroyed this one: its own fault, not the machine's.
                return ExecResult(f"no command can run: {done.output.text().strip()}\n", 126, duration, False)
        if done.late:
            return ExecResult(done.output.text(), 137, duration, True, done.output.elided)
        timed_out = shell.hit_time_limit(done.exit_code, duration, timeout)
        return ExecResult(done.output.text(), done.exit_code, duration, timed_out, done.output.elided)

    async def upload(self, source: Path, target: str, *, private: bool = False) -> None:
        directory, name = archive.split_target(source, target)
        # Unpacked by a process inside: links that the agent made lead nowhere else than they do for the agent.
        script = 'mkdir -p -- "$1" && exec tar --no-overwrite-dir -xpf - -C "$1"'
        with scratch_file(self._host.directory.path) as file:
            with disk_errors(self._host.directory.path):
                await asyncio.to_thread(archive.pack, [(source, name)], file)
                file.flush()
                file.seek(0)
            done = await self._inside(["/usr/bin/bash", "-c", script, "bash", directory], stdin=file.fileno())
        if done.exit_code != 0:
            raise self._failure(f"upload of {source} to {target}", done)

    async def download(self, source: str, target: Path, *, private: bool = False) -> None:
        script = (
            '[ -e "$1" ] || exit 44; exec tar --hard-dereference --ignore-failed-read -cf - -C "${1%/*}/" -- "${1##*/}"'
        )
        path = source.rstrip("/")
        if not path.startswith("/"):
            raise ValueError(f"download source {source!r} must be an absolute path inside the sandbox, not / itself")
        with scratch_file(self._host.directory.path) as file:
            done = await self._inside(["/usr/bin/bash", "-c", script, "bash", path], stdout=file.fileno())
            if done.exit_code == 44:
                raise FileNotFoundError(f"{source} does not exist in the sandbox")
            if done.exit_code != 0:
                raise self._failure(f"download of {source}", done)
            file.seek(0)
            with disk_errors(target):
                await asyncio.to_thread(archive.unpack, file, path.rsplit("/", 1)[1], target)

    async def set_network(self, phase: Phase) -> None:
        """Nothing: a task whose agent or verifier has a network is refused."""

    async def snapshot(self) -> Snapshot:
        async with self._use():
            return await self._host.save(self.root, self._environment)

    async def kill_all(self, reason: str) -> None:
        """Ends the command that runs, if any; its result says why."""
        if self.busy:
            assert self._running is not None
            self._killed = reason
            self._running.cancel()

    async def close(self) -> None:
        # Shielded, so that a cancelled caller does not leave the directory behind.
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        if self._running is not None:
            self._running.cancel()  # kills what runs
        async with self._lock:
            try:
                await self._host.remove(self._place)
            finally:
                self._host.closed(self)

    @contextlib.asynccontextmanager
    async def _use(self) -> AsyncIterator[None]:
        async with self._lock:
            if self._closing is not None:
                raise SandboxError(f"sandbox {self.id} is closed")
            # An agent may have locked everyone, itself included, out of `/`.
            with disk_errors(self.root):
                os.chmod(self.root, 0o755)
            yield

    async def _inside(self, argv: list[str], **streams: int) -> Finished:
        async with self._use():
            return await self._run(argv, env=self._environment.env, deadline=_FILE_DEADLINE, **streams)

    async def _run(self, argv: list[str], **options: Any) -> Finished:
        self._running = asyncio.ensure_future(self._host.jail.run(self.root, argv, **options))
        try:
            return await self._running
        except asyncio.CancelledError:
            if self._closing is not None:
                raise SandboxError(f"sandbox {self.id} was closed while a command ran") from None
            if self._killed:
                return Finished(137, BoundedOutput(), False)
            raise

    def _failure(self, what: str, done: Finished) -> SandboxError:
        output = done.output.text().strip()
        if "No space left" in output:
            return disk_full(self._place)
        return SandboxError(f"{what} failed in sandbox {self._place}: {output[-500:]}")


class BubblewrapHost:
    """Makes bubblewrap sandboxes below RUN_DIR/sandboxes. See SandboxHost for the calls."""

    def __init__(self, run_dir: Path, *, max_concurrent: int, snapshot_mb: int | None = None) -> None:
        """Raises SandboxUnavailable without a working bubblewrap, SandboxError if `run_dir` cannot be used."""
        self.directory: HostDir = claim(run_dir)
        try:
            with disk_errors(self.directory.path):
                for name in ("environments", "live", "snapshots"):
                    (self.directory.path / name).mkdir()
                    (self.directory.path / name).chmod(0o711)
                self.jail: Jail = open_jail(self.directory.path)
        except BaseException:
            self.directory.remove()
            raise
        self._slots = asyncio.Semaphore(max_concurrent)
        self._live: set[BubblewrapSandbox] = set()
        self._environments: dict[str, Environment] = {}
        self._building: dict[str, asyncio.Lock] = {}
        self._snapshots: dict[str, Environment] = {}
        self._budget = SnapshotBudget(snapshot_mb)
        self._watch = DiskWatch(self._sizes, self._kill)
        self._pid = os.getpid()  # a forked child must not clean up after us
        atexit.register(self._remove_all)

    async def start(self, task: Task) -> BubblewrapSandbox:
        env = await self._environment(task)
        sandbox = await self._make(self.directory.path / "environments" / _key(task), env)
        await environment.wait_healthy(sandbox, task)
        return sandbox

    async def fork(self, snapshot: Snapshot, task: Task) -> BubblewrapSandbox:
        if snapshot.id not in self._snapshots:
            raise self._budget.missing(snapshot, task.id)
        with self._budget.in_use(snapshot.id):
            return await self._make(self.directory.path / "snapshots" / snapshot.id, self._snapshots[snapshot.id])

    async def release(self, snapshot: Snapshot) -> None:
        await self._forget(snapshot.id)

    async def _forget(self, name: str) -> None:
        if self._snapshots.pop(name, None) is not None:
            self._budget.remove(name)
            await self.remove(self.directory.path / "snapshots" / name)

    async def close(self) -> None:
        # What does not close is removed with the directory below.
        await asyncio.gather(*(sandbox.close() for sandbox in list(self._live)), return_exceptions=True)
        await asyncio.to_thread(self._remove_all)
        atexit.unregister(self._remove_all)

    async def save(self, root: Path, env: Environment) -> Snapshot:
        """Copies a sandbox's directory; called by the sandbox, which holds its lock."""
        name = f"snap-{secrets.token_hex(6)}"
        place = self.directory.path / "snapshots" / name
        await self._copy(root, place)
        self._snapshots[name] = env
        for old in self._budget.add(name, (await self._du([place])).get(name, 0)):
            await self._forget(old)
        return Snapshot(name, "bubblewrap", self.directory.id)

    async def remove(self, place: Path) -> None:
        done = await run_program([*self.jail.as_owner, "/bin/rm", "-rf", "--", str(place)], deadline=_FILE_DEADLINE)
        if done.exit_code != 0:
            raise SandboxError(f"cannot remove {place}: {done.output.text().strip()[-500:]}")

    def closed(self, sandbox: BubblewrapSandbox) -> None:
        """A sandbox has ended: its slot is free."""
        if sandbox in self._live:
            self._live.discard(sandbox)
            self._watch.remove(sandbox.id)
            self._slots.release()

    async def _make(self, source: Path, env: Environment) -> BubblewrapSandbox:
        await self._slots.acquire()
        place = self.directory.path / "live" / f"sandbox-{secrets.token_hex(6)}"
        try:
            await self._copy(source, place)
        except BaseException:
            self._slots.release()
            raise
        sandbox = BubblewrapSandbox(self, place, env)
        self._live.add(sandbox)
        self._watch.add(sandbox.id, env.limits.disk_mb)
        return sandbox

    async def _sizes(self) -> dict[str, int]:
        busy = [sandbox for sandbox in self._live if sandbox.busy]  # in others nothing can grow
        return await self._du([sandbox.root.parent for sandbox in busy]) if busy else {}

    async def _du(self, places: list[Path]) -> dict[str, int]:
        """Bytes on the disk by name of the directory."""
        command = [*self.jail.as_owner, "/usr/bin/du", "-skx", "--", *map(str, places)]
        lines = (await run_program(command, deadline=_FILE_DEADLINE)).output.text().splitlines()
        pairs = [line.split("\t", 1) for line in lines if "\t" in line]
        return {Path(path).name: int(size) << 10 for size, path in pairs if size.isdigit()}

    async def _kill(self, name: str, reason: str) -> None:
        await asyncio.gather(*(sandbox.kill_all(reason) for sandbox in self._live if sandbox.id == name))

    async def _copy(self, source: Path, target: Path) -> None:
        """Copies directory `source/root` or `source` itself (if it is a root) to `target/root`, all attributes kept."""
        origin = source if source.name == "root" else source / "root"
        with disk_errors(target):
            target.mkdir()
            target.chmod(0o711)
        command = [*self.jail.as_owner, "/bin/cp", "-a", "--", str(origin), str(target / "root")]
        try:
            done = await run_program(command, deadline=_FILE_DEADLINE)
        except BaseException:
            await asyncio.shield(self.remove(target))
            raise
        if done.exit_code != 0:
            message = done.output.text().strip()
            await self.remove(target)
            if "No space left" in message or "quota exceeded" in message:
                raise disk_full(target.parent)
            raise SandboxError(f"cannot copy {origin} to {target}: {message[-500:]}")

    async def _environment(self, task: Task) -> Environment:
        key = _key(task)
        async with self._building.setdefault(key, asyncio.Lock()):
            if key not in self._environments:
                place = self.directory.path / "environments" / key
                try:
                    self._environments[key] = await self._build(task, place)
                except BaseException:
                    await asyncio.shield(self.remove(place))
                    raise
            return self._environments[key]

    async def _build(self, task: Task, place: Path) -> Environment:
        recipe = environment.Recipe.of(task)
        with disk_errors(place):
            place.mkdir()
            place.chmod(0o711)
            environment.make_root(place / "root", self.jail.owner)
        for step in recipe.steps:
            sandbox = BubblewrapSandbox(self, place, step.environment)
            await step.apply(sandbox)
        return recipe.environment

    def _remove_all(self) -> None:
        if os.getpid() != self._pid:
            return
        self.jail.close()
        self._snapshots.clear()
        self._environments.clear()
        self.directory.remove()


@contextlib.asynccontextmanager
async def _command_fd(command: str) -> AsyncIterator[int]:
    with memory_file(shell.payload(command)) as fd:
        yield fd


def _key(task: Task) -> str:
    return task.content_hash


def available() -> bool:
    """Whether bubblewrap is installed."""
    return shutil.which("bwrap") is not None
