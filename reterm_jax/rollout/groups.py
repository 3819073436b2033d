"""Groups of attempts that share a start state: a task's start, or the state that a failed attempt left.

What an attempt is called also seeds it, so that a group that is rolled again after a crash samples the same attempts.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from typing import TypeVar

from reterm_jax.agent.episode import AgentLimits, Attempt, FailureState, run_attempt
from reterm_jax.agent.fork_points import ForkAt
from reterm_jax.rollout.live_processes import LiveProcesses
from reterm_jax.rollout.restore import Forks
from reterm_jax.rollout.samplers.base import Sampler
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.sandbox.base import SandboxError, SandboxHost, Snapshot
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tasks.task import Task
from reterm_jax.tokens.chat import ChatFormat

T = TypeVar("T")

_MAX_AWAY = 1.0  # seconds without a sampler that an attempt's time limit is taken to include
# What bounds the attempts that are alive: a semaphore, or something fairer. Entered by many at once.
Gate = AbstractAsyncContextManager


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

    @property
    def has_spread(self) -> bool:
        """Whether two graded attempts differ: only then is there something to learn from the group alone."""
        return len({reward for reward in self.rewards if reward is not None}) > 1


@dataclasses.dataclass(frozen=True)
class Roller:
    """What attempts need, bound once: sandboxes, sampler, chat format and limits.

    Attributes:
      concurrent: attempts (each with a sandbox) alive at once.
      retry_message: text that opens a recovery, in the tool role.
      temperature: of sampling; the trainer's logprobs must use the same.
      live_processes: what becomes of failure states in which processes were alive.
      fork_at: which state of a failed attempt its recoveries start from, see `agent.fork_points`.
      spares: attempts that may make up for those of a group that were not graded; 0 leaves the group smaller.
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
    spares: int = 0

    async def root_group(
        self, task: Task, size: int, seed: str, gate: Gate, keep: bool
    ) -> tuple[Group, list[FailureState]]:
        """Runs `size` attempts from the task's start. Returns the group and the failure states of its failures."""
        attempts, states = await self._attempts(task, size, seed, gate, start=None, keep=keep)
        return Group("root", task.id, attempts), states

    async def recovery_group(
        self, task: Task, state: FailureState, forks: int, seed: str, gate: Gate, keep: bool = False
    ) -> tuple[Group, list[FailureState]]:
        """Runs `forks` recoveries from one failure state. Returns the group and, with `keep`, the states it left."""
        async with Forks(self, task, state) as sandboxes:
            attempts, left = await self._attempts(task, forks, seed, gate, start=state, keep=keep, forks=sandboxes)
        return Group("recovery", task.id, attempts, state), left

    async def release(self, snapshot: Snapshot) -> None:
        """Has the host forget a snapshot. One that cannot be removed now goes with the host: no reason to stop."""
        try:
            await self.host.release(snapshot)
        except SandboxError as error:
            logging.warning("snapshot %s is left for now: %s", snapshot.id, error)

    async def _attempts(
        self,
        task: Task,
        size: int,
        seed: str,
        gate: Gate,
        *,
        start: FailureState | None,
        keep: bool,
        forks: Forks | None = None,
    ) -> tuple[tuple[Attempt, ...], list[FailureState]]:
        results = await until_good(
            lambda index: self.attempt(task, f"{seed}/{index}", gate, start=start, keep=keep, forks=forks),
            lambda result: result[0].outcome is not None and result[0].outcome.graded,
            wanted=size,
            spares=self.spares,
        )
        return tuple(attempt for attempt, _ in results), [state for _, state in results if state is not None]

    async def attempt(
        self,
        task: Task,
        name: str,
        gate: Gate,
        *,
        start: FailureState | None,
        keep: bool,
        forks: Forks | None = None,
    ) -> tuple[Attempt, FailureState | None]:
        """One attempt called `name`, which also seeds it; with `keep`, the failure state that it left, if it failed.

        Where the environment failed (a container or a daemon was lost) it is done again, once; not where the state is
        lost for good.

        Args:
          start: the state that it recovers from, if it does.
          forks: sandboxes in that state, which other recoveries share; None: of its own.
        """
        if start is not None and forks is None:
            async with Forks(self, task, start) as own:
                return await self.attempt(task, name, gate, start=start, keep=keep, forks=own)
        attempt, state = await self._attempt(task, name, gate, start, keep, forks)
        failed = attempt.outcome is not None and attempt.outcome.status == "env_error"
        if failed and not (forks is not None and forks.ended):
            logging.warning("attempt %s: the environment failed (%s); doing it again", name, attempt.outcome.detail)
            if forks is not None:
                forks.doubt()
            attempt, state = await self._attempt(task, name, gate, start, keep, forks)
        return attempt, state

    async def _attempt(
        self, task: Task, name: str, gate: Gate, start: FailureState | None, keep: bool, forks: Forks | None
    ) -> tuple[Attempt, FailureState | None]:
        async with gate:
            sandbox = None
            try:
                sandbox = await (forks.sandbox() if forks else self.host.start(task))
                if start:
                    user = task.config.agent.user
                    await self.live_processes.restore(sandbox, start.snapshot.live_processes, user)
                away = _away_seconds(self.sampler)
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
                    release=self.release,
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
        away = _away_seconds(self.sampler) - away
        if attempt.ended == "time_limit" and away > _MAX_AWAY and not attempt.solved:
            if snapshot is not None:
                await self.release(snapshot)
            fault = f"out of time, of which the sampler was away for {away:.0f} s"
            return dataclasses.replace(attempt, outcome=Outcome(None, "env_error", fault)), None
        if snapshot is not None and not self.live_processes.usable(snapshot):
            logging.info("attempt %s: no recovery from its state: %s were alive", name, snapshot.live_processes)
            await self.release(snapshot)
            snapshot = None
        return attempt, FailureState.of(attempt, snapshot) if snapshot is not None else None


def _away_seconds(sampler: Sampler) -> float:
    return getattr(sampler, "away_seconds", 0.0)


async def until_good(
    run: Callable[[int], Awaitable[T]], good: Callable[[T], bool], *, wanted: int, spares: int
) -> list[T]:
    """Results of run(0), run(1), ... in this order: as many as it takes until `wanted` are good, side by side.

    At most `wanted + spares` are run. Which ones does not depend on how long each takes: one more is begun for each
    that is not good, until the first so many hold `wanted` good ones.
    """
    results: dict[int, T] = {}
    indices = iter(range(wanted + spares))

    async def lane() -> None:
        for index in indices:
            results[index] = await run(index)
            if good(results[index]):
                return

    lanes = [asyncio.create_task(lane()) for _ in range(wanted)]
    try:
        await asyncio.gather(*lanes)
    except BaseException:
        for task in lanes:
            task.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
        raise
    return [results[index] for index in sorted(results)]
