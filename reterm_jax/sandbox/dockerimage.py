"""The Docker side of a task's environment: the daemon, and the image that containers start from."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reterm_jax.sandbox import dockercompose, dockernetwork, shell
from reterm_jax.sandbox.base import BASE_HINT, BASE_IMAGE, DEFAULT_WORKDIR, SandboxError, SandboxUnavailable
from reterm_jax.sandbox.environment import compose_file, limits_of
from reterm_jax.sandbox.process import disk_errors

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

_DAEMON_HINT = "as root run: apt-get install -y docker.io && (systemctl start docker || dockerd &)"
_API_TIMEOUT = 120  # seconds for one answer of the daemon


@dataclass(frozen=True)
class Image:
    """What a container starts from, and what it is given besides.

    Attributes:
      layers: how many the image has; `size`: its bytes.
      skeleton: the directories that a sandbox needs are still to be made.
      mounts: directories whose contents a snapshot holds beside its files; `sentinel`: what proves it complete.
      services: the sidecars that run beside it.
    """

    name: str
    workdir: str
    env: Mapping[str, str]
    limits: shell.Limits
    networks: dockernetwork.Networks
    layers: int
    size: int
    capabilities: tuple[str, ...] = ()
    gpus: int = 0
    skeleton: bool = True
    mounts: tuple[str, ...] = ()
    sentinel: str = ""
    services: tuple[dockercompose.Service, ...] = ()


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
    file = compose_file(task)
    compose = dockercompose.Compose.read(file, task) if file else None

    def built(options: dict[str, Any], service: str = "") -> Any:
        name = f"{tag}-{service.lower()}" if service else tag
        return _build(client, options, task, name, labels, logs)

    def image_of(service: str) -> Any:
        """The image of a service of the compose file."""
        assert compose is not None
        options, name = compose.build_options(service), compose.services[service].get("image")
        if options:
            return built(options, service)
        if not name:
            raise SandboxError(f"task {task.id}: {file}: services.{service} has neither image nor build")
        return _find(client, name, task, f"{file}: services.{service}.image")

    main = compose.main if compose else {}
    context = Path(task.path) / "environment"
    if config.docker_image:
        image = _find(client, config.docker_image, task)
    elif main.get("build") or main.get("image"):
        image = image_of(dockercompose.MAIN)
    elif (context / "Dockerfile").exists():
        image = built({"path": str(context)})
    else:
        image = _find(client, BASE_IMAGE, task)
    capabilities = {"environment.capabilities": config.capabilities}
    for service, options in compose.services.items() if compose else ():
        capabilities[f"{file}: services.{service}.cap_add"] = options.get("cap_add") or ()
    networks = dockernetwork.read(task, capabilities)
    own = image.attrs["Config"].get("WorkingDir")
    return Image(
        name=image.id,
        workdir=config.workdir or main.get("working_dir") or own or DEFAULT_WORKDIR,
        env=shell.check_env({**dockercompose.environment(main), **(config.env or {})}),
        limits=limits_of(task),
        networks=networks,
        layers=len(image.attrs["RootFS"]["Layers"]),
        size=image.attrs["Size"],
        capabilities=(*config.capabilities, *main.get("cap_add", ())),
        gpus=config.gpus,
        services=compose.sidecars(lambda service: image_of(service).id) if compose else (),
    )


def _find(client: Any, name: str, task: Task, field: str = "environment.docker_image") -> Any:
    from docker import errors

    try:
        return client.images.get(name)
    except errors.ImageNotFound:
        if name.split(":")[0] == BASE_IMAGE:
            raise SandboxError(f"task {task.id}: the image {name} is not made yet; as root run: {BASE_HINT}") from None
    try:
        return client.images.pull(name)
    except errors.DockerException as error:
        raise SandboxError(f"task {task.id}: {field} = {name!r} cannot be pulled: {error}") from error


def _build(client: Any, options: Mapping[str, Any], task: Task, tag: str, labels: Mapping[str, str], logs: Path) -> Any:
    from docker import errors

    timeout = int(getattr(task.config.environment, "build_timeout_sec", None) or 600)
    try:
        image, _ = client.images.build(tag=tag, labels=dict(labels), rm=True, forcerm=True, timeout=timeout, **options)
    except errors.BuildError as error:
        log = "".join(str(entry.get("stream") or entry.get("error") or "") for entry in error.build_log)
        kept = logs / f"build-{task.id}.log"
        with disk_errors(kept):
            kept.write_text(log)
        hint = f"\nThe base image is made by: {BASE_HINT}" if BASE_IMAGE in str(error) else ""
        message = f"task {task.id}: {Path(options['path']) / 'Dockerfile'}: build failed: {error}\n{log[-1500:]}{hint}"
        raise SandboxError(f"{message}\nThe whole log is in {kept}") from error
    return image
