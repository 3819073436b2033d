"""Options of the whole suite. A test that cannot run here is skipped with a reason, and `-rs` lists it."""


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
