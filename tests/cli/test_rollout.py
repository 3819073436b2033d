"""`reterm-rollout` as it is started: it serves until SIGTERM, and does not open itself to others by mistake."""

import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]


def start(workdir, listen):
    command = [sys.executable, "-m", "reterm_jax.cli.rollout", f"--config={REPO / 'configs' / 'quickstart.py'}"]
    command += [f"--workdir={workdir}", f"--listen={listen}", "--config.tasks.train_per_family=1"]
    env = {**os.environ, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(
        command, cwd=REPO, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
    )


def test_it_serves_until_sigterm_and_leaves_nothing_but_its_store(tmp_path):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    process = start(tmp_path / "run", "127.0.0.1:0")
    try:
        line = next(line for line in process.stdout if line.startswith("rollout service"))
        page = re.search(r"http://127.0.0.1:\d+/status", line)[0]
        with urllib.request.urlopen(page, timeout=30) as answer:
            assert "none yet" in answer.read().decode()
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0, process.stdout.read()
    finally:
        process.kill()
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == [
        ".lock", "config.json", "groups.sqlite", "sandboxes", "tasks",
    ]  # fmt: skip
    assert list((tmp_path / "run" / "sandboxes").rglob("*")) == []


def test_other_machines_need_a_token(tmp_path):
    done = start(tmp_path / "run", "0.0.0.0:8765")
    said, _ = done.communicate(timeout=120)
    assert done.returncode == 1 and "set RETERM_ROLLOUT_TOKEN to a secret" in said.splitlines()[-1]
    assert not (tmp_path / "run").exists()
