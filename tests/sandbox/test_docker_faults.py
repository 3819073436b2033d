"""Faults of containers and daemons: waited for where that helps, else an error of the environment, never a verdict."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from docker_proxy import DAEMON, DockerProxy
from sandbox_bench import Bench, make_task, why_not

from reterm_jax.sandbox import SandboxError, SandboxHost, SnapshotLost, make_host
from reterm_jax.sandbox.reaper import run_label
from reterm_jax.tasks.config import VerifierConfig
from reterm_jax.tasks.verifier import verify

only_docker = pytest.mark.parametrize("bench", ["docker"], indirect=True)


@pytest.fixture
def proxies(tmp_path: Path) -> list[DockerProxy]:
    if reason := why_not("docker"):
        pytest.skip(reason)
    if not Path(DAEMON).exists():
        pytest.skip(f"the daemon's socket is not {DAEMON}")
    return [DockerProxy(tmp_path / f"{name}.sock") for name in "ab"]


def host_at(proxies: list[DockerProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SandboxHost:
    monkeypatch.setenv("DOCKER_HOST", ",".join(proxy.url for proxy in proxies))
    return make_host("docker", tmp_path / "run", max_concurrent=8, run_id="test")


def left(run_dir: Path) -> int:
    from reterm_jax.sandbox.dockerimage import connect

    client, _ = connect(url=f"unix://{DAEMON}")
    filters = {"label": [f"reterm.run_dir={run_label(run_dir)}"]}
    return len(client.containers.list(all=True, filters=filters)) + len(client.images.list(filters=filters))


async def test_a_daemon_that_is_away_is_waited_for(
    proxies: list[DockerProxy],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    host = host_at(proxies[:1], tmp_path, monkeypatch)
    task = make_task(tmp_path)
    try:
        box = await host.start(task)
        running = asyncio.ensure_future(box.exec("sleep 5", timeout=20))
        await asyncio.sleep(0.5)
        proxies[0].cut()
        with pytest.raises(SandboxError):  # it may have done half its work: not repeated
            await running
        starting = [asyncio.ensure_future(host.start(task)) for _ in range(2)]
        await asyncio.sleep(1.5)
        assert not any(start.done() for start in starting)
        proxies[0].mend()
        other, third = await asyncio.gather(*starting)
        await third.close()
        said = [record.message for record in caplog.records if "the Docker daemon is" in record.message]
        assert len(said) == 2 and "waited for, 60 s" in said[0] and said[1].endswith("is back"), "once, not by each"
        assert (await other.exec("echo there", timeout=20)).output == "there\n"
        proxies[0].drop()
        await asyncio.sleep(0.2)
        assert (await other.exec("echo again", timeout=20)).output == "again\n", "nothing ran: another connection"
        running = asyncio.ensure_future(other.exec("sleep 5", timeout=20))
        await asyncio.sleep(0.5)
        proxies[0].drop()
        with pytest.raises(SandboxError, match="connection to its Docker daemon broke|Connection aborted"):
            await running  # that is, the command still runs
        proxies[0].delay = 0.2
        assert (await other.exec("echo slow", timeout=20)).output == "slow\n"
    finally:
        proxies[0].delay = 0.0
        await host.close()
    assert left(tmp_path / "run") == 0


async def test_several_daemons_share_and_a_lost_one_is_taken_out(
    proxies: list[DockerProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("reterm_jax.sandbox.dockerhost.PATIENCE", 1.0)
    host: Any = host_at(proxies, tmp_path, monkeypatch)
    task = make_task(tmp_path)
    try:
        boxes = [await host.start(task) for _ in range(2)]
        assert [part.load for part in host._hosts] == [1, 1]
        snapshots = [await box.snapshot() for box in boxes]
        fork = await host.fork(snapshots[1], task)
        assert [part.load for part in host._hosts] == [1, 2]
        proxies[0].cut()
        third = await host.start(task)  # its turn would be the first's
        assert (await third.exec("echo on", timeout=20)).output == "on\n"
        assert (await fork.exec("echo on", timeout=20)).output == "on\n"
        with pytest.raises(SnapshotLost, match="lost"):
            await host.fork(snapshots[0], task)
        proxies[1].cut()
        with pytest.raises(SnapshotLost, match="lost"):  # nothing was started there since
            await host.fork(snapshots[1], task)
        with pytest.raises(SandboxError, match="none of the 2 Docker daemons"):
            await host.start(task)
        for proxy in proxies:
            proxy.mend()
    finally:
        await host.close()
    assert left(tmp_path / "run") == 0


async def test_a_lost_snapshot_takes_no_daemon_out(
    proxies: list[DockerProxy], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor does another fault of a daemon that did answer, should it be away for a moment after that."""
    host: Any = host_at(proxies, tmp_path, monkeypatch)
    task = make_task(tmp_path)
    try:
        box = await host.start(task)
        snapshot = await box.snapshot()
        await box.close()
        await host.release(snapshot)
        proxies[0].cut()
        with pytest.raises(SnapshotLost, match="not held by this host"):
            await host.fork(snapshot, task)

        async def start(task: Any) -> None:
            raise SandboxError("the image cannot be built")

        with monkeypatch.context() as patch, pytest.raises(SandboxError, match="cannot be built"):
            patch.setattr(host._hosts[0], "start", start)
            await host.start(task)
        proxies[0].mend()
        await (await host.start(task)).close()
        assert host._hosts[0].load == 0 and len(host._lost) == 0
    finally:
        await host.close()


@only_docker
async def test_a_killed_container_is_no_verdict(bench: Bench) -> None:
    (bench.task.path / "tests").mkdir()
    (bench.task.path / "tests" / "test.sh").write_text("#!/bin/bash\nsleep 3; echo 0 > /logs/verifier/reward.txt\n")
    bench.task.tests_dir = bench.task.path / "tests"
    bench.task.config = dataclasses.replace(bench.task.config, verifier=VerifierConfig(timeout_sec=20.0))
    box, other = await bench.start(), await bench.start()
    running = asyncio.ensure_future(box.exec("sleep 20", timeout=30))
    judging = asyncio.ensure_future(verify(other, bench.task))
    await asyncio.sleep(1.5)
    for sandbox in (box, other):
        subprocess.run(["docker", "kill", sandbox.id], check=True, capture_output=True)
    with pytest.raises(SandboxError, match="has ended|is not running"):
        await running
    outcome = await judging
    assert (outcome.status, outcome.reward) == ("env_error", None), outcome


@only_docker
async def test_a_missing_image_is_an_error_of_the_environment(bench: Bench) -> None:
    box = await bench.start()
    snapshot = await box.snapshot()
    subprocess.run(["docker", "rmi", "-f", f"reterm-snapshot:{snapshot.id}"], check=True, capture_output=True)
    with pytest.raises(SnapshotLost, match=f"task example.*{snapshot.id}"):
        await bench.host.fork(snapshot, bench.task)
    host: Any = bench.host
    assert host._slots._value == 3, "the failed fork holds no place"
    assert await bench.sh(await bench.start(), "echo on") == "on\n"


@pytest.mark.parametrize("kind", ["bubblewrap", "docker"])
async def test_the_oldest_snapshots_go_where_the_disk_budget_ends(kind: str, tmp_path: Path) -> None:
    if reason := why_not(kind):
        pytest.skip(reason)
    host = make_host(kind, tmp_path / "run", max_concurrent=2, run_id="test", snapshot_mb=25)  # type: ignore[arg-type]
    task = make_task(tmp_path)
    try:
        box = await host.start(task)
        snapshots = []
        for _ in range(3):
            await box.exec("head -c 10M /dev/urandom > /app/state", timeout=20)
            snapshots.append(await box.snapshot())
        await box.close()
        with pytest.raises(SnapshotLost, match=r"given up for newer ones.*25 MB.*snapshot_mb"):
            await host.fork(snapshots[0], task)
        for snapshot in snapshots[1:]:
            fork = await host.fork(snapshot, task)
            assert (await fork.exec("wc -c < state", timeout=20)).output == "10485760\n"
            await fork.close()
    finally:
        await host.close()


@only_docker
async def test_reap_removes_dead_runs_and_no_live_one(bench: Bench) -> None:
    from test_reaper import docker_things, start_run

    living = await bench.start()
    process, dead = start_run(bench)
    process.send_signal(signal.SIGKILL)
    process.wait()
    command = [sys.executable, "-m", "reterm_jax.cli.reap", str(bench.run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == f"directories in {bench.run_dir}: removed those of {dead}"
    assert dead in done.stdout.splitlines()[1] and docker_things(bench.run_dir) == 1
    assert await bench.sh(living, "echo untouched") == "untouched\n"
