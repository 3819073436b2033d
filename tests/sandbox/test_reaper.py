"""What a killed run leaves is removed by the next one, and nothing else is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from reterm_jax.sandbox import make_host
from reterm_jax.sandbox.reaper import claim, is_alive, run_label

if TYPE_CHECKING:
    from sandbox_bench import Bench

# Starts a sandbox, saves it, prints the host's id and runs a command for ever. Arguments: kind, run directory, task.
RUN = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from reterm_jax.sandbox import make_host
from reterm_jax.tasks.config import TaskConfig

async def main(kind, run_dir, path):
    task = SimpleNamespace(id="t", path=Path(path), content_hash="0", config=TaskConfig())
    host = make_host(kind, Path(run_dir), max_concurrent=1, run_id="r")
    box = await host.start(task)
    await box.exec("mkdir d; chmod 000 d", timeout=20)
    await box.snapshot()
    print(host.directory.id, flush=True)
    if sys.argv[4:] == ["leave"]:
        return
    await box.exec("sleep 86.25", timeout=300)

asyncio.run(main(*sys.argv[1:4]))
"""


def start_run(bench: Bench, *arguments: str) -> tuple[subprocess.Popen[str], str]:
    command = [sys.executable, "-c", RUN, bench.kind, str(bench.run_dir), str(bench.task.path), *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def running(text: str) -> bool:
    """Whether a process has `text` in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if text.encode() in path.read_bytes():
                return True
        except OSError:
            pass
    return False


def docker_things(run_dir: Path) -> int:
    from reterm_jax.sandbox.dockerimage import connect

    client, _ = connect()
    filters = {"label": [f"reterm.run_dir={run_label(run_dir)}"]}
    return len(client.containers.list(all=True, filters=filters)) + len(client.images.list(filters=filters))


async def test_next_run_removes_what_a_killed_one_left(bench: Bench) -> None:
    living = await bench.start()
    process, dead = start_run(bench)
    time.sleep(0.5)
    left = bench.run_dir / "sandboxes" / dead
    assert is_alive(left)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert left.exists() and not is_alive(left)
    if bench.kind == "bubblewrap":
        time.sleep(0.3)
        assert not running("sleep\x0086.25"), "the kernel ends the commands of a killed run"
    else:
        assert docker_things(bench.run_dir) == 3
    other = make_host(bench.kind, bench.directory / "other", max_concurrent=1, run_id="other")
    assert left.exists(), "the leftovers of another run directory are not touched"
    again = make_host(bench.kind, bench.run_dir, max_concurrent=1, run_id="test")
    assert not left.exists() and not running("sleep\x0086.25")
    if bench.kind == "docker":
        assert docker_things(bench.run_dir) == 1
    assert await bench.sh(living, "echo untouched") == "untouched\n"
    for host in (other, again, bench.host):
        await host.close()
    assert not (bench.run_dir / "sandboxes").exists()
    if bench.kind == "docker":
        assert docker_things(bench.run_dir) == 0


async def test_a_run_that_ends_without_close_cleans_up(bench: Bench) -> None:
    process, host_id = start_run(bench, "leave")
    assert process.wait(30) == 0
    assert host_id and not (bench.run_dir / "sandboxes" / host_id).exists()
    if bench.kind == "docker":
        assert docker_things(bench.run_dir) == 0


def test_claims(tmp_path: Path) -> None:
    one, two = claim(tmp_path), claim(tmp_path)
    assert one.path != two.path and is_alive(one.path) and is_alive(two.path)
    one.remove()
    one.remove()
    assert two.path.exists()
    two.remove()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("bench", ["bubblewrap"], indirect=True)
async def test_close_leaves_nothing(bench: Bench) -> None:
    boxes = [await bench.start() for _ in range(2)]
    await bench.sh(boxes[0], "mkdir -p a/b; touch a/b/c; chmod 000 a/b a; chmod 000 .")
    await boxes[0].snapshot()
    await bench.host.close()
    assert list(bench.run_dir.iterdir()) == []
