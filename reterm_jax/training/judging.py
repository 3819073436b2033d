"""The last stage: every policy on the same held-out tasks and the same failure states, then table and report."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import platform
import random
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from ml_collections import ConfigDict

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.agent.scripted import ScriptedPolicy
from reterm_jax.evaluation.console import progress_printer, results_table
from reterm_jax.evaluation.evaluate import evaluate_pass, evaluate_recovery
from reterm_jax.evaluation.journal import Journal
from reterm_jax.evaluation.records import AttemptRecord, EvalResult, ForkTree, RunReport
from reterm_jax.evaluation.view import build_view
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.restore import Forks
from reterm_jax.rollout.samplers.jax import JaxSampler
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.tasks import families
from reterm_jax.tasks.task import Task
from reterm_jax.training.workdir import Workdir


async def fixed_states(roller: Roller, tasks: Sequence[Task], count: int, seed: int) -> list[FailureState]:
    """Failure states on held-out tasks, left by scripted failures: the same ones for every policy and every run.

    They do not depend on a policy, so that no policy is measured on its own mistakes alone. There are none on tasks
    other than generated ones, for which there is no script.
    """
    tasks = [task for task in tasks if task.metadata.get("family") in families.FAMILIES]
    order = random.Random(f"{seed}/states").sample(tasks, min(count, len(tasks)))
    gate = asyncio.Semaphore(roller.concurrent)

    async def one(task: Task) -> FailureState | None:
        actions = families.failure(task, random.Random(f"{seed}/states/{task.id}"))
        scripted = dataclasses.replace(roller, sampler=ScriptedPolicy(roller.chat, actions))
        _, state = await scripted.attempt(task, f"state/{task.id}", gate, start=None, keep=True)
        return state

    states = await asyncio.gather(*(one(task) for task in order))
    return [state for state in states if state is not None]


async def evaluate(
    config: ConfigDict,
    work: Workdir,
    roller: Roller,
    sampler: JaxSampler,
    tasks: Sequence[Task],
    policies: Mapping[str, tuple[Any, int]],
    known: Sequence[EvalResult] = (),
    *,
    model: str | None = None,
) -> list[EvalResult]:
    """Evaluates each policy (name to parameters and version), prints the table, writes report.json and report.html.

    Finished attempts are kept in the workdir, so that a killed evaluation continues.

    Args:
        known: results of earlier policies in the same evaluation, to be shown before these.
        model: what the report calls the model.
    """
    settings = config.eval
    by_id = {task.id: task for task in tasks}
    gate = asyncio.Semaphore(roller.concurrent)
    roller = dataclasses.replace(roller, temperature=settings.temperature)
    states = await fixed_states(roller, tasks, settings.states, config.seed)
    results = list(known)
    async with contextlib.AsyncExitStack() as stack:
        forks = {}  # one for each state, so that a lost one is made again once, for all seeds and policies
        for state in states:
            stack.push_async_callback(roller.release, state.snapshot)
            forks[state.id] = await stack.enter_async_context(Forks(roller, by_id[state.task_id], state))
        for name, (params, version) in policies.items():
            sampler.update(params, version)

            async def recover(state: FailureState, seed: int, name: str = name) -> AttemptRecord:
                task = by_id[state.task_id]
                label = f"{name}/{state.id}/{seed}"
                done, _ = await roller.attempt(task, label, gate, start=state, keep=False, forks=forks[state.id])
                return _record(done, task, seed)

            shared = {"seed": config.seed, "concurrency": roller.concurrent, "faults": (SandboxError,)}
            identity = {"policy": name, "version": version}
            with (
                Journal(work.root / "eval" / f"{name}_pass.jsonl", identity) as journal,
                Journal(work.root / "eval" / f"{name}_own.jsonl", identity) as own,
            ):
                attempts = await evaluate_pass(
                    tasks,
                    _AttemptAndRecoveries(roller, gate, name, settings.own_forks, own),
                    attempts=settings.attempts,
                    journal=journal,
                    progress=progress_printer(f"eval {name}"),
                    **shared,
                )
            with Journal(work.root / "eval" / f"{name}_recovery.jsonl", identity) as journal:
                recoveries = await evaluate_recovery(
                    states,
                    recover,
                    forks=settings.forks,
                    journal=journal,
                    progress=progress_printer(f"recover {name}"),
                    **shared,
                )
            results.append(
                EvalResult(name, attempts, recoveries, [record for _, record in sorted(own.finished.items())])
            )
        trees = await fork_trees(roller, tasks, config.eval.trees, config.seed)
    size = sum(x.size for x in jax.tree.leaves(params))
    report = RunReport(
        title="ReTerm run",
        facts={
            "model": f"{model or config.model.path or 'Qwen3.5 hybrid from scratch'}, {size:,} parameters",
            "seed": str(config.seed),
            "held-out tasks": str(len(tasks)),
            "failure states": str(len(states)),
            "device": f"{jax.device_count()} × {jax.devices()[0].device_kind} ({platform.machine()})",
            "sandbox": config.sandbox.kind,
        },
        phases=work.phase_seconds(),
        results=results,
        trees=trees,
    )
    report.save(work.root / "report.json")
    page = build_view(work.root, work.root / "report.html")
    print(f"\n{results_table(results)}\n\nreport: {page}\ncurves: tensorboard --logdir {work.root}")
    return results


@dataclasses.dataclass(frozen=True)
class _AttemptAndRecoveries:
    """An attempt and, where it failed, `forks` recoveries from the state that it left; those go into `own`.

    They are there before the attempt is, so that of an attempt that a journal knows they are known too.
    """

    roller: Roller
    gate: asyncio.Semaphore
    policy: str
    forks: int
    own: Journal

    async def __call__(self, task: Task, seed: int) -> AttemptRecord:
        label = f"{self.policy}/{task.id}/{seed}"
        attempt, state = await self.roller.attempt(task, label, self.gate, start=None, keep=self.forks > 0)
        if state is not None:
            try:
                group, _ = await self.roller.recovery_group(task, state, self.forks, f"{label}/again", self.gate)
            finally:
                await self.roller.release(state.snapshot)
            for recovery in group.attempts:
                self.own.append(recovery.id, _record(recovery, task, seed))
        return _record(attempt, task, seed)


def _record(attempt: Attempt, task: Task, seed: int) -> AttemptRecord:
    return AttemptRecord.from_attempt(attempt, task.metadata.get("family", "tasks"), seed=seed)


async def fork_trees(roller: Roller, tasks: Sequence[Task], count: int, seed: int, forks: int = 4) -> list[ForkTree]:
    """Failed attempts of the last policy, the states they left and the recoveries from there, for people to read."""
    gate = asyncio.Semaphore(roller.concurrent)
    order = random.Random(f"{seed}/trees").sample(list(tasks), len(tasks))
    # Each family once before any of them a second time.
    seen: collections.Counter[str] = collections.Counter()
    turn: dict[str, int] = {}
    for task in order:
        family = task.metadata.get("family", "tasks")
        turn[task.id] = seen[family]
        seen[family] += 1
    order.sort(key=lambda task: turn[task.id])
    trees: list[ForkTree] = []
    for task in order:
        if len(trees) == count:
            break
        failed, state = await roller.attempt(task, f"tree/{task.id}", gate, start=None, keep=True)
        if state is None:
            continue
        family = task.metadata.get("family", "tasks")
        try:
            listing = await _listing(roller, task, state)
            group, _ = await roller.recovery_group(task, state, forks, f"tree/{task.id}/fork", gate)
        finally:
            await roller.release(state.snapshot)
        trees.append(
            ForkTree(
                task.id,
                family,
                task.instruction,
                AttemptRecord.from_attempt(failed, family),
                listing,
                [AttemptRecord.from_attempt(recovery, family) for recovery in group.attempts],
            )
        )
    return trees


async def _listing(roller: Roller, task: Task, state: FailureState) -> str:
    """The files of a state, one a line; where there is no sandbox to list them in, why."""
    command = "find . -mindepth 1 -printf '%M %p\\n' | sort -k2 | head -40"
    try:
        async with Forks(roller, task, state) as forks:
            sandbox = await forks.sandbox()
            try:
                return (await sandbox.exec(command, timeout=10, fresh=True)).output
            finally:
                await sandbox.close()
    except SandboxError as error:
        return f"(its files cannot be listed: {error})\n"
