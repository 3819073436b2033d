"""Restarting a server by a command: real commands, and a server that is another process."""

import asyncio
import contextlib
import logging
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reterm_jax.rollout.samplers.restart import RestartCommand

HEALTHY = """
import http.server, sys, time
time.sleep(0.5)  # loading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def port():
    with contextlib.closing(socket.socket()) as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def test_it_returns_once_the_server_answers(port, tmp_path, caplog):
    script = tmp_path / "server.py"
    script.write_text(HEALTHY)
    start = f'{sys.executable} {script} "${{RETERM_SERVER##*:}}" >/dev/null 2>&1 & echo $! > {tmp_path}/pid'
    begun = time.monotonic()
    try:
        asyncio.run(RestartCommand(start, patience=30)(f"http://127.0.0.1:{port}"))
        assert time.monotonic() - begun >= 0.5
        with socket.create_connection(("127.0.0.1", port), timeout=1):
            pass
        assert len(caplog.records) == 1  # that it was restarted
    finally:
        subprocess.run(["kill", (tmp_path / "pid").read_text().strip()], check=True)


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("exit 3", "rollout.restart ended with status 3"),
        ("sleep 600 & echo $! > pid; wait", "rollout.restart did not end within 1 s"),
        ("true", "restarted, but does not answer after 1 s"),
    ],
)
def test_what_goes_wrong_is_a_warning(port, tmp_path, monkeypatch, caplog, command, said):
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.WARNING):
        asyncio.run(RestartCommand(command, patience=1)(f"http://127.0.0.1:{port}"))
    assert said in caplog.text and f"http://127.0.0.1:{port}" in caplog.text
    if Path("pid").exists():  # nothing of the command is left
        deadline = time.monotonic() + 5
        while Path(f"/proc/{Path('pid').read_text().strip()}").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert time.monotonic() < deadline
