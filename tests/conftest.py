"""Options of the whole suite. A test that cannot run here is skipped with a reason, and `-rs` lists it."""

import gc
import sys

import pytest


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
