"""Sandbox tests are coroutines that take a `bench`; they run over both kinds of sandbox.

A kind that cannot work on this machine is skipped with the reason.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from reterm_jax.sandbox import SandboxHost, SandboxUnavailable, make_host
from reterm_jax.sandbox.base import BASE_IMAGE
from reterm_jax.sandbox.dockerimage import BASE_HINT, connect
from reterm_jax.sandbox.jail import find_bwrap
from reterm_jax.tasks.config import EnvironmentConfig, TaskConfig

_TEST_SECONDS = 120
_MAX_CONCURRENT = 4


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


@pytest.fixture
def task(tmp_path: Path) -> Any:
    return make_task(tmp_path)


@pytest.fixture(params=["bubblewrap", "docker"])
def bench(request: pytest.FixtureRequest, tmp_path: Path, task: Any) -> Bench:
    """Parametrised over kinds; `@pytest.mark.parametrize("bench", ["bubblewrap"], indirect=True)` chooses one."""
    if reason := why_not(request.param):
        pytest.skip(reason)
    host = make_host(request.param, tmp_path / "run", max_concurrent=_MAX_CONCURRENT, run_id="test")
    return Bench(request.param, host, task, tmp_path)


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs a coroutine test, and closes the bench's host in the same event loop."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    arguments = {name: pyfuncitem.funcargs[name] for name in names}

    async def run() -> None:
        try:
            await asyncio.wait_for(pyfuncitem.obj(**arguments), _TEST_SECONDS)
        finally:
            if "bench" in arguments:
                await arguments["bench"].host.close()

    asyncio.run(run())
    return True
