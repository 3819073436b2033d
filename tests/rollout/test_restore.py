"""Failure states whose snapshots are lost, on a host that only counts."""

import asyncio
import dataclasses
import functools
from types import SimpleNamespace

import made_up
import pytest

from reterm_jax.agent.attempt import FailureState
from reterm_jax.rollout import groups
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.restore import Forks
from reterm_jax.sandbox.base import ExecResult, SandboxError, Snapshot, SnapshotLost


class Host:
    """`lost` are the snapshots that cannot be forked, `broken` those in whose forks no command runs."""

    def __init__(self, said="a b"):
        self.said, self.lost, self.broken = said, {"first"}, set()
        self.started, self.made, self.released, self.open = 0, [], [], 0
        self.close_fault = None

    async def start(self, task):
        self.started += 1
        return self._sandbox()

    async def fork(self, snapshot, task):
        await asyncio.sleep(0)
        if snapshot.id in self.lost:
            raise SnapshotLost(f"{snapshot.id} is gone")
        return self._sandbox(snapshot.id)

    async def release(self, snapshot):
        self.released.append(snapshot.id)

    def _sandbox(self, origin=None):
        self.open += 1

        async def exec(command, **_):
            if origin in self.broken:
                raise SnapshotLost(f"{origin} is not complete")
            return ExecResult(self.said, 0, 0.1, False)

        async def snapshot():
            self.made.append(f"again{len(self.made)}")
            return Snapshot(self.made[-1], "docker", "host")

        async def close():
            self.open -= 1
            if self.close_fault:
                raise self.close_fault

        return SimpleNamespace(exec=exec, snapshot=snapshot, close=close, origin=origin)


def in_a_loop(test):
    """Runs an async test."""

    @functools.wraps(test)
    def run(*args, **kwargs):
        asyncio.run(test(*args, **kwargs))

    return run


def forks_of(host, **fields):
    async def end(name):
        pass

    roller = Roller(host, SimpleNamespace(end=end), None, made_up.LIMITS, 4, "again", spares=2)
    state = FailureState.of(made_up.attempt("failed", "t", 0.0), Snapshot("first", "docker", "host"))
    state = dataclasses.replace(state, **fields)
    return roller, state, Forks(roller, made_up.task("t"), state)


@in_a_loop
async def test_a_state_that_cannot_be_made_again_is_tried_once():
    """Not for every recovery, its second try and its spares."""
    host = Host(said="something else")
    roller, state, _ = forks_of(host)
    group, _ = await roller.recovery_group(made_up.task("t"), state, 8, "seed", asyncio.Semaphore(4))
    assert host.started == 1 and host.open == 0
    assert {(a.outcome.status, a.outcome.detail) for a in group.attempts} == {("env_error", "first is gone")}


@in_a_loop
async def test_what_is_made_again_and_lost_again_is_released():
    host = Host()
    _, _, forks = forks_of(host)
    async with forks:
        assert (await forks.sandbox()).origin == "again0"
        host.lost.add("again0")
        many = await asyncio.gather(*(forks.sandbox() for _ in range(3)))
        assert {sandbox.origin for sandbox in many} == {"again1"} and host.released == ["again0"]
    assert host.released == host.made == ["again0", "again1"]


@pytest.mark.parametrize("fault", [SandboxError("the daemon is slow"), asyncio.CancelledError()])
@in_a_loop
async def test_no_snapshot_is_left_of_a_sandbox_that_does_not_close(fault):
    host = Host()
    _, _, forks = forks_of(host)
    host.close_fault = fault
    with pytest.raises(SnapshotLost if isinstance(fault, SandboxError) else asyncio.CancelledError):
        async with forks:
            await forks.sandbox()
    assert host.made == host.released == ["again0"]


@in_a_loop
async def test_a_state_that_is_not_complete_is_made_again_once_a_recovery_met_that():
    host = Host()
    host.lost, host.broken = set(), {"first"}
    _, _, forks = forks_of(host)
    async with forks:
        assert (await forks.sandbox()).origin == "first"  # no command has run
        forks.doubt()
        assert (await forks.sandbox()).origin == "again0"
    assert host.started == 1 and host.open == 2


@in_a_loop
async def test_recoveries_from_a_state_that_is_not_complete_are_done_again_from_one_that_is(monkeypatch):
    async def run_attempt(task, sandbox, *_, attempt_id, **__):
        try:
            await sandbox.exec("ls")
        except SandboxError:
            return made_up.attempt(attempt_id, task.id, None), None
        return made_up.attempt(attempt_id, task.id, 1.0), None

    monkeypatch.setattr(groups, "run_attempt", run_attempt)
    host = Host()
    host.lost, host.broken = set(), {"first"}
    roller, state, _ = forks_of(host)
    group, _ = await roller.recovery_group(made_up.task("t"), state, 4, "seed", asyncio.Semaphore(4))
    assert group.rewards == [1.0] * 4 and host.started == 1 and host.released == ["again0"] and host.open == 0
