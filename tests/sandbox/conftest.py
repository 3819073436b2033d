"""Sandbox tests are coroutines that take a `bench`; they run over both kinds of sandbox.

A kind that cannot work on this machine is skipped with the reason.
"""

from __future__ import annotations

import asyncio
import inspect
from pathlib import Path
from typing import Any

import pytest
from sandbox_bench import Bench, make_task, why_not

from reterm_jax.sandbox import make_host

_TEST_SECONDS = 120
_MAX_CONCURRENT = 4


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
