import asyncio
import os
import signal

import pytest

from reterm_jax.training.stopping import GracefulStop


@pytest.fixture
def stop():
    made = GracefulStop()
    before = signal.signal(signal.SIGTERM, made.handle)
    yield made
    signal.signal(signal.SIGTERM, before)


def test_outside_a_loop_a_signal_interrupts_at_once(stop):
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)


def test_a_loop_ends_where_its_state_is_whole_and_a_second_signal_does_not_wait(stop):
    done = []
    with pytest.raises(KeyboardInterrupt), stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        done.append(stop.requested)
    with pytest.raises(KeyboardInterrupt), stop.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        done.append("too late")
    assert done == [True]


def test_work_is_cancelled_and_unwinds(stop):
    left = []

    async def work(seconds):
        try:
            await asyncio.sleep(seconds)
            return "done"
        finally:
            left.append(seconds)

    async def go():
        with stop.deferred():
            assert await stop.unless_requested(work(0), every=0.01) == "done"
            asyncio.get_running_loop().call_later(0.05, os.kill, os.getpid(), signal.SIGTERM)
            assert await stop.unless_requested(work(60), every=0.01) is None
            assert left == [0, 60]

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(go())
    assert left == [0, 60]


def test_what_work_raises_comes_out(stop):
    async def work():
        raise ValueError("boom")

    with pytest.raises(ValueError, match="boom"):
        asyncio.run(stop.unless_requested(work()))
