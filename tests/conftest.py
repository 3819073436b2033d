"""Options of the whole suite. A test that cannot run here is skipped with a reason, and `-rs` lists it."""

import gc
import os
import socket
import subprocess
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


@pytest.fixture
def on_two_processes(simulated) -> Callable[..., None]:
    """Runs a script as two processes of two CPU devices each, with arguments RANK PORT and then those given.

    Each must end well, and the last thing that it prints be "done".
    """

    def run(script: str, *arguments: object) -> None:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", script, str(rank), str(port), *map(str, arguments)],
                env=simulated(2),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            for process in processes:
                out, error = process.communicate(timeout=600)
                assert process.returncode == 0 and out.strip().endswith("done"), error[-3000:]
        finally:
            for process in processes:
                process.kill()

    return run


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
