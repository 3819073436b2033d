"""What only bubblewrap sandboxes do: users, limits and mounts on this machine, and what a broken one says."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from reterm_jax.sandbox import SandboxError
from reterm_jax.sandbox.bubblewrap import BubblewrapHost
from reterm_jax.tasks.config import Network

if TYPE_CHECKING:
    from sandbox_bench import Bench

only_bubblewrap = pytest.mark.parametrize("bench", ["bubblewrap"], indirect=True)

# A whole life of a sandbox, for another user than the one who runs the tests. Arguments: run directory, task directory.
LIFE = """
import asyncio, sys
from pathlib import Path
from types import SimpleNamespace
from reterm_jax.sandbox import make_host
from reterm_jax.tasks.config import TaskConfig

async def main(run_dir, path):
    task = SimpleNamespace(id="t", path=Path(path), content_hash="0", config=TaskConfig())
    host = make_host("bubblewrap", Path(run_dir), max_concurrent=1, run_id="r")
    box = await host.start(task)
    await box.exec("mkdir d; echo x > d/f; chmod 000 d/f d; chmod a-w .", timeout=20)
    denied = await box.exec("id -un; echo > new; cat d/f", timeout=20)
    snapshot = await box.snapshot()
    await box.close()
    fork = await host.fork(snapshot, task)
    allowed = await fork.exec("chmod -R u+rwX /app; cat d/f", timeout=20)
    await host.close()
    print(denied.output + allowed.output, end="")

asyncio.run(main(*sys.argv[1:]))
"""


def run_life(prefix: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    (tmp_path / "task").mkdir(exist_ok=True)
    command = [*prefix, sys.executable, "-c", LIFE, str(tmp_path / "run"), str(tmp_path / "task")]
    repository = Path(__file__).parents[2]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=repository)


def test_works_for_a_user_without_privileges(tmp_path: Path) -> None:
    prefix = ["unshare", "--user", "--map-user=1234", "--map-group=1234"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("unshare cannot make another user here")
    done = run_life(prefix, tmp_path)
    assert done.stdout == ("agent\nbash: line 1: new: Permission denied\ncat: d/f: Permission denied\nx\n"), done.stderr
    assert not (tmp_path / "run" / "sandboxes").exists()


def test_full_disk_is_an_error_that_names_the_path(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    # Room for the host's own files, not for a sandbox.
    mount = f'mount -t tmpfs -o size=1m,nr_inodes=40 none {tmp_path}/run && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small file system here")
    done = run_life(prefix, tmp_path)
    assert done.returncode == 1
    last = done.stderr.strip().splitlines()[-1]
    assert "SandboxError" in last and f"{tmp_path}/run/sandboxes" in last and "is full" in last


@only_bubblewrap
async def test_system_is_read_only_and_local_programs_are_hidden(bench: Bench) -> None:
    box = await bench.start()
    for path in ("/usr/x", "/bin/x", "/lib/x", "/usr/local/x", "/proc/x"):
        assert (await box.exec(f"touch {path}", timeout=20)).exit_code != 0
    assert await bench.sh(box, "ls -A /usr/local; ls -A /root; ls -d /work /sys /boot 2>/dev/null; id -un") == "agent\n"
    assert await bench.sh(box, "unshare -r true 2>/dev/null || echo no more namespaces") == "no more namespaces\n"


@only_bubblewrap
async def test_limits(bench: Bench) -> None:
    bench.set_task(memory_mb=64, cpus=2)
    box = await bench.start()
    assert await bench.sh(box, "ulimit -c -u -d -f | grep -o '[0-9]*$'", timeout=20) == "0\n512\n65536\n2097152\n"
    result = await box.exec("x=$(head -c 200M /dev/zero | tr '\\0' x)", timeout=20)
    assert result.exit_code != 0 and "allocate" in result.output
    result = await box.exec("ulimit -f 1; yes > big", timeout=20)
    assert result.exit_code == 153  # SIGXFSZ


@only_bubblewrap
async def test_processes_end_with_the_command(bench: Bench) -> None:
    box = await bench.start()
    await bench.sh(box, "setsid sleep 87.125 & disown")
    assert await bench.sh(box, "pgrep -c sleep || true") == "0\n"
    assert (await box.snapshot()).live_processes == ()
    assert b"87.125" not in b"".join(p.read_bytes() for p in Path("/proc").glob("[0-9]*/cmdline") if p.exists())


@only_bubblewrap
async def test_what_the_agent_destroyed_is_its_own_fault(bench: Bench) -> None:
    box = await bench.start()
    await box.exec("chmod 000 /; chmod 000 /app /tmp", timeout=20)
    assert "alive" in await bench.sh(box, "echo alive", fresh=True)
    await bench.sh(box, "mv /var/lib /var/gone; ln -s /nowhere /var/lib")
    result = await box.exec("echo never", timeout=20)
    assert result.exit_code == 126 and "no command can run" in result.output


@only_bubblewrap
async def test_a_broken_machine_is_not(bench: Bench) -> None:
    box = await bench.start()
    host: Any = bench.host
    object.__setattr__(host.jail, "bwrap", "/bin/false")
    with pytest.raises(SandboxError, match="cannot run a command"):
        await box.exec("true", timeout=20)


@only_bubblewrap
async def test_other_users_and_networks_need_docker(bench: Bench) -> None:
    box = await bench.start()
    with pytest.raises(SandboxError, match="'postgres' needs Docker"):
        await box.exec("true", timeout=1, user="postgres")
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\n", "g": ""}, gpus=1)
    with pytest.raises(SandboxError, match="environment.gpus = 1 needs Docker: set config.sandbox.kind=docker"):
        await bench.start()
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\n"}, network=Network("public"))
    with pytest.raises(
        SandboxError, match="network_mode = 'public' for the agent needs Docker: set config.sandbox.kind=docker"
    ):
        await bench.start()
    bench.set_task({"x": ""}, docker_image="python:3.12")
    with pytest.raises(SandboxError, match="docker_image = 'python:3.12' needs Docker"):
        await bench.start()


@only_bubblewrap
async def test_close_ends_a_running_command(bench: Bench) -> None:
    box = await bench.start()
    running = asyncio.ensure_future(box.exec("sleep 60", timeout=60))
    await asyncio.sleep(0.3)
    await asyncio.wait_for(box.close(), 5)
    with pytest.raises(SandboxError, match="closed"):
        await running


@only_bubblewrap
async def test_environment_is_built_once(bench: Bench) -> None:
    bench.set_task({"Dockerfile": "FROM reterm-sandbox-base\nRUN date +%N > /stamp; sleep 0.2\n"})
    boxes = await asyncio.gather(*(bench.start() for _ in range(4)))
    assert len({await bench.sh(box, "cat /stamp") for box in boxes}) == 1


def test_host_needs_a_directory(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(SandboxError, match="run"):
        BubblewrapHost(tmp_path / "run", max_concurrent=1)
