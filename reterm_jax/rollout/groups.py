"""Groups of attempts that share a start state, and the recoveries forked from the failures among them.

One step of ReTerm-GRPO rolls out `root` groups (G attempts from each task's start) and then `recovery` groups (K
attempts from each chosen `FailureState`). Seeds are functions of the run's seed, the step and the place in the batch,
so a step that is done again after a crash samples the same attempts.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Sequence

from reterm_jax.agent.episode import AgentLimits, Attempt, FailureState, run_attempt
from reterm_jax.agent.fork_points import ForkAt
from reterm_jax.rollout.live_processes import LiveProcesses
from reterm_jax.rollout.pool import FailurePool, PoolConfig
from reterm_jax.rollout.samplers.base import Sampler
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.sandbox.base import SandboxError, SandboxHost
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tasks.task import Task
from reterm_jax.tokens.chat import ChatFormat


@dataclasses.dataclass(frozen=True)
class Group:
    """Attempts that share one start state: a task's start (`root`) or a `FailureState` (`recovery`)."""

    kind: str
    task_id: str
    attempts: tuple[Attempt, ...]
    state: FailureState | None = None

    @property
    def rewards(self) -> list[float | None]:
        """One per attempt; None where the outcome is not graded (it then leaves the baseline too)."""
        return [a.outcome.reward if a.outcome is not None and a.outcome.graded else None for a in self.attempts]


@dataclasses.dataclass(frozen=True)
class Roller:
    """What attempts need, bound once: sandboxes, sampler, chat format and limits.

    Attributes:
      concurrent: attempts (each with a sandbox) alive at once.
      retry_message: text that opens a recovery, in the tool role.
      temperature: of sampling; the trainer's logprobs must use the same.
      live_processes: what becomes of failure states in which processes were alive.
      fork_at: which state of a failed attempt its recoveries start from, see `agent.fork_points`.
    """

    host: SandboxHost
    sampler: Sampler
    chat: ChatFormat
    limits: AgentLimits
    concurrent: int
    retry_message: str
    temperature: float = 1.0
    live_processes: LiveProcesses = LiveProcesses()
    fork_at: ForkAt = "end"

    async def root_group(
        self, task: Task, size: int, seed: str, gate: asyncio.Semaphore, keep: bool
    ) -> tuple[Group, list[FailureState]]:
        """Runs `size` attempts from the task's start. Returns the group and the failure states of its failures."""

        async def one(index: int):
            name = f"{seed}/{index}"
            return await self.attempt(task, name, gate, start=None, keep=keep)

        results = await asyncio.gather(*(one(i) for i in range(size)))
        states = [state for _, state in results if state is not None]
        return Group("root", task.id, tuple(attempt for attempt, _ in results)), states

    async def recovery_group(
        self, task: Task, state: FailureState, forks: int, seed: str, gate: asyncio.Semaphore, keep: bool = False
    ) -> tuple[Group, list[FailureState]]:
        """Runs `forks` recoveries from one failure state. Returns the group and, with `keep`, the states it left."""
        runs = (self.attempt(task, f"{seed}/{index}", gate, start=state, keep=keep) for index in range(forks))
        results = await asyncio.gather(*runs)
        group = Group("recovery", task.id, tuple(attempt for attempt, _ in results), state)
        return group, [left for _, left in results if left is not None]

    async def attempt(
        self, task: Task, name: str, gate: asyncio.Semaphore, *, start: FailureState | None, keep: bool
    ) -> tuple[Attempt, FailureState | None]:
        """One attempt called `name`, which also seeds it; with `keep`, the failure state that it left, if it failed.

        Where the environment failed (a container or a daemon was lost) it is done again, once.
        """
        attempt, state = await self._attempt(task, name, gate, start=start, keep=keep)
        if attempt.outcome is not None and attempt.outcome.status == "env_error":
            logging.warning("attempt %s: the environment failed (%s); doing it again", name, attempt.outcome.detail)
            attempt, state = await self._attempt(task, name, gate, start=start, keep=keep)
        return attempt, state

    async def _attempt(
        self, task: Task, name: str, gate: asyncio.Semaphore, *, start: FailureState | None, keep: bool
    ) -> tuple[Attempt, FailureState | None]:
        async with gate:
            sandbox = None
            try:
                sandbox = await (self.host.fork(start.snapshot, task) if start else self.host.start(task))
                if start:
                    user = task.config.agent.user
                    await self.live_processes.restore(sandbox, start.snapshot.live_processes, user)
                attempt, snapshot = await run_attempt(
                    task,
                    sandbox,
                    self.sampler,
                    self.chat,
                    self.limits,
                    seed=seed_of(name),
                    start=start,
                    retry_message=self.retry_message if start else None,
                    keep_failure=keep,
                    fork_at=self.fork_at,
                    attempt_id=name,
                    temperature=self.temperature,
                    release=self.host.release,
                )
            except SandboxError as error:
                # A fault of the environment says nothing of the policy: dropped from the group, counted, never 0.
                logging.warning("attempt %s on %s: sandbox fault: %s", name, task.id, error)
                outcome = Outcome(None, "env_error", str(error))
                depth = start.depth + 1 if start else 0
                return Attempt.not_run(name, task.id, outcome, parent=start.id if start else None, depth=depth), None
            finally:
                if sandbox is not None:
                    await sandbox.close()
                await self.sampler.end(name)
        if snapshot is not None and not self.live_processes.usable(snapshot):
            logging.info("attempt %s: no recovery from its state: %s were alive", name, snapshot.live_processes)
            await self.host.release(snapshot)
            snapshot = None
        return attempt, FailureState.of(attempt, snapshot) if snapshot is not None else None


async def roll_step(
    roller: Roller,
    tasks: Sequence[Task],
    *,
    attempts: int,
    states: int,
    forks: int,
    seed: str,
    pool: FailurePool | None = None,
) -> list[Group]:
    """One step's groups: a root group of `attempts` per task, then `forks` recoveries from each of `states` failures.

    With `states` = 0 this is plain GRPO.

    Args:
      pool: holds the failures of earlier steps; those of this step that are not chosen join it. Without one, every
        snapshot made here is released before this returns. The caller ends the pool's step.
    """
    if pool is None:
        async with FailurePool(PoolConfig(), roller.host.release) as pool:
            return await roll_step(roller, tasks, attempts=attempts, states=states, forks=forks, seed=seed, pool=pool)
    gate = asyncio.Semaphore(roller.concurrent)
    roots = await asyncio.gather(
        *(roller.root_group(t, attempts, f"{seed}/root{i}", gate, states > 0) for i, t in enumerate(tasks))
    )
    for task, (_, found) in zip(tasks, roots, strict=True):
        pool.add(task, found)
    chosen = pool.choose(states, f"{seed}/choice") if states else []
    try:
        recoveries = await asyncio.gather(
            *(
                roller.recovery_group(task, state, forks, f"{seed}/fork{i}", gate, pool.keeps(state.depth + 1))
                for i, (task, state) in enumerate(chosen)
            )
        )
    finally:
        await asyncio.gather(*(roller.host.release(state.snapshot) for _, state in chosen))
    for (task, _), (_, found) in zip(chosen, recoveries, strict=True):
        pool.add(task, found)
    groups = [group for group, _ in recoveries]
    pool.rates.update((group.task_id, group.rewards) for group in groups)
    return [group for group, _ in roots] + groups
