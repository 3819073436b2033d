"""Which groups are rolled, and when: the batches of the trainer's steps, as far ahead as staleness allows.

The batch of step s is what the trainer updates version s with: root groups on the tasks of the step, and recovery
groups from the failures among them. It is begun when version s - max_staleness samples, so that at most
(max_staleness + 1) batches are under way or waiting, and no token is older than that. Recoveries of one batch run
beside the roots of the next; where sandboxes are short the older batch has them first. The choice of failure states
waits for the batch before, because both draw on one pool: what is rolled does not depend on how long anything takes.

Finished groups go to the store. A scheduler that is killed and begun again takes from there what it had, makes lost
failure states again (see `restore`), and rolls the rest under the same seeds.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Self

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.rollout.gate import PriorityGate
from reterm_jax.rollout.groups import Group, Roller, until_good
from reterm_jax.rollout.pool import FailurePool, RecoveryRates
from reterm_jax.rollout.restore import restore_state
from reterm_jax.rollout.rounds import Rounds
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.rollout.store import GroupStore
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tasks.task import Task

Rolled = tuple[Group, list[FailureState]]


class ScheduleError(RuntimeError):
    """A batch that is asked for and will not come."""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """
    Attributes:
      seed: of the run; with the step and a group's place it gives the seed of each attempt.
      steps: of the trainer.
      tasks, attempts: root groups a step (a round, with `step_tokens`), and attempts in each.
      states, forks: failure states a step or round, and recoveries from each; states = 0 is plain GRPO.
      max_staleness: versions that sampled tokens may be older than the one that trains on them.
      refills: groups that may be rolled beside `tasks`, and beside `states`, to make up for groups without spread.
        Those stay in the batch, where they count in the metrics and teach nothing.
      step_tokens: tokens sampled in a step, on average, in as many rounds as it takes; 0: one round. See `Rounds`.
    """

    seed: int
    steps: int
    tasks: int
    attempts: int
    states: int
    forks: int
    max_staleness: int = 0
    refills: int = 0
    step_tokens: int = 0

    def __post_init__(self) -> None:
        for field in ("max_staleness", "refills", "step_tokens"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")


@dataclasses.dataclass(frozen=True)
class Batch:
    """The groups of one step, roots first, and numbers about how they came to be."""

    step: int
    groups: list[Group]
    facts: dict[str, float]


class Scheduler:
    """Rolls the batches from `first_step` on. Use it as an async context manager; leaving it ends what runs.

    Args:
      tasks: that root groups are on; see `choose_tasks`.
      pool: of failure states; owned from here on.
      store: where batches before `first_step` are acknowledged at once. Raises StoreError.
      on_group: called with each group that was rolled.
    """

    def __init__(
        self,
        schedule: Schedule,
        tasks: Sequence[Task],
        roller: Roller,
        pool: FailurePool,
        store: GroupStore,
        *,
        first_step: int,
        on_group: Callable[[Group], None] = lambda group: None,
    ) -> None:
        self.schedule, self.pool, self.store = schedule, pool, store
        self._tasks, self._roller, self._on_group = tasks, roller, on_group
        self._by_id = {task.id: task for task in tasks}
        self.gate = PriorityGate(roller.concurrent)
        self._batches: dict[int, asyncio.Task[list[Group]]] = {}
        store.acknowledge(first_step)
        self.rounds = Rounds(schedule.step_tokens)
        self._remember(first_step - 1)
        self._next = first_step
        self._allowed = asyncio.Event()  # replaced whenever a batch is begun

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        running = list(self._batches.values())
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._batches.clear()
        await self.pool.__aexit__(*exc_info)

    @property
    def running(self) -> list[int]:
        """Steps whose batches are under way."""
        return sorted(step for step, task in self._batches.items() if not task.done())

    def serve(self, version: int) -> None:
        """Says that `version` samples from now on: begins what may be rolled with it."""
        while self._next < min(version + self.schedule.max_staleness + 1, self.schedule.steps):
            self._begin(self._next)
            self._next += 1
        self._allowed.set()
        self._allowed = asyncio.Event()

    async def batch(self, step: int) -> Batch:
        """The batch of `step`, when it is whole. Raises what `whole` raises."""
        groups = await self._rolled(step)
        keys, facts = self._whole(step)
        return Batch(step, groups or [self.store.group(step, key) for key in keys], facts)

    async def whole(self, step: int) -> tuple[list[str], dict[str, float]]:
        """The keys of a batch's groups in the store, and its facts, when it is whole.

        Raises ScheduleError where `step` was consumed, or lies behind the end of training; and whatever ended the
        batch: it is begun again when it is asked for again.
        """
        await self._rolled(step)
        return self._whole(step)

    def acknowledge(self, step: int) -> None:
        """The trainer has a checkpoint of `step`: batches before it are not asked for again. Raises StoreError."""
        self.store.acknowledge(step)

    def _whole(self, step: int) -> tuple[list[str], dict[str, float]]:
        found = self.store.finished(step)
        if found is None:
            raise ScheduleError(f"the batch of step {step} is gone: a checkpoint consumed it")
        return found[0], found[1]["metrics"]

    async def _rolled(self, step: int) -> list[Group] | None:
        """The batch's groups, or None where only the store has them."""
        if not self.store.acknowledged <= step < self.schedule.steps:
            raise ScheduleError(
                f"no batch for step {step}: those before {self.store.acknowledged} were consumed by a checkpoint, and "
                f"training ends at step {self.schedule.steps}"
            )
        while step >= self._next and self.store.finished(step) is None:
            await self._allowed.wait()
        if step not in self._batches:
            if self.store.finished(step) is not None:
                return None
            self._begin(step)
        task = self._batches[step]
        try:
            return await asyncio.shield(task)
        finally:
            if task.done():
                self._batches.pop(step, None)

    def _begin(self, step: int) -> None:
        before = self._batches.get(step - 1)
        self._batches[step] = asyncio.create_task(self._roll(step, before), name=f"batch-{step}")

    async def _roll(self, step: int, before: asyncio.Task[Any] | None) -> list[Group]:
        schedule, pool = self.schedule, self.pool
        known = self.store.finished(step)
        if known is not None:
            await _ended(before)
            self._remember(step)
            return [self.store.group(step, key) for key in known[0]]
        seed, keys, refilled = f"{schedule.seed}/step{step}", list[str](), 0

        async def roll(index: int, seed: str) -> list[Group]:
            nonlocal refilled
            rolled, more = await self._round(
                step, index, seed, f"round{index}/" if schedule.step_tokens else "", before
            )
            keys.extend(rolled)
            refilled += more
            return list(rolled.values())

        if schedule.step_tokens:
            await _ended(before)  # the budget is that of the run so far
            groups = await self.rounds.roll(step, seed, roll)
        else:
            groups = await roll(step, seed)
        await pool.end_step(step + 1)
        metrics = {
            "recovery/waiting_states": len(pool),
            "recovery/dropped_states": pool.dropped,
            "rollout/refilled_groups": refilled,
        }
        facts = {"metrics": metrics, "recovery_rates": pool.rates.to_dict(), "rounds": self.rounds.to_dict()}
        self.store.finish(step, keys, facts)
        return groups

    def _remember(self, step: int) -> None:
        """Goes on from what the batch of `step` left, if the store knows it."""
        known = self.store.finished(step)
        if known is not None:
            self.pool.rates = RecoveryRates(self.pool.config.target_rate, known[1]["recovery_rates"])
            self.rounds = Rounds(self.schedule.step_tokens, known[1]["rounds"])

    async def _round(
        self, step: int, index: int, seed: str, prefix: str, before: asyncio.Task[Any] | None
    ) -> tuple[dict[str, Group], int]:
        """Root groups on the tasks of round `index` and recoveries from their failures, by key, and how many of them
        make up for groups without spread."""
        schedule, pool = self.schedule, self.pool
        tasks = choose_tasks(self._tasks, schedule.tasks, schedule.seed, index)
        spare = [task for task in _shuffled(self._tasks, f"{seed}/spares") if task not in tasks][: schedule.refills]
        tasks = [*tasks, *spare]
        roots = await until_good(
            lambda index: self._root(step, tasks[index], f"{seed}/root{index}", f"{prefix}root{index}"),
            _has_spread,
            wanted=schedule.tasks,
            spares=len(spare),
        )
        await _ended(before)
        for task, (_, found) in zip(tasks, roots, strict=False):
            pool.add(task, found)
        chosen = pool.choose(schedule.states + schedule.refills, f"{seed}/choice") if schedule.states else []
        wanted = len(chosen) if pool.config.choose == "all" else min(schedule.states, len(chosen))
        try:
            recoveries = await until_good(
                lambda index: self._recovery(step, *chosen[index], f"{seed}/fork{index}", f"{prefix}fork{index}"),
                _has_spread,
                wanted=wanted,
                spares=len(chosen) - wanted,
            )
        except BaseException:
            await asyncio.gather(*(self._roller.release(state.snapshot) for _, state in chosen))
            raise
        used = len(recoveries)
        await asyncio.gather(*(self._roller.release(state.snapshot) for _, state in chosen[:used]))
        for task, state in chosen[used:]:
            pool.add(task, [state])
        for (task, _), (_, found) in zip(chosen, recoveries, strict=False):
            pool.add(task, found)
        pool.rates.update((group.task_id, group.rewards) for group, _ in recoveries)
        groups = {f"{prefix}root{index}": group for index, (group, _) in enumerate(roots)}
        groups |= {f"{prefix}fork{index}": group for index, (group, _) in enumerate(recoveries)}
        return groups, len(roots) - schedule.tasks + used - wanted

    async def _root(self, step: int, task: Task, seed: str, key: str) -> Rolled:
        schedule, gate = self.schedule, self.gate.at(step)
        return await self._remembered(
            step,
            key,
            None,
            lambda: self._roller.root_group(task, schedule.attempts, seed, gate, schedule.states > 0),
            lambda fault: Group("root", task.id, _not_run(seed, task, schedule.attempts, fault)),
        )

    async def _recovery(self, step: int, task: Task, state: FailureState, seed: str, key: str) -> Rolled:
        forks, gate, keep = self.schedule.forks, self.gate.at(step), self.pool.keeps(state.depth + 1)
        return await self._remembered(
            step,
            key,
            state.id,
            lambda: self._roller.recovery_group(task, state, forks, seed, gate, keep),
            lambda fault: Group("recovery", task.id, _not_run(seed, task, forks, fault, state), state),
        )

    async def _remembered(
        self,
        step: int,
        key: str,
        state_id: str | None,
        roll: Callable[[], Awaitable[Rolled]],
        lost: Callable[[SandboxError], Group],
    ) -> Rolled:
        """The stored group of that key, if it starts from that state; else what `roll` gives, which is stored."""
        known = self.store.get(step, key)
        if known is not None and (known[0].state.id if known[0].state else None) == state_id:
            group, ids = known
            gate, task = self.gate.at(step), self._by_id[group.task_id]
            left = [attempt for attempt in group.attempts if attempt.id in ids]
            restored = await asyncio.gather(*(restore_state(self._roller, task, attempt, gate) for attempt in left))
            return group, [state for state in restored if state is not None]
        try:
            group, states = await roll()
        except SandboxError as error:
            # Faults of single attempts do not come this far: a daemon is gone, or a disk is full.
            logging.warning("step %d: %s is given up: %s", step, key, error)
            group, states = lost(error), []
        self.store.put(step, key, group, [state.id for state in states])
        self._on_group(group)
        return group, states


def choose_tasks(tasks: Sequence[Task], count: int, seed: int, step: int) -> list[Task]:
    """The tasks of a step (or round): a seeded shuffle of all tasks, walked through again and again."""
    places = (divmod(place, len(tasks)) for place in range(step * count, (step + 1) * count))
    chosen: list[Task] = []
    for epoch, group in itertools.groupby(places, key=lambda place: place[0]):
        order = _shuffled(tasks, f"{seed}/tasks/{epoch}")
        chosen += [order[index] for _, index in group]
    return chosen


def _shuffled(tasks: Sequence[Task], name: str) -> list[Task]:
    order = list(range(len(tasks)))
    random.Random(seed_of(name)).shuffle(order)
    return [tasks[index] for index in order]


def _has_spread(rolled: Rolled) -> bool:
    return rolled[0].has_spread


def _not_run(
    seed: str, task: Task, size: int, fault: SandboxError, state: FailureState | None = None
) -> tuple[Attempt, ...]:
    outcome = Outcome(None, "env_error", str(fault))
    parent, depth = (state.id, state.depth + 1) if state else (None, 0)
    names = (f"{seed}/{index}" for index in range(size))
    return tuple(Attempt.not_run(name, task.id, outcome, parent=parent, depth=depth) for name in names)


async def _ended(task: asyncio.Task[Any] | None) -> None:
    if task is not None:
        await asyncio.wait({task})
