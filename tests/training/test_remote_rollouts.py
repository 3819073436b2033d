"""The trainer's side of a service: what is published and fetched when, and what becomes of errors."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from reterm_jax.agent.attempt import Attempt
from reterm_jax.rollout.client import ServiceError
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.protocol import Opened, Opening, Ready, Served
from reterm_jax.rollout.wire import encode_group
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.training.remote_rollouts import RemoteRollouts


def group(name):
    return Group("root", "task", (Attempt.not_run(name, "task", Outcome(None, "env_error", "made up")),))


class Publisher:
    def __init__(self):
        self.done, self.begun, self.closed = [], None, False

    def discard_from(self, version):
        self.discarded = version

    def publish(self, version, params):
        self.begun = version

    def wait(self):
        self.done.append(self.begun)

    def path(self, version):
        return f"published/{version}"

    def close(self):
        self.closed = True


class Client:
    """A service that has the batch of a step when it serves the version of `step - staleness`."""

    def __init__(self, staleness=0):
        self.staleness, self.served, self.calls, self.refuses = staleness, -1, [], False
        self.changed, self.closed = threading.Condition(), False

    def open(self, opening):
        self.calls.append("open")
        return Opened(None)

    def weights(self, weights):
        if self.refuses:
            raise ServiceError("refused (502): stale")
        with self.changed:
            self.served = weights.version
            self.calls.append(weights.directory)
            self.changed.notify_all()
        return Served({"http://x": "gone"}, 0.1)

    def batch(self, step):
        with self.changed:
            self.changed.wait_for(lambda: self.closed or self.served >= step - self.staleness, timeout=30)
            self.calls.append(f"batch {step}")
        if self.closed:
            raise ServiceError("the client was closed")
        return Ready(step, ["root0", "root1"], {"rollout/refilled_groups": 0.0}), [
            encode_group(group(f"{step}/{index}")) for index in range(2)
        ]

    def acknowledge(self, step):
        self.calls.append(f"acknowledge {step}")

    def validate(self, validation):
        return group(f"{self.served}/{validation.seed}")

    def close(self):
        with self.changed:
            self.closed = True
            self.changed.notify_all()


def remote(client, publisher, first_step=0, steps=3):
    return RemoteRollouts(client, publisher, Opening({}, {}, {}, "", first_step), steps)


async def until(condition):
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("did not happen")


def test_each_step_is_published_served_and_trained_on():
    client, publisher = Client(), Publisher()

    async def go():
        async with remote(client, publisher) as rollouts:
            await rollouts.publish(0, "params")
            for step in range(3):
                batch = await rollouts.batch(step)
                assert batch.step == step and batch.groups == [group(f"{step}/0"), group(f"{step}/1")]
                await rollouts.publish(step + 1, "params")
                rollouts.acknowledge(step + 1)
            validated = await rollouts.validate([SimpleNamespace(id="a"), SimpleNamespace(id="b")], 2, "s")
            assert validated == [group("3/s/a"), group("3/s/b")]  # by the version published last
            return batch.facts

    facts = asyncio.run(go())
    assert publisher.discarded == 0 and publisher.closed and client.closed
    assert [call for call in client.calls if "published" in call] == [f"published/{n}" for n in range(4)]
    assert [call for call in client.calls if "batch" in call] == ["batch 0", "batch 1", "batch 2"]
    assert facts["rollout/refilled_groups"] == 0 and facts["rollout/samplers_down"] == 1
    assert {"rollout/publish_seconds", "rollout/update_seconds"} <= set(facts)


def test_the_next_batch_is_fetched_while_the_trainer_updates():
    client = Client(staleness=1)

    async def go():
        async with remote(client, Publisher()) as rollouts:
            await rollouts.publish(0, "params")
            await rollouts.batch(0)
            await until(lambda: "batch 1" in client.calls)  # nobody has asked for it
            assert client.served == 0

    asyncio.run(go())


def test_weights_that_samplers_refuse_end_the_wait_for_a_batch():
    client = Client()

    async def go():
        async with remote(client, Publisher()) as rollouts:
            client.refuses = True
            await rollouts.publish(0, "params")
            await asyncio.wait_for(rollouts.batch(0), 20)

    with pytest.raises(ServiceError, match="stale"):
        asyncio.run(go())


def test_a_stop_does_not_wait_for_a_batch():
    client, publisher = Client(), Publisher()

    async def go():
        async with remote(client, publisher, first_step=2) as rollouts:
            await rollouts.publish(2, "params")
            await rollouts.batch(2)
            waiting = asyncio.create_task(rollouts.batch(2))
            client.served = 0
            await asyncio.sleep(0.05)
            waiting.cancel()
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(go())
    assert publisher.discarded == 2 and publisher.closed
