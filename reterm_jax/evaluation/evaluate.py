"""Runs attempts and recoveries for an evaluation: bounded concurrency, seeds fixed by name, resumable."""

import asyncio
import dataclasses
import hashlib
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Protocol, TypeVar

from reterm_jax.evaluation.journal import Journal
from reterm_jax.evaluation.records import AttemptRecord


class Unit(Protocol):
    """A task or a failure state. Ids are unique within one evaluation."""

    @property
    def id(self) -> str: ...


class State(Unit, Protocol):
    @property
    def task_id(self) -> str: ...


UnitT = TypeVar("UnitT", bound=Unit)
StateT = TypeVar("StateT", bound=State)


@dataclasses.dataclass(frozen=True)
class Progress:
    """How far an evaluation is; `resumed` attempts were found in the journal and not run again."""

    done: int
    total: int
    graded: int
    solved: int
    resumed: int


def attempt_seed(seed: int, unit_id: str, index: int) -> int:
    """A 31-bit seed that depends on names only: the order in which attempts finish or resume does not matter."""
    digest = hashlib.blake2s(f"{seed}/{unit_id}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(digest, "big") >> 1


async def evaluate_pass(
    tasks: Sequence[UnitT],
    run: Callable[[UnitT, int], Awaitable[AttemptRecord]],
    *,
    attempts: int = 1,
    seed: int = 0,
    concurrency: int = 8,
    journal: Journal | None = None,
    faults: tuple[type[Exception], ...] = (),
    progress: Callable[[Progress], None] | None = None,
) -> list[AttemptRecord]:
    """Runs every task `attempts` times from its start state.

    Args:
        run: one attempt: (task, seed) to its record.
        faults: exceptions that mean a broken environment; such an attempt becomes an ungraded `env_error` record.
            Any other exception stops the evaluation, after which the journal holds what had finished.
        progress: called after each attempt.

    Returns:
        Records in the order of `tasks`, attempts of one task side by side.
    """

    async def record(task: UnitT, attempt_seed: int, key: str) -> AttemptRecord:
        try:
            done = await run(task, attempt_seed)
        except faults as error:
            return _fault(key, task.id, None, attempt_seed, error)
        if done.task_id != task.id:
            raise ValueError(f"task {task.id!r}: the attempt came back for task {done.task_id!r}")
        return done

    return await _run_all(tasks, record, attempts, seed, concurrency, journal, progress)


async def evaluate_recovery(
    states: Sequence[StateT],
    recover: Callable[[StateT, int], Awaitable[AttemptRecord]],
    *,
    forks: int,
    seed: int = 0,
    concurrency: int = 8,
    journal: Journal | None = None,
    faults: tuple[type[Exception], ...] = (),
    progress: Callable[[Progress], None] | None = None,
) -> list[AttemptRecord]:
    """Runs `forks` recoveries from each failure state; arguments as for `evaluate_pass`.

    Returns:
        Records in the order of `states`, with `parent` set to the state's id. Give every compared policy the same
        states, or the rates do not compare.
    """

    async def record(state: StateT, attempt_seed: int, key: str) -> AttemptRecord:
        try:
            done = await recover(state, attempt_seed)
        except faults as error:
            return _fault(key, state.task_id, state.id, attempt_seed, error)
        if done.task_id != state.task_id:
            raise ValueError(f"state {state.id!r} of task {state.task_id!r}: the recovery is of task {done.task_id!r}")
        return dataclasses.replace(done, parent=state.id)

    return await _run_all(states, record, forks, seed, concurrency, journal, progress)


async def _run_all(
    units: Sequence[UnitT],
    record: Callable[[UnitT, int, str], Awaitable[AttemptRecord]],
    repeats: int,
    seed: int,
    concurrency: int,
    journal: Journal | None,
    progress: Callable[[Progress], None] | None,
) -> list[AttemptRecord]:
    if repeats < 1 or concurrency < 1:
        raise ValueError(f"attempts (or forks) and concurrency must be at least 1, got {repeats} and {concurrency}")
    ids = [unit.id for unit in units]
    if len(set(ids)) != len(ids):
        raise ValueError(f"id {next(i for i in ids if ids.count(i) > 1)!r} occurs twice; ids must be unique")
    jobs = [(unit, index, f"{unit.id}#{index}") for index in range(repeats) for unit in units]
    finished = {key: journal.finished[key] for _, _, key in jobs if journal and key in journal.finished}
    resumed = len(finished)

    def report() -> None:
        if progress:
            graded = [attempt for attempt in finished.values() if attempt.graded]
            progress(Progress(len(finished), len(jobs), len(graded), sum(a.solved for a in graded), resumed))

    async def worker(queue: Iterator[tuple[UnitT, int, str]]) -> None:
        for unit, index, key in queue:
            done = await record(unit, attempt_seed(seed, unit.id, index), key)
            if journal:
                journal.append(key, done)
            finished[key] = done
            report()

    report()
    # One iterator shared by all workers hands each job out once; a job waits for a free worker, not for a sandbox.
    queue = iter([job for job in jobs if job[2] not in finished])
    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(jobs) - resumed)):
                group.create_task(worker(queue))
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [finished[f"{unit.id}#{index}"] for unit in units for index in range(repeats)]


def _fault(key: str, task_id: str, parent: str | None, seed: int, error: Exception) -> AttemptRecord:
    return AttemptRecord(
        id=key,
        task_id=task_id,
        family="",
        turns=[],
        reward=None,
        status="env_error",
        ended="env_error",
        parent=parent,
        seed=seed,
        detail=f"{type(error).__name__}: {error}",
    )
