"""The choice of a sandbox kind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, Literal

from reterm_jax.sandbox import bubblewrap
from reterm_jax.sandbox.base import SandboxHost, SandboxUnavailable
from reterm_jax.sandbox.jail import INSTALL_HINT


def docker_urls() -> list[str]:
    """The daemons that `DOCKER_HOST` names, with commas between them; none: the usual one."""
    return [url.strip() for url in os.environ.get("DOCKER_HOST", "").split(",") if url.strip()]


def make_host(
    kind: Literal["auto", "bubblewrap", "docker"],
    run_dir: Path,
    *,
    max_concurrent: int,
    run_id: str,
    snapshot_mb: int | None = None,
) -> SandboxHost:
    """A host of the given kind for one run; first removes what a dead run of the same `run_dir` left behind.

    "auto" is bubblewrap, or Docker where bubblewrap is not installed and a daemon answers. Call `close` in the end.
    `DOCKER_HOST` may list several daemons with commas between them: each gets its share. Snapshots may take
    `snapshot_mb` in all; beyond that the oldest are given up.

    Raises SandboxUnavailable if that kind does not work here, naming the command that helps; ValueError for another
    kind or `max_concurrent` < 1.
    """
    if max_concurrent < 1:
        raise ValueError(f"max_concurrent must be at least 1, got {max_concurrent}")
    if kind == "bubblewrap" or (kind == "auto" and bubblewrap.available()):
        return bubblewrap.BubblewrapHost(run_dir, max_concurrent=max_concurrent, snapshot_mb=snapshot_mb)
    if kind not in ("auto", "docker"):
        raise ValueError(f"sandbox kind must be auto, bubblewrap or docker, got {kind!r}")
    from reterm_jax.sandbox.dockerhost import DockerHost
    from reterm_jax.sandbox.dockerpool import DockerPool

    options: dict[str, Any] = {"max_concurrent": max_concurrent, "run_id": run_id, "snapshot_mb": snapshot_mb}
    urls = docker_urls()
    try:
        return DockerPool(run_dir, urls, **options) if len(urls) > 1 else DockerHost(run_dir, **options)
    except SandboxUnavailable as error:
        if kind == "docker":
            raise
        raise SandboxUnavailable(
            f"neither bubblewrap nor a Docker daemon is there to isolate commands; as root run: {INSTALL_HINT}"
        ) from error
