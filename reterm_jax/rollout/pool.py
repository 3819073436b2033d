"""Failure states that wait to be recovered from: which are kept, which are chosen, and when their snapshots go.

The pool owns the snapshots of its states. A state leaves it when it is chosen (its snapshot goes once its recoveries
have run: a state is forked once), when it has become stale, or when there are more than the pool may hold; then its
snapshot is released. The pool lives in memory: a run that is killed and resumed begins with an empty one, since the
snapshots of the killed process belong to a host that is gone and are removed when its directory is opened again.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Literal, Self, get_args

from reterm_jax.agent.attempt import FailureState
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.sandbox.base import Snapshot
from reterm_jax.tasks.task import Task

Choice = Literal["balanced", "all", "target"]


@dataclasses.dataclass(frozen=True)
class PoolConfig:
    """
    Attributes:
        choose: among the candidates: `balanced` (one of each task first, then second ones, and so on), `all` (every
            one, however many), or `target` (those whose task has a recovery rate near `target_rate`, by the running
            estimates of `RecoveryRates`: states that are always or never recovered have no spread and teach nothing).
        target_rate: for `target`.
        max_depth: failures on the way to a recovery, at most: 1 forks failures of root attempts only, 2 their failed
            recoveries too. Those wait in the pool, for the step after.
        max_staleness: versions that a state may be behind the policy; 0 keeps no state for a later step.
        size: states kept for later steps, at most; those that failed first are dropped first.
    """

    choose: Choice = "balanced"
    target_rate: float = 0.5
    max_depth: int = 1
    max_staleness: int = 0
    size: int = 256

    def __post_init__(self) -> None:
        if self.choose not in get_args(Choice):
            raise ValueError(f"choose {self.choose!r} is unknown; one of {', '.join(get_args(Choice))}")
        if not 0 <= self.target_rate <= 1:
            raise ValueError(f"target_rate must be in [0, 1], got {self.target_rate}")
        if self.max_depth < 1 or self.max_staleness < 0 or self.size < 1:
            raise ValueError(
                f"max_depth {self.max_depth} and size {self.size} must be at least 1, and max_staleness "
                f"{self.max_staleness} at least 0"
            )
        if self.max_depth > 1 and not self.max_staleness:
            raise ValueError(
                f"max_depth is {self.max_depth}, but failed recoveries wait for the step after, and max_staleness 0 "
                "keeps no state that long; raise it to 1 or more"
            )


class RecoveryRates:
    """Running estimates of how often failures on each task are recovered from.

    Counts of recovered and graded recoveries fade by `decay` with every step, and one recovery at the prior is
    always among them: what is unknown or long ago is taken to be at the prior, and so gets its turn again.

    Args:
      prior: the rate that is assumed of a task without counts.
      saved: what `to_dict` gave, from a checkpoint.
    """

    def __init__(self, prior: float, saved: Mapping[str, Sequence[float]] | None = None, *, decay: float = 0.9):
        self._prior, self._decay = prior, decay
        self._counts = {task: (float(won), float(seen)) for task, (won, seen) in (saved or {}).items()}

    def rate(self, task_id: str) -> float:
        won, seen = self._counts.get(task_id, (0.0, 0.0))
        return (won + self._prior) / (seen + 1.0)

    def update(self, recoveries: Iterable[tuple[str, Sequence[float | None]]]) -> None:
        """Takes in (task, rewards) of recovery groups; None is a recovery that was not graded."""
        self._counts = {task: (won * self._decay, seen * self._decay) for task, (won, seen) in self._counts.items()}
        for task, rewards in recoveries:
            graded = [reward for reward in rewards if reward is not None]
            won, seen = self._counts.get(task, (0.0, 0.0))
            self._counts[task] = won + sum(reward >= 1 for reward in graded), seen + len(graded)

    def to_dict(self) -> dict[str, list[float]]:
        """JSON form."""
        return {task: list(counts) for task, counts in self._counts.items()}


class FailurePool:
    """The candidates of a step: failures of this step, and those that earlier steps left.

    Args:
      release: of the sandbox host.
      rates: of recovery, from a checkpoint; none known if None.
    """

    def __init__(
        self, config: PoolConfig, release: Callable[[Snapshot], Awaitable[None]], rates: RecoveryRates | None = None
    ):
        self.config, self._release = config, release
        self.rates = rates or RecoveryRates(config.target_rate)
        self._groups: list[list[tuple[Task, FailureState]]] = []
        self.dropped = 0

    def __len__(self) -> int:
        return sum(map(len, self._groups))

    @property
    def states(self) -> list[FailureState]:
        """What is waiting."""
        return [state for group in self._groups for _, state in group]

    def add(self, task: Task, states: Sequence[FailureState]) -> None:
        """Takes over the failure states of one group of attempts on `task`."""
        if states:
            self._groups.append([(task, state) for state in states])

    def keeps(self, depth: int) -> bool:
        """Whether the failure of an attempt of this depth may be forked."""
        return depth < self.config.max_depth

    def choose(self, count: int, seed: str) -> list[tuple[Task, FailureState]]:
        """Takes up to `count` states out of the pool; the caller releases their snapshots."""
        rng = random.Random(seed_of(seed))
        shuffled = [rng.sample(group, len(group)) for group in self._by_task()]
        rng.shuffle(shuffled)
        chosen: list[tuple[Task, FailureState]] = []
        for place in range(max(map(len, shuffled), default=0)):
            chosen += [group[place] for group in shuffled if place < len(group)]
        if self.config.choose == "target":
            # Stable: where estimates are equal, tasks stay balanced.
            chosen.sort(key=lambda pair: abs(self.rates.rate(pair[1].task_id) - self.config.target_rate))
        if self.config.choose != "all":
            chosen = chosen[:count]
        taken = {id(state) for _, state in chosen}
        self._groups = [[pair for pair in group if id(pair[1]) not in taken] for group in self._groups]
        return chosen

    async def end_step(self, next_version: int) -> None:
        """Drops what the next step may not use any more, and counts it in `dropped`.

        Args:
          next_version: of the policy that will recover from what stays.
        """
        oldest = next_version - self.config.max_staleness
        waiting = [pair for group in self._groups for pair in group]
        fresh = [pair for pair in waiting if self.config.max_staleness and pair[1].version >= oldest]
        fresh.sort(key=lambda pair: pair[1].version)  # stable
        kept = fresh[-self.config.size :]
        stays = {id(state) for _, state in kept}
        gone = [state for _, state in waiting if id(state) not in stays]
        self._groups = [[pair for pair in group if id(pair[1]) in stays] for group in self._groups]
        self._groups = [group for group in self._groups if group]
        self.dropped = len(gone)
        await asyncio.gather(*(self._release(state.snapshot) for state in gone))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Releases everything."""
        gone, self._groups = self.states, []
        await asyncio.gather(*(self._release(state.snapshot) for state in gone))

    def _by_task(self) -> list[list[tuple[Task, FailureState]]]:
        """One list of candidates for each group of the pool; with states of earlier steps one for each task."""
        if not self.config.max_staleness:
            return self._groups
        lists: dict[str, list[tuple[Task, FailureState]]] = {}
        for group in self._groups:
            lists.setdefault(group[0][0].id, []).extend(group)
        return list(lists.values())
