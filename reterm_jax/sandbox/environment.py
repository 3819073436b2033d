"""A task's environment for bubblewrap: what its Dockerfile and configuration ask for, as steps run in a sandbox."""

from __future__ import annotations

import asyncio
import os
import posixpath
import shlex
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from reterm_jax.sandbox import dockerfile, shell
from reterm_jax.sandbox.base import (
    BASE_ENV,
    BASE_IMAGE,
    COMPOSE_FILES,
    DEFAULT_WORKDIR,
    LOG_DIRS,
    Sandbox,
    SandboxError,
)
from reterm_jax.tasks.config import Phase

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

_PASSWD = """root:x:0:0:root:/root:/bin/bash
agent:x:1000:1000:agent:/home/agent:/bin/bash
nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin
"""
_GROUP = "root:x:0:\nagent:x:1000:\nnogroup:x:65534:\n"
_HOSTS = "127.0.0.1 localhost sandbox\n::1 localhost\n"


@dataclass(frozen=True)
class Environment:
    """What a sandbox knows besides its files."""

    workdir: str
    env: Mapping[str, str]
    limits: shell.Limits


@dataclass(frozen=True)
class Step:
    """One change to the filesystem: a command, or a file or directory to copy in; under the environment so far."""

    what: str  # for error messages: task, file, line, instruction
    environment: Environment
    timeout: float
    command: str = ""
    source: Path | None = None
    target: str = ""

    async def apply(self, sandbox: Sandbox) -> None:
        """Raises SandboxError, naming the instruction, if it fails."""
        if self.source is not None:
            await sandbox.upload(self.source, self.target)
            return
        result = await sandbox.exec(self.command, timeout=self.timeout, fresh=True)
        if result.exit_code != 0:
            why = f"ran over {self.timeout:g} s" if result.timed_out else f"exit status {result.exit_code}"
            raise SandboxError(
                f"{self.what} failed ({why}): {result.output.strip()[-1000:]}\n"
                "Under bubblewrap there is no network and the system is read-only; "
                "a task that installs packages needs config.sandbox.kind=docker"
            )


@dataclass(frozen=True)
class Recipe:
    """The steps that make an environment, and how it is used afterwards."""

    steps: tuple[Step, ...]
    environment: Environment

    @staticmethod
    def of(task: Task) -> Recipe:
        """Reads `task`. Raises SandboxError if it needs Docker (naming what for) or is malformed."""
        config = task.config.environment
        limits = limits_of(task)
        timeout = float(getattr(config, "build_timeout_sec", None) or 600)
        current = Environment(DEFAULT_WORKDIR, dict(BASE_ENV), limits)
        steps: list[Step] = []
        context = Path(task.path) / "environment"
        file = context / "Dockerfile"
        if compose := compose_file(task):
            raise SandboxError(
                f"task {task.id}: {compose}: several containers need Docker: set config.sandbox.kind=docker"
            )
        for phase in get_args(Phase):
            if (mode := task.config.network(phase).mode) != "no-network":
                raise SandboxError(
                    f"task {task.id}: network_mode = {mode!r} for the {phase} needs Docker: "
                    "set config.sandbox.kind=docker"
                )
        if config.gpus:
            raise SandboxError(
                f"task {task.id}: environment.gpus = {config.gpus} needs Docker: set config.sandbox.kind=docker"
            )
        image = config.docker_image
        if image and image.split(":")[0] != BASE_IMAGE:
            raise SandboxError(
                f"task {task.id}: environment.docker_image = {image!r} needs Docker: set config.sandbox.kind=docker"
            )
        if config.capabilities:
            names = ", ".join(config.capabilities)
            raise SandboxError(
                f"task {task.id}: environment.capabilities = {names} needs Docker: set config.sandbox.kind=docker"
            )
        if file.exists() and not image:
            for instruction in dockerfile.parse(file, task.id):
                what = f"task {task.id}: {file}:{instruction.line}: {instruction.name}"
                try:
                    new_steps, current = _interpret(instruction, what, context, current, timeout)
                except ValueError as error:
                    raise SandboxError(f"{what}: {error}") from error
                steps += new_steps
        if config.workdir:
            current = Environment(config.workdir, current.env, limits)
            steps.append(_make_directory(f"task {task.id}: environment.workdir", current, timeout))
        env = {**current.env, **shell.check_env(config.env or {})}
        return Recipe(tuple(steps), Environment(current.workdir, env, limits))


def limits_of(task: Task) -> shell.Limits:
    """Resource limits from the task's configuration, with defaults where it has none."""
    config, default = task.config.environment, shell.Limits()
    return shell.Limits(
        memory_mb=int(config.memory_mb or default.memory_mb),
        cpus=float(config.cpus or default.cpus),
        disk_mb=int(config.storage_mb or default.disk_mb),
    )


async def wait_healthy(sandbox: Sandbox, task: Task) -> None:
    """Waits until the task's healthcheck, if any, succeeds; else closes the sandbox and raises SandboxError."""
    check = task.config.environment.healthcheck
    if check is None:
        return
    begun, failures = time.monotonic(), 0
    try:
        while (result := await sandbox.exec(check.command, timeout=check.timeout_sec, fresh=True)).exit_code != 0:
            failures += time.monotonic() - begun >= check.start_period_sec
            if failures >= check.retries:
                said = result.output.strip()[-500:]
                raise SandboxError(f"task {task.id}: environment.healthcheck failed {failures} times: {said}")
            await asyncio.sleep(check.interval_sec)
    except BaseException:
        await sandbox.close()
        raise


def compose_file(task: Task) -> Path | None:
    """The file that describes an environment of several containers."""
    paths = (Path(task.path) / "environment" / name for name in COMPOSE_FILES)
    return next((path for path in paths if path.exists()), None)


def make_root(root: Path, owner: int | None) -> None:
    """Makes the directory that is `/` in a sandbox: the tree in which a task's environment begins."""
    directories = ["usr", "etc", "tmp", "var/tmp", "var/log", "opt", "srv", "root", "run", shell.STATE_DIR[1:]]
    directories += [path[1:] for path in (DEFAULT_WORKDIR, BASE_ENV["HOME"], *LOG_DIRS)]
    root.mkdir()
    for directory in directories:
        (root / directory).mkdir(parents=True, exist_ok=True)
    files = {"etc/passwd": _PASSWD, "etc/group": _GROUP, "etc/hosts": _HOSTS, "etc/hostname": "sandbox\n"}
    for name, text in files.items():
        (root / name).write_text(text)
        (root / name).chmod(0o644)
    for path in [root, *root.rglob("*")]:
        if path.is_dir():
            path.chmod(0o1777 if path.name == "tmp" else 0o755)
        if owner is not None:
            os.chown(path, owner, owner)


def _interpret(
    instruction: dockerfile.Instruction, what: str, context: Path, current: Environment, timeout: float
) -> tuple[list[Step], Environment]:
    name, text = instruction.name, instruction.text
    if name == "ENV":
        pairs = shell.check_env(dockerfile.env_pairs(text, current.env))
        return [], Environment(current.workdir, {**current.env, **pairs}, current.limits)
    if name == "WORKDIR":
        workdir = posixpath.join(current.workdir, dockerfile.substitute(text, current.env).strip("\"'"))
        current = Environment(posixpath.normpath(workdir), current.env, current.limits)
        return [_make_directory(what, current, timeout)], current
    if name == "COPY":
        *patterns, target = [dockerfile.substitute(word, current.env) for word in dockerfile.words(text)]
        if not patterns:
            raise ValueError("COPY needs a source and a target")
        slash = "/" if target.endswith("/") or target in (".", "..") else ""
        target = posixpath.normpath(posixpath.join(current.workdir, target)).rstrip("/") + slash
        pairs = dockerfile.copy_sources(context, patterns, target)
        return [Step(what, current, timeout, source=source, target=place or "/") for source, place in pairs], current
    if name == "RUN":
        return [Step(what, current, timeout, command=dockerfile.run_command(text))], current
    return [], current  # FROM, checked by the parser


def _make_directory(what: str, current: Environment, timeout: float) -> Step:
    return Step(what, current, timeout, command=f"mkdir -p -- {shlex.quote(current.workdir)}")
