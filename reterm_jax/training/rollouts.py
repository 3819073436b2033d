"""Where the trainer's groups come from: this process."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, Self

from reterm_jax.rollout.groups import Group, Roller
from reterm_jax.rollout.pool import FailurePool, PoolConfig
from reterm_jax.rollout.samplers.jax import JaxSampler
from reterm_jax.rollout.scheduler import Batch, Schedule, Scheduler
from reterm_jax.rollout.store import GroupStore
from reterm_jax.tasks.task import Task


class Rollouts(AbstractAsyncContextManager["Rollouts"], Protocol):
    """What the RL loop asks for."""

    async def publish(self, step: int, params: Any) -> None:
        """Has `params`, the policy after `step` steps, sample from here on. They may be donated afterwards."""
        ...

    async def batch(self, step: int) -> Batch:
        """The groups to update the policy of `step` with."""
        ...

    async def validate(self, tasks: Sequence[Task], attempts: int, seed: str) -> list[Group]:
        """Groups on these tasks by the policy that was published last, which nothing is trained on."""
        ...

    def acknowledge(self, step: int) -> None:
        """A checkpoint of `step` is on disk: batches before it are not asked for again."""
        ...

    def record(self) -> dict[str, Any]:
        """What belongs into the checkpoint."""
        ...


class LocalRollouts:
    """Samples in this process, with the trainer's own parameters, between its updates."""

    def __init__(self, scheduler: Scheduler, roller: Roller, sampler: JaxSampler) -> None:
        self._scheduler, self._roller, self._sampler = scheduler, roller, sampler

    async def __aenter__(self) -> Self:
        await self._scheduler.__aenter__()
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._scheduler.__aexit__(*exc_info)
        self._scheduler.store.close()

    async def publish(self, step: int, params: Any) -> None:
        await self._sampler.idle()  # the last attempts may have ended at their time limit, in the middle of a call
        self._sampler.update(params, step)

    async def batch(self, step: int) -> Batch:
        self._sampler.tokens_sampled = 0
        # Not before: what comes between (a validation) has the machine for itself.
        self._scheduler.serve(step)
        batch = await self._scheduler.batch(step)
        facts = batch.facts | {"rollout/sampled_tokens": self._sampler.tokens_sampled}
        return dataclasses.replace(batch, facts=facts)

    async def validate(self, tasks: Sequence[Task], attempts: int, seed: str) -> list[Group]:
        gate = asyncio.Semaphore(self._roller.concurrent)
        groups = (self._roller.root_group(task, attempts, f"{seed}/{task.id}", gate, False) for task in tasks)
        return [group for group, _ in await asyncio.gather(*groups)]

    def acknowledge(self, step: int) -> None:
        self._scheduler.acknowledge(step)

    def record(self) -> dict[str, Any]:
        return {"waiting_states": len(self._scheduler.pool)}


def local_rollouts(
    schedule: Schedule,
    pool: PoolConfig,
    tasks: Sequence[Task],
    roller: Roller,
    sampler: JaxSampler,
    path: Path,
    *,
    first_step: int,
    saved: Mapping[str, Any] | None = None,
    identity: Mapping[str, Any] | None = None,
    log: Callable[[str], None] = print,
) -> LocalRollouts:
    """
    Args:
      path: of the store.
      saved: the metadata of the checkpoint that training resumes from.
      identity: see `GroupStore`.
    """
    saved = saved or {}
    if saved.get("waiting_states"):
        log(
            f"rl: {saved['waiting_states']} failure states waited when the run was cut off; their snapshots went with "
            "it, so the pool begins empty"
        )
    states = FailurePool(pool, roller.release)
    store = GroupStore(path, identity or {})
    scheduler = Scheduler(schedule, tasks, roller, states, store, first_step=first_step)
    return LocalRollouts(scheduler, roller, sampler)
