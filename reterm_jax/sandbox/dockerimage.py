"""The Docker side of a task's environment: the daemon, and the image that containers start from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reterm_jax.sandbox import shell
from reterm_jax.sandbox.base import BASE_IMAGE, DEFAULT_WORKDIR, SandboxError, SandboxUnavailable
from reterm_jax.sandbox.environment import check_network, check_no_compose, limits_of
from reterm_jax.sandbox.process import disk_errors

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

BASE_HINT = "bash third_party/sandbox_base/build.sh"
_DAEMON_HINT = "as root run: apt-get install -y docker.io && (systemctl start docker || dockerd &)"
_API_TIMEOUT = 120  # seconds for one answer of the daemon


@dataclass(frozen=True)
class Image:
    """What a container starts from, and what it is given besides.

    Attributes:
      layers: how many the image has; `size`: its bytes.
      skeleton: the directories that a sandbox needs are still to be made.
      mounts: directories whose contents a snapshot holds beside its files; `sentinel`: what proves it complete.
    """

    name: str
    workdir: str
    env: Mapping[str, str]
    limits: shell.Limits
    network: str
    layers: int
    size: int
    capabilities: tuple[str, ...] = ()
    skeleton: bool = True
    mounts: tuple[str, ...] = ()
    sentinel: str = ""


def connect(max_concurrent: int = 1, url: str | None = None) -> tuple[Any, Any]:
    """A Docker client, of the daemon at `url` or the usual one, and the module of its errors.

    Raises SandboxUnavailable with the command that helps.
    """
    try:
        import docker
        from docker import errors
    except ImportError as error:
        raise SandboxUnavailable("the Python package `docker` is not installed; run: pip install docker") from error
    where = f" at {url}" if url else ""
    try:
        environment = {**os.environ, "DOCKER_HOST": url} if url else None
        pool = 2 * max_concurrent + 4
        client = docker.from_env(timeout=_API_TIMEOUT, max_pool_size=pool, environment=environment)
        client.ping()
    except errors.DockerException as error:
        raise SandboxUnavailable(f"no Docker daemon answers{where} ({error}); {_DAEMON_HINT}") from error
    return client, errors


def prepare(client: Any, task: Task, tag: str, labels: Mapping[str, str], logs: Path) -> Image:
    """Finds the image that a task names, or builds that of its Dockerfile as `tag`. Blocking.

    The log of a build that fails is kept in the directory `logs`. Raises SandboxError naming the task and what is at
    fault.
    """
    config = task.config.environment
    check_network(task)
    check_no_compose(task)
    context = Path(task.path) / "environment"
    if config.docker_image or not (context / "Dockerfile").exists():
        image = _find(client, config.docker_image or BASE_IMAGE, task)
    else:
        image = _build(client, context, task, tag, labels, logs)
    workdir = config.workdir or image.attrs["Config"].get("WorkingDir") or DEFAULT_WORKDIR
    network = "bridge" if config.network_mode == "public" else "none"
    layers = len(image.attrs["RootFS"]["Layers"])
    env, size = shell.check_env(config.env or {}), image.attrs["Size"]
    return Image(image.id, workdir, env, limits_of(task), network, layers, size, config.capabilities)


def _find(client: Any, name: str, task: Task) -> Any:
    from docker import errors

    try:
        return client.images.get(name)
    except errors.ImageNotFound:
        if name.split(":")[0] == BASE_IMAGE:
            raise SandboxError(f"task {task.id}: the image {name} is not made yet; as root run: {BASE_HINT}") from None
    try:
        return client.images.pull(name)
    except errors.DockerException as error:
        raise SandboxError(f"task {task.id}: environment.docker_image = {name!r} cannot be pulled: {error}") from error


def _build(client: Any, context: Path, task: Task, tag: str, labels: Mapping[str, str], logs: Path) -> Any:
    from docker import errors

    timeout = int(getattr(task.config.environment, "build_timeout_sec", None) or 600)
    try:
        image, _ = client.images.build(
            path=str(context), tag=tag, labels=dict(labels), rm=True, forcerm=True, timeout=timeout
        )
    except errors.BuildError as error:
        log = "".join(str(entry.get("stream") or entry.get("error") or "") for entry in error.build_log)
        kept = logs / f"build-{task.id}.log"
        with disk_errors(kept):
            kept.write_text(log)
        hint = f"\nThe base image is made by: {BASE_HINT}" if BASE_IMAGE in str(error) else ""
        message = f"task {task.id}: {context / 'Dockerfile'}: build failed: {error}\n{log[-1500:]}{hint}"
        raise SandboxError(f"{message}\nThe whole log is in {kept}") from error
    return image
