"""Which failure states are chosen, which wait, and that every snapshot goes exactly once."""

import asyncio
from types import SimpleNamespace

import pytest

from reterm_jax.agent.attempt import FailureState
from reterm_jax.rollout.pool import FailurePool, PoolConfig, RecoveryRates
from reterm_jax.sandbox.base import Snapshot
from reterm_jax.tokens.transcript import Transcript


def state(task, number, *, version=0, depth=0):
    name = f"{task}{number}"
    return FailureState(name, task, Snapshot(name, "bubblewrap", "me"), Transcript(), (), version, depth, name)


def make_pool(counts=(("a", 5), ("b", 1), ("c", 2)), rates=None, **fields):
    released = []

    async def release(snapshot):
        assert snapshot.id not in released
        released.append(snapshot.id)

    pool = FailurePool(PoolConfig(**fields), release, rates)
    for task, count in counts:
        pool.add(SimpleNamespace(id=task), [state(task, number) for number in range(count)])
    return pool, released


def names(chosen):
    return [found.id for _, found in chosen]


def test_states_are_chosen_from_every_task_before_any_task_gives_two():
    pool, _ = make_pool()
    chosen = pool.choose(4, "seed")
    assert sorted(task.id for task, _ in chosen[:3]) == ["a", "b", "c"]
    assert len(set(names(chosen))) == 4 and len(pool) == 4
    assert names(make_pool()[0].choose(4, "seed")) == names(chosen)
    assert any(names(make_pool()[0].choose(4, str(seed))) != names(chosen) for seed in range(9))


def test_all_ignores_the_count():
    pool, _ = make_pool(choose="all")
    assert len(pool.choose(1, "seed")) == 8 and len(pool) == 0


def test_target_prefers_tasks_that_are_neither_always_nor_never_recovered():
    rates = RecoveryRates(0.5)
    rates.update([("a", [1.0] * 8), ("b", [1.0, 0.0, None, 1.0, 0.0]), ("c", [0.0] * 8)])
    pool, _ = make_pool((("a", 3), ("b", 2), ("c", 3), ("new", 1)), rates, choose="target")
    assert {task.id for task, _ in pool.choose(3, "seed")} == {"b", "new"}


def test_estimates_fade_and_survive_a_checkpoint():
    rates = RecoveryRates(0.5)
    assert rates.rate("a") == 0.5
    rates.update([("a", [1.0, 1.0, 0.0, None])])
    assert rates.rate("a") == pytest.approx(2.5 / 4)
    rates.update([("b", [0.25])])  # a partial reward is no recovery
    assert rates.rate("a") == pytest.approx((1.8 + 0.5) / (2.7 + 1)) and rates.rate("b") == 0.25
    assert RecoveryRates(0.5, rates.to_dict()).rate("a") == rates.rate("a")
    for _ in range(99):
        rates.update([])
    assert rates.rate("a") == pytest.approx(0.5, abs=1e-3)


def test_without_staleness_nothing_waits():
    pool, released = make_pool()
    chosen = pool.choose(2, "seed")
    asyncio.run(pool.end_step(1))
    assert len(pool) == 0 and pool.dropped == 6
    assert set(released).isdisjoint(names(chosen)) and len(released) == 6


def test_states_wait_until_they_are_stale():
    pool, released = make_pool((), max_staleness=2)
    left = []
    for step in range(5):
        pool.add(SimpleNamespace(id="a"), [state("a", step, version=step)])
        asyncio.run(pool.end_step(step + 1))
        left.append([found.version for found in pool.states])
    assert left == [[0], [0, 1], [1, 2], [2, 3], [3, 4]]
    assert released == ["a0", "a1", "a2"]


def test_a_full_pool_drops_the_oldest():
    pool, released = make_pool((), max_staleness=9, size=3)
    pool.add(SimpleNamespace(id="a"), [state("a", n, version=n % 2) for n in range(5)])
    asyncio.run(pool.end_step(2))
    assert sorted(found.id for found in pool.states) == ["a1", "a3", "a4"] and sorted(released) == ["a0", "a2"]


def test_older_states_of_a_task_share_its_turn():
    pool, _ = make_pool((("a", 2), ("b", 2), ("a", 2)), max_staleness=1)
    assert sorted(task.id for task, _ in pool.choose(2, "seed")) == ["a", "b"]


def test_leaving_the_pool_releases_everything():
    async def go():
        pool, released = make_pool(max_staleness=1)
        async with pool:
            pool.choose(3, "seed")
        return pool, released

    pool, released = asyncio.run(go())
    assert len(pool) == 0 and len(released) == 5
