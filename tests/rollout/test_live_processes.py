"""States in which processes were alive: which are used, and what runs in their forks."""

from __future__ import annotations

import asyncio

import pytest

from reterm_jax.rollout.live_processes import LiveProcesses
from reterm_jax.sandbox import SandboxError, SandboxUnavailable, Snapshot, make_host
from reterm_jax.tasks import families

QUIET = Snapshot("s", "docker", "host")
BUSY = Snapshot("s", "docker", "host", ("/bin/sleep 85.25", "tail -f /dev/null"))


@pytest.mark.parametrize(
    "policy,usable",
    [
        (LiveProcesses("keep"), True),
        (LiveProcesses("skip"), False),
        (LiveProcesses("restart-listed", ("sleep",)), False),
        (LiveProcesses("restart-listed", ("sleep", "tail")), True),
    ],
)
def test_which_states_are_used(policy: LiveProcesses, usable: bool) -> None:
    assert policy.usable(QUIET) and policy.usable(BUSY) == usable


def test_bad_policies() -> None:
    with pytest.raises(ValueError, match="'stop'"):
        LiveProcesses("stop")  # type: ignore[arg-type]
    for bad in (("keep", ("sleep",)), ("restart-listed", ())):
        with pytest.raises(ValueError, match="restart"):
            LiveProcesses(*bad)


def test_listed_processes_run_again_in_each_fork(tmp_path) -> None:
    task = families.generate(tmp_path / "tasks", split="train", per_family=1, seed=0, families=("write",))[0]
    policy = LiveProcesses("restart-listed", ("sleep", "sh"))

    async def play() -> None:
        try:
            host = make_host("docker", tmp_path / "run", max_concurrent=2, run_id="test")
        except SandboxUnavailable as error:
            pytest.skip(str(error))
        try:
            box = await host.start(task)
            say = """sh -c 'while :; do echo "$A  $PWD" > /tmp/said; sleep 1; done' &"""
            await box.exec(f"cd /tmp; export A=1; {say}", timeout=9)
            snapshot = await box.snapshot()
            assert policy.usable(snapshot)
            await box.exec("rm /tmp/said", timeout=9)
            fork = await host.fork(snapshot, task)
            await fork.exec("rm -f /tmp/said", timeout=9)
            await policy.restore(fork, [line for line in snapshot.live_processes if line.startswith("sh")], None)
            assert (await fork.exec("cat /tmp/said", timeout=9)).output == "1  /tmp\n"
            with pytest.raises(SandboxError, match="gone-program"):
                await policy.restore(fork, ["gone-program"], None)
        finally:
            await host.close()

    asyncio.run(play())
