"""What is rolled, in which order, how far ahead, and what a scheduler that was killed finds again."""

import asyncio
from collections import Counter

import pytest
from made_up import MadeUpRoller, task

from reterm_jax.rollout.groups import until_good
from reterm_jax.rollout.pool import FailurePool, PoolConfig
from reterm_jax.rollout.scheduler import Schedule, ScheduleError, Scheduler, choose_tasks
from reterm_jax.rollout.store import GroupStore, StoreError
from reterm_jax.sandbox.base import SandboxError

TASKS = [task(name) for name in "abcdef"]
SCHEDULE = {"seed": 0, "steps": 9, "tasks": 2, "attempts": 2, "states": 2, "forks": 2}


def scheduler(path, roller, first_step=0, pool=PoolConfig(), **changes):  # noqa: B008 (frozen)
    store = GroupStore(path, {})
    states = FailurePool(pool, roller.release)
    return Scheduler(Schedule(**{**SCHEDULE, **changes}), TASKS, roller, states, store, first_step=first_step)


async def settle():
    for _ in range(200):
        await asyncio.sleep(0)


def names(batch):
    return [group.attempts[0].id.rpartition("/")[0].removeprefix("0/") for group in batch.groups]


def test_tasks_are_walked_through_in_shuffled_rounds():
    tasks = list("abcdef")
    first = [t for step in range(3) for t in choose_tasks(tasks, 2, 0, step)]
    second = [t for step in range(3, 6) for t in choose_tasks(tasks, 2, 0, step)]
    assert sorted(first) == sorted(second) == tasks and first != second
    assert choose_tasks(tasks, 2, 0, 4) == second[2:4]
    assert choose_tasks(tasks, 4, 0, 1) == [*first[4:], *second[:2]]


def test_as_many_as_are_needed_run_whatever_they_take():
    async def go(delays):
        begun = []

        async def run(index):
            begun.append(index)
            for _ in range(delays[index]):
                await asyncio.sleep(0)
            return index

        found = await until_good(run, lambda index: index not in (0, 3, 4), wanted=3, spares=4)
        assert sorted(begun) == found
        return found

    for delays in ([0] * 7, [9, 0, 0, 5, 0, 0, 0], [0, 9, 9, 0, 0, 0, 9]):
        assert asyncio.run(go(delays)) == [0, 1, 2, 3, 4, 5]


def test_a_batch_holds_roots_and_recoveries_and_leaves_no_snapshot(tmp_path):
    async def go():
        roller = MadeUpRoller()
        async with scheduler(tmp_path / "groups", roller) as made:
            made.serve(0)
            batch = await made.batch(0)
            assert names(batch) == ["step0/root0", "step0/root1", "step0/fork0", "step0/fork1"]
            assert [group.kind for group in batch.groups] == ["root", "root", "recovery", "recovery"]
            assert {group.task_id for group in batch.groups[:2]} == {t.id for t in choose_tasks(TASKS, 2, 0, 0)}
            assert batch.facts == {
                "recovery/waiting_states": 0, "recovery/dropped_states": 0, "rollout/refilled_groups": 0,
            }  # fmt: skip
        assert roller.snapshots == set()

    asyncio.run(go())


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_no_more_is_begun_than_staleness_allows(tmp_path, staleness):
    async def go():
        roller = MadeUpRoller()
        async with scheduler(tmp_path / "groups", roller, max_staleness=staleness, steps=4) as made:
            for version in range(4):
                roller.version = version
                made.serve(version)
                await settle()
                begun = {seed.split("/")[1] for seed in roller.begun}
                assert begun == {f"step{step}" for step in range(min(version + staleness + 1, 4))}
                batch = await made.batch(version)
                oldest = min(attempt.version for group in batch.groups for attempt in group.attempts)
                assert version - oldest == min(staleness, version)
            with pytest.raises(ScheduleError, match="no batch for step 4: .* training ends at step 4"):
                await made.batch(4)

    asyncio.run(go())


def test_the_older_batch_has_the_sandboxes_first_and_the_next_one_the_rest(tmp_path):
    async def go():
        roller = MadeUpRoller(concurrent=2)
        hold = roller.holds["0/step0/fork0"] = asyncio.Event()
        async with scheduler(tmp_path / "groups", roller, max_staleness=1) as made:
            made.serve(0)
            await settle()
            # Recoveries of step 0 are held up; the roots of step 1 ran beside them, its choice waits.
            assert "0/step1/root1" in roller.begun and "0/step1/fork0" not in roller.begun
            hold.set()
            await made.batch(1)
            assert roller.begun.index("0/step0/fork1") < roller.begun.index("0/step1/fork0")

    asyncio.run(go())


def test_a_batch_that_is_asked_for_early_is_waited_for(tmp_path):
    async def go():
        async with scheduler(tmp_path / "groups", MadeUpRoller()) as made:
            asked = asyncio.create_task(made.batch(0))
            await settle()
            assert not asked.done()
            made.serve(0)
            assert (await asyncio.wait_for(asked, 5)).step == 0

    asyncio.run(go())


def test_groups_without_spread_are_made_up_for(tmp_path):
    class Dull(MadeUpRoller):
        def reward(self, seed, index):
            return 0.0 if seed.endswith(("root0", "fork1")) else float(index % 2)

    async def go(path, refills):
        roller = Dull()
        async with scheduler(tmp_path / path, roller, refills=refills) as made:
            made.serve(0)
            batch = await made.batch(0)
        assert roller.snapshots == set()
        return batch

    batch = asyncio.run(go("some", 2))
    assert names(batch) == [f"step0/{key}" for key in ("root0", "root1", "root2", "fork0", "fork1", "fork2")]
    assert sum(group.has_spread for group in batch.groups) == 4 and batch.facts["rollout/refilled_groups"] == 2
    assert len({group.task_id for group in batch.groups if group.kind == "root"}) == 3
    assert len(asyncio.run(go("none", 0)).groups) == 4


def test_a_killed_scheduler_rolls_only_what_was_not_finished(tmp_path):
    async def whole():
        async with scheduler(tmp_path / "whole", MadeUpRoller(), steps=2) as made:
            for step in range(2):
                made.serve(step)
                batch = await made.batch(step)
        return batch

    async def killed():
        roller = MadeUpRoller()
        roller.holds["0/step1/fork1"] = asyncio.Event()
        made = scheduler(tmp_path / "killed", roller, steps=2)
        made.serve(1)
        await made.batch(0)
        await settle()
        for batch in made._batches.values():
            batch.cancel()  # nothing is released or acknowledged, as after a kill
        await settle()
        made.store.close()

    async def again(listing, finished):
        roller = MadeUpRoller()
        roller.listing = listing
        async with scheduler(tmp_path / "killed", roller, first_step=1, steps=2) as made:
            assert made.store.counts() == {1: finished}
            made.serve(1)
            batch = await made.batch(1)
        made.store.close()
        assert roller.snapshots == set()
        return batch, roller.begun

    expected = asyncio.run(whole())
    asyncio.run(killed())
    batch, begun = asyncio.run(again("a b", 3))
    assert begun == ["0/step1/fork1"]
    assert [group.attempts for group in batch.groups] == [group.attempts for group in expected.groups]
    # A whole batch comes from the store alone, and its recovery rates with it.
    batch, begun = asyncio.run(again("something else", 4))
    assert begun == [] and [g.attempts for g in batch.groups] == [g.attempts for g in expected.groups]


def test_what_a_batch_needs_of_those_before_outlives_their_acknowledgement(tmp_path):
    """Recovery rates, and where a run in rounds is: of 40 tokens each, one or two to reach 60 a step."""

    async def run(path, first, last):
        roller = MadeUpRoller()
        async with scheduler(path, roller, first_step=first, step_tokens=60) as made:
            for step in range(first, last):
                made.serve(step)
                batch = await made.batch(step)
                made.acknowledge(step + 1)
        made.store.close()
        assert roller.snapshots == set()
        return batch, made

    asyncio.run(run(tmp_path / "broken", 0, 2))
    found, again = asyncio.run(run(tmp_path / "broken", 2, 4))
    expected, whole = asyncio.run(run(tmp_path / "whole", 0, 4))
    assert again.rounds.to_dict() == whole.rounds.to_dict() == {"rounds": 6, "tokens": 240}
    assert again.pool.rates.to_dict() == whole.pool.rates.to_dict() != {}
    assert found == expected
    assert names(found) == [
        f"step3/{round_}{kind}{i}" for round_ in ("", "round1/") for kind in ("root", "fork") for i in (0, 1)
    ]
    roots = [group.task_id for group in found.groups if group.kind == "root"]
    assert roots == [t.id for index in (4, 5) for t in choose_tasks(TASKS, 2, 0, index)]


def test_a_lost_state_that_cannot_be_made_again_is_not_recovered_from(tmp_path):
    async def go(listing):
        roller = MadeUpRoller()
        if listing == "a b":
            roller.holds["0/step0/fork0"] = roller.holds["0/step0/fork1"] = asyncio.Event()
        roller.listing = listing
        async with scheduler(tmp_path / "groups", roller) as made:
            made.serve(0)
            batch = None
            if listing != "a b":
                batch = await made.batch(0)
            await settle()
        made.store.close()
        return batch

    asyncio.run(go("a b"))
    batch = asyncio.run(go("c"))
    assert names(batch) == ["step0/root0", "step0/root1"]


def test_acknowledged_batches_are_not_given_again(tmp_path):
    async def go():
        async with scheduler(tmp_path / "groups", MadeUpRoller()) as made:
            made.serve(1)
            await made.batch(0)
            assert (await made.batch(0)).groups == (await made.batch(0)).groups  # again, until acknowledged
            made.acknowledge(1)
            with pytest.raises(ScheduleError, match="no batch for step 0: those before 1 were consumed"):
                await made.batch(0)
            assert (await made.batch(1)).step == 1
        made.store.close()
        with pytest.raises(StoreError, match="consumed by a checkpoint that it no longer has"):
            scheduler(tmp_path / "groups", MadeUpRoller(), first_step=0)

    asyncio.run(go())


def test_a_fault_of_one_group_costs_that_group_and_another_error_the_batch(tmp_path):
    class Faulty(MadeUpRoller):
        fault = SandboxError("no daemon")

        async def root_group(self, task, size, seed, gate, keep):
            if self.fault and seed.endswith("root0"):
                raise self.fault
            return await super().root_group(task, size, seed, gate, keep)

    async def go():
        roller = Faulty()
        async with scheduler(tmp_path / "groups", roller) as made:
            made.serve(1)
            batch = await made.batch(0)
            assert Counter(a.outcome.status for a in batch.groups[0].attempts) == {"env_error": 2}
            assert batch.groups[0].rewards == [None, None] and len(batch.groups) == 3
            roller.fault = ZeroDivisionError("a mistake")
            made.serve(2)
            with pytest.raises(ZeroDivisionError):
                await made.batch(2)
            roller.fault = None
            assert (await made.batch(2)).groups[0].rewards == [0.0, 1.0]

    asyncio.run(go())


def test_failed_recoveries_wait_for_the_batch_after_in_order(tmp_path):
    async def go():
        roller = MadeUpRoller()
        pool = PoolConfig(max_depth=2, max_staleness=9)
        async with scheduler(tmp_path / "groups", roller, pool=pool, max_staleness=1, states=9) as made:
            made.serve(1)
            depths = []
            for step in range(3):
                batch = await made.batch(step)
                depths.append(sorted(group.state.depth for group in batch.groups if group.state))
        assert roller.snapshots == set()
        return depths

    assert asyncio.run(go()) == [[0, 0], [0, 0, 1, 1], [0, 0, 1, 1]]
