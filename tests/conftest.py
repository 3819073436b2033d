"""Options of the whole suite. A test that cannot run here is skipped with a reason, and `-rs` lists it."""

import gc
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

# Most of the suite's time is LLVM's, and most of that goes into making small programs fast: without it the tests take
# little more than half as long. What XLA makes of a program (fusions, sharding, buffers) stays the same. A flag that
# the environment gives comes last and wins.
FAST_TO_COMPILE = "--xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{FAST_TO_COMPILE} {os.environ.get('XLA_FLAGS', '')}".strip()


@pytest.fixture(scope="session")
def simulated() -> Callable[[int], dict[str, str]]:
    """The environment of a Python process that sees that many CPU devices, and this package."""

    def environment(devices: int) -> dict[str, str]:
        flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count={devices}"
        package = str(Path(__file__).parents[1])
        return {**os.environ, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": package}

    return environment


@pytest.fixture(autouse=True, scope="module")
def free_programs():
    """Every compiled program holds three memory maps, of which Linux gives a process 65,530: where none is left XLA
    crashes with a segmentation fault. The whole suite in one process would come that far."""
    yield
    if "jax" in sys.modules:
        sys.modules["jax"].clear_caches()
        gc.collect()


def pytest_addoption(parser):
    parser.addoption("--require-all", action="store_true", help="fail if any test was left out")


def pytest_terminal_summary(terminalreporter, exitstatus, config):
    left_out = terminalreporter.stats.get("skipped", [])
    if left_out:
        terminalreporter.write_line(f"{len(left_out)} left out; the reasons are above")


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("--require-all") and reporter.stats.get("skipped") and exitstatus == 0:
        session.exitstatus = 1
