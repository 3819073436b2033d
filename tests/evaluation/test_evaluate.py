import asyncio
import types

import pytest
from evaluation_demo import attempt

from reterm_jax.evaluation.evaluate import attempt_seed, evaluate_pass, evaluate_recovery
from reterm_jax.evaluation.journal import Journal

TASKS = [types.SimpleNamespace(id=f"t{i}") for i in range(5)]
STATES = [types.SimpleNamespace(id=f"t{i}@0", task_id=f"t{i}") for i in range(3)]


class BrokenSandbox(Exception):
    pass


def run_pass(run, **options):
    return asyncio.run(evaluate_pass(TASKS, run, **options))


async def solve(task, seed):
    await asyncio.sleep(0)
    return attempt(task.id, float(seed % 2), seed=seed)


def test_order_and_seeds_do_not_depend_on_concurrency():
    one, many = run_pass(solve, attempts=3, concurrency=1), run_pass(solve, attempts=3, concurrency=7)
    assert one == many
    assert [a.task_id for a in one[:4]] == ["t0", "t0", "t0", "t1"]
    assert len({a.seed for a in one}) == 15
    assert one[1].seed == attempt_seed(0, "t0", 1) < 2**31
    assert run_pass(solve, seed=1)[0].seed != one[0].seed


def test_concurrency_is_bounded():
    running = peak = 0

    async def run(task, seed):
        nonlocal running, peak
        running += 1
        peak = max(peak, running)
        await asyncio.sleep(0.001)
        running -= 1
        return attempt(task.id, 1.0)

    run_pass(run, attempts=4, concurrency=3)
    assert peak == 3


def test_resumes_after_a_stop_and_runs_nothing_twice(tmp_path):
    calls = []

    async def run(task, seed):
        calls.append((task.id, seed))
        if len(calls) == 7:
            raise KeyError("stopped")
        return await solve(task, seed)

    path = tmp_path / "eval.jsonl"
    with Journal(path, {"seed": 0}) as journal, pytest.raises(KeyError, match="stopped"):
        run_pass(run, attempts=3, concurrency=1, journal=journal)
    seen = []
    with Journal(path, {"seed": 0}) as journal:
        records = run_pass(run, attempts=3, concurrency=1, journal=journal, progress=seen.append)
    assert len(calls) == 16 and len(set(calls)) == 15
    assert records == run_pass(solve, attempts=3)
    assert (seen[0].done, seen[0].resumed, seen[-1].done, seen[-1].total) == (6, 6, 15, 15)
    assert seen[-1].solved == sum(record.solved for record in records)


def test_faults_become_ungraded_attempts_and_other_errors_stop():
    async def run(task, seed):
        if task.id == "t1":
            raise BrokenSandbox("no space left")
        return await solve(task, seed)

    records = run_pass(run, faults=(BrokenSandbox,))
    assert [record.graded for record in records] == [True, False, True, True, True]
    assert (records[1].status, records[1].detail) == ("env_error", "BrokenSandbox: no space left")
    with pytest.raises(BrokenSandbox):
        run_pass(run)


def test_recoveries_carry_their_state():
    async def recover(state, seed):
        if state.id == "t2@0":
            raise BrokenSandbox
        return attempt(state.task_id, 1.0, depth=1)

    records = asyncio.run(evaluate_recovery(STATES, recover, forks=2, faults=(BrokenSandbox,)))
    assert [record.parent for record in records] == ["t0@0", "t0@0", "t1@0", "t1@0", "t2@0", "t2@0"]
    assert [record.graded for record in records] == [True] * 4 + [False] * 2


def test_mistakes_of_the_caller_are_named():
    async def wrong(unit, seed):
        return attempt("other", 1.0)

    with pytest.raises(ValueError, match="task 't0': the attempt came back for task 'other'"):
        run_pass(wrong)
    with pytest.raises(ValueError, match="state 't0@0' of task 't0'"):
        asyncio.run(evaluate_recovery(STATES, wrong, forks=1))
    with pytest.raises(ValueError, match="id 't0' occurs twice"):
        asyncio.run(evaluate_pass([TASKS[0], TASKS[0]], solve))
    with pytest.raises(ValueError, match="at least 1, got 0"):
        run_pass(solve, attempts=0)
