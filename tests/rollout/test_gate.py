"""Who is let in, and that nobody's place is lost."""

import asyncio

from reterm_jax.rollout.gate import PriorityGate


def test_the_most_urgent_first_then_who_came_first():
    async def go():
        gate, order = PriorityGate(2), []

        async def one(name, priority):
            async with gate.at(priority):
                assert gate.inside <= 2
                order.append(name)
                await asyncio.sleep(0)

        names = [("a", 1), ("b", 1), ("c", 1), ("d", 0), ("e", 0), ("f", 1)]
        await asyncio.gather(*(one(*name) for name in names))
        assert gate.inside == 0
        return order

    assert asyncio.run(go()) == ["a", "b", "d", "e", "c", "f"]


def test_cancelled_ones_leave_their_place_to_others():
    async def go():
        gate = PriorityGate(1)
        await gate.acquire(0)
        waiting = [asyncio.create_task(gate.acquire(0)) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        await asyncio.sleep(0)
        gate.release()
        waiting[1].cancel()  # let in, but not yet told so
        await asyncio.wait_for(waiting[2], 5)
        gate.release()
        await asyncio.wait_for(gate.acquire(0), 5)

    asyncio.run(go())
