"""Rollouts without sandboxes or samplers: a roller whose groups are functions of their seeds."""

import asyncio
from types import SimpleNamespace

import numpy as np

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.agent.turns import Turn
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.live_processes import LiveProcesses
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.sandbox.base import ExecResult, Snapshot
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tokens.transcript import Span, Transcript

LIMITS = SimpleNamespace(command_timeout=1.0, output_limit=99)


def task(name):
    return SimpleNamespace(id=name, config=SimpleNamespace(agent=SimpleNamespace(user=None)))


def attempt(name, task_id, reward, version=0, prefix=(), **fields):
    """One turn that ran `ls`."""
    rng = np.random.default_rng(seed_of(name))
    ids = [int(i) for i in rng.integers(0, 32, 9)]
    opening = Span("observation" if prefix else "prompt", tuple(ids[:4]))
    own = Span("policy", tuple(ids[4:]), tuple(rng.uniform(-4, -3, 5)), version)
    transcript = Transcript([*prefix, opening, own])
    outcome = Outcome.from_reward(reward) if reward is not None else Outcome(None, "env_error", "lost")
    fields = {"prefix_len": len(transcript) - 9, "version": version, "turns": [Turn("", "ls", "a b", 0)]} | fields
    return Attempt(name, task_id, transcript, outcome=outcome, ended="submit", **fields)


class MadeUpRoller:
    """Also its sandbox host. `snapshots` are those that were made and not released."""

    def __init__(self, concurrent=2):
        self.concurrent, self.limits, self.live_processes = concurrent, LIMITS, LiveProcesses()
        self.host, self.version = self, 0
        self.begun, self.snapshots, self.listing = [], set(), "a b"
        self.holds = {}  # seeds of groups to the event that they wait for

    def reward(self, seed, index):
        return float(index % 2)

    async def _run(self, seed, gate, size, task_id, state):
        self.begun.append(seed)
        if seed in self.holds:
            await self.holds[seed].wait()

        async def one(index):
            async with gate:
                await asyncio.sleep(0)
                prefix = state.transcript.spans if state else ()
                fields = {"parent": state.id, "depth": state.depth + 1} if state else {}
                return attempt(f"{seed}/{index}", task_id, self.reward(seed, index), self.version, prefix, **fields)

        return tuple(await asyncio.gather(*(one(index) for index in range(size))))

    def _left(self, attempts):
        failed = [a for a in attempts if a.outcome.graded and not a.solved]
        self.snapshots |= {a.id for a in failed}
        return [FailureState.of(a, Snapshot(a.id, "bubblewrap", "host")) for a in failed]

    async def root_group(self, task, size, seed, gate, keep):
        attempts = await self._run(seed, gate, size, task.id, None)
        return Group("root", task.id, attempts), self._left(attempts) if keep else []

    async def recovery_group(self, task, state, forks, seed, gate, keep=False):
        attempts = await self._run(seed, gate, forks, task.id, state)
        return Group("recovery", task.id, attempts, state), self._left(attempts) if keep else []

    async def start(self, task):
        return _Sandbox(self)

    async def release(self, snapshot):
        self.snapshots.discard(snapshot.id)


class _Sandbox:
    def __init__(self, host):
        self._host = host

    async def exec(self, command, **_):
        return ExecResult(self._host.listing, 0, 0.1, False)

    async def snapshot(self):
        name = f"again{len(self._host.snapshots)}"
        self._host.snapshots.add(name)
        return Snapshot(name, "bubblewrap", "host")

    async def close(self):
        pass
