"""What one step of the RL loop trains on, and which of its numbers mean what."""

import asyncio
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from made_up import MadeUpRoller, task
from made_up_service import IDENTITY, Running, opening

from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.rollout.client import ServiceClient
from reterm_jax.rollout.protocol import tokenizer_digest
from reterm_jax.rollout.scheduler import Schedule
from reterm_jax.rollout.store import GroupStore
from reterm_jax.serving.published import Manifest, Probe
from reterm_jax.tokens.packing import Example
from reterm_jax.training import rl_loop
from reterm_jax.training.metrics import MetricsWriter, read_metrics
from reterm_jax.training.remote_rollouts import RemoteRollouts
from reterm_jax.training.rl_loop import RLConfig, Validation
from reterm_jax.training.rollouts import local_rollouts
from reterm_jax.training.steps import StepConfig, make_rl_step
from reterm_jax.training.stopping import GracefulStop


def config(**changes):
    values = dict(
        steps=2, tasks=2, attempts=4, states=2, forks=4, step_tokens=0, fork_at="end", recovery_weight=1.0,
        baseline="mean", standardise=False, failed_credit=0.0, zero_advantage=False, epochs=3, updates=2,
        row_length=32, forked=True, save_every=1, validate_every=0, validation_tasks=0, validation_attempts=1, seed=0,
    )  # fmt: skip
    return RLConfig(**{**values, **changes})


def test_every_epoch_goes_over_all_examples_once():
    examples = [Example([100 + i, i], [False, True], advantage=1.0) for i in range(7)]
    seen = []

    def step(state, batch):
        seen.append(sorted(batch.targets[batch.loss_mask].tolist()))
        return state + 1, {"train/loss": float(len(seen)), "train/logprob_diff_mean": float(len(seen))}

    state, values = rl_loop._train(config(), 0, examples, 0, step)
    assert state == 6
    epochs = [sorted(seen[i] + seen[i + 1]) for i in range(0, 6, 2)]
    assert epochs == [list(range(7))] * 3
    assert seen[0] != seen[2]  # another cut each time
    assert values["train/loss"] == np.mean(range(1, 7))
    # The policy that sampled is the one that the first update starts from.
    assert values["train/logprob_diff_mean"] == 1.0


def test_nothing_to_learn_from_is_said_and_changes_nothing():
    state, values = rl_loop._train(config(), 0, [], "state", lambda *_: pytest.fail("no update"))
    assert state == "state" and values == {"train/skipped": 1.0}


class Sampler:
    async def idle(self):
        pass

    def update(self, params, version):
        self.params, self.version = params, version


class StoppingRoller(MadeUpRoller):
    """Has the run stopped when it comes to one of its groups."""

    def __init__(self, stop, stop_in):
        super().__init__()
        self.stop, self.stop_in = stop, stop_in

    async def root_group(self, task, size, seed, gate, keep):
        if seed == self.stop_in:
            self.stop.requested = True
            await asyncio.sleep(60)
        return await super().root_group(task, size, seed, gate, keep)


def schedule_of(settings, **changes):
    names = ("seed", "steps", "tasks", "attempts", "states", "forks", "step_tokens")
    return Schedule(**{name: getattr(settings, name) for name in names}, **changes)


@pytest.fixture
def job(tmp_path, policy, sft):
    """A function that trains in a directory and returns the state (None where it was stopped), with what it logged.

    The rollouts are made up by their seed; what is real is updates, checkpoints, scheduler and store. `rollouts` makes
    them from the config, the first step and the checkpoint's record.
    """
    step = make_rl_step(policy.config, StepConfig(micro_rows=2), sft.optimizer, policy.mesh, policy.shardings)

    def train(name, stop_in=None, rollouts=None, **changes):
        settings, stop, lines = config(**{"steps": 4, "save_every": 3, **changes}), GracefulStop(), []
        roller = train.roller = StoppingRoller(stop, stop_in)
        place = {"path": tmp_path / name / "groups", "log": lines.append}

        def in_process(first, record):
            tasks = [task(f"task{i}") for i in range(3)]
            arguments = schedule_of(settings), settings.pool, tasks, roller, Sampler()
            return local_rollouts(*arguments, first_step=first, saved=record, **place)

        with (
            Checkpointer(tmp_path / name / "checkpoints") as saved,
            MetricsWriter(tmp_path / name, resume_step=saved.latest_step or 0, tensorboard=False) as metrics,
        ):
            first, state, record = saved.latest_step or 0, policy.new_state(sft.optimizer), None
            if first:
                state, record = saved.restore(policy.abstract_state(sft.optimizer))
            options = {"checkpointer": saved, "metrics": metrics, "stop": stop, "log": lines.append}
            try:
                made = (rollouts or in_process)(first, record)
                with stop.deferred():
                    state = asyncio.run(rl_loop.run(settings, made, state, step, first_step=first, **options))
                return state, saved.metadata(), lines
            except KeyboardInterrupt:
                return None, saved.metadata() if saved.latest_step else None, lines

    return train


def test_a_run_stopped_in_a_rollout_saves_and_ends_exactly_like_an_unbroken_one(tmp_path, job):
    whole, record, _ = job("whole")
    stopped, halfway, lines = job("broken", stop_in="0/step2/root1")
    assert stopped is None and halfway["rl_step"] == 2  # save_every is 3
    assert "stopped after step 2" in lines[-1]
    resumed, again, _ = job("broken")
    assert "0/step2/root0" not in job.roller.begun  # it was finished, and kept
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    assert again == record
    losses = [[(m["step"], m["train/loss"]) for m in read_metrics(tmp_path / name)] for name in ("whole", "broken")]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [1, 2, 3, 4]


class Killed(BaseException):
    """Of the trainer, in the middle of a step: it acknowledges and saves nothing more."""


def test_trainer_and_service_killed_in_turn_train_on_the_same_groups_once(tmp_path, job):
    """Over real HTTP, from a real store. What is published is a version alone; groups are functions of their seeds."""
    settings = config(steps=6)
    published, seen = tmp_path / "published", []

    class Publisher:
        def discard_from(self, version):
            pass

        def publish(self, version, params):
            self.path(version).mkdir(parents=True, exist_ok=True)
            (self.path(version) / "manifest.json").write_text(Manifest(version, {}, Probe((1, 2), (-1.0,))).to_json())

        def path(self, version):
            return published / str(version)

        def wait(self):
            pass

        def close(self):
            pass

    class Watched(RemoteRollouts):
        """Notes what is trained on, and has accidents before steps."""

        async def batch(self, step):
            accident = self.accidents.pop(step, None)
            if accident is not None:
                await asyncio.to_thread(accident)
            batch = await super().batch(step)
            seen.append((step, [attempt.id for group in batch.groups for attempt in group.attempts]))
            return batch

    def served(service, accidents):
        def rollouts(first, record):
            client = ServiceClient(service().url, log=lambda line: None)
            asked = opening(tokenizer=tokenizer_digest(published), first_step=first)
            made = Watched(client, Publisher(), asked, settings.steps)
            made.accidents = accidents
            return made

        return rollouts

    def run(name, accidents):
        schedule = schedule_of(settings, max_staleness=1)
        running = [Running(tmp_path / f"{name}.groups", schedule=schedule)]

        def kill_service():
            port = int(running[-1].url.rpartition(":")[2])
            running[-1].end()
            running.append(Running(tmp_path / f"{name}.groups", schedule=schedule, port=port))

        def kill_trainer():
            raise Killed

        kills = {"service": kill_service, "trainer": kill_trainer}
        accidents = {step: kills[who] for step, who in accidents.items()}
        try:
            while True:
                try:
                    return job(name, rollouts=served(lambda: running[-1], accidents), steps=6, save_every=2)
                except Killed:
                    pass
        finally:
            running[-1].end()
            with GroupStore(tmp_path / f"{name}.groups", IDENTITY) as store:
                assert store.counts() == {} and store.acknowledged == 6

    whole, _, _ = run("whole", {})
    expected, seen = seen, []
    broken, _, _ = run("broken", {1: "service", 3: "trainer", 4: "service", 5: "trainer"})
    jax.tree.map(np.testing.assert_array_equal, whole, broken)
    losses = [[(m["step"], m["train/loss"]) for m in read_metrics(tmp_path / name)] for name in ("whole", "broken")]
    assert losses[0] == losses[1] and len(losses[0]) == 6
    # The steps after the checkpoints of 2 and 4 came again, with the very groups that they had before.
    assert [step for step, _ in seen] == [0, 1, 2, 2, 3, 4, 4, 5] and dict(seen) == dict(expected)
    assert all(found == dict(expected)[step] for step, found in seen)


def test_states_that_waited_when_the_run_was_killed_are_gone_and_it_says_so(job, monkeypatch):
    job("killed", steps=3)
    real = Checkpointer.restore

    def restore(self, abstract, step=None):
        state, record = real(self, abstract, step)
        return state, record | {"waiting_states": 7}

    monkeypatch.setattr(Checkpointer, "restore", restore)
    _, record, lines = job("killed")
    assert lines[0].startswith("rl: 7 failure states waited") and record["waiting_states"] == 0


def test_the_best_state_is_kept_and_a_tie_keeps_the_earlier(tmp_path, policy, sft):
    rewards = iter([0.25, 0.75, 0.75, None, 0.5])

    class Scripted:
        async def validate(self, tasks, attempts, seed):
            assert ([task.id for task in tasks], attempts, seed) == (["t"], 1, "0/validation")
            return [SimpleNamespace(rewards=[next(rewards), None])]

    with Checkpointer(tmp_path) as best:
        validation = Validation([SimpleNamespace(id="t")], best)
        state = policy.new_state(sft.optimizer)
        found = [asyncio.run(validation(Scripted(), config(), step, state)) for step in range(1, 6)]
        assert best.latest_step == 2 and best.metadata()["reward"] == 0.75
        np.testing.assert_array_equal(found, [0.25, 0.75, 0.75, np.nan, 0.5])
        best.discard_after(1)
        assert best.latest_step == 1 and best.metadata()["reward"] == 0.25
