"""A host with a task to try sandboxes with."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from reterm_jax.sandbox import SandboxHost, SandboxUnavailable
from reterm_jax.sandbox.base import BASE_HINT, BASE_IMAGE
from reterm_jax.sandbox.dockerimage import connect
from reterm_jax.sandbox.jail import find_bwrap
from reterm_jax.tasks.config import EnvironmentConfig, TaskConfig


@functools.cache
def why_not(kind: str) -> str:
    """Empty if sandboxes of this kind work here."""
    try:
        if kind == "bubblewrap":
            find_bwrap()
        else:
            client, errors = connect()
            try:
                client.images.get(BASE_IMAGE)
            except errors.ImageNotFound:
                return f"docker: no image {BASE_IMAGE}; as root run: {BASE_HINT}"
    except SandboxUnavailable as error:
        return f"{kind}: {error}"
    return ""


@dataclass
class Bench:
    """A host, a task, and an empty directory that holds the run directory `run`."""

    kind: str
    host: SandboxHost
    task: Any
    directory: Path

    @property
    def run_dir(self) -> Path:
        return self.directory / "run"

    async def start(self) -> Any:
        return await self.host.start(self.task)

    async def sh(self, sandbox: Any, command: str, *, timeout: float = 20, **options: Any) -> str:
        """Runs a command that must succeed and returns its output."""
        result = await sandbox.exec(command, timeout=timeout, **options)
        assert result.exit_code == 0, (command, result)
        return result.output

    def set_task(self, files: dict[str, str] | None = None, **environment: Any) -> None:
        self.task = make_task(self.directory, files, **environment)


def make_task(directory: Path, files: dict[str, str] | None = None, **environment: Any) -> Any:
    """A task as the sandbox package sees it, with `files` in its environment directory."""
    files = files or {}
    path = directory / "task"
    (path / "environment").mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        file = path / "environment" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    environment = {"build_timeout_sec": 60.0} | environment
    return SimpleNamespace(
        id="example",
        path=path,
        content_hash=f"{hash(tuple(sorted(files.items()))) & 0xFFFFFFFF:08x}",
        config=TaskConfig(environment=EnvironmentConfig(**environment)),
    )
