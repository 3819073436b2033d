"""What one step of the RL loop trains on, and which of its numbers mean what."""

import asyncio
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.agent.turns import Turn
from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.live_processes import LiveProcesses
from reterm_jax.rollout.scheduler import Schedule
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.sandbox.base import ExecResult, Snapshot
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tokens.packing import Example
from reterm_jax.tokens.transcript import Span, Transcript
from reterm_jax.training import rl_loop
from reterm_jax.training.metrics import MetricsWriter, read_metrics
from reterm_jax.training.rl_loop import RLConfig, Validation
from reterm_jax.training.rollouts import local_rollouts
from reterm_jax.training.steps import StepConfig, make_rl_step
from reterm_jax.training.stopping import GracefulStop


def config(**changes):
    values = dict(
        steps=2, tasks=2, attempts=4, states=2, forks=4, fork_at="end", recovery_weight=1.0, baseline="mean",
        standardise=False, failed_credit=0.0, epochs=3, updates=2, row_length=32, forked=True, save_every=1,
        validate_every=0, validation_tasks=0, validation_attempts=1, seed=0,
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


def sampled(name, rng, reward):
    ids = tuple(int(i) for i in rng.integers(0, 32, 9))
    spans = [Span("prompt", ids[:4]), Span("policy", ids[4:], tuple(rng.uniform(-4, -3, 5)), 0)]
    return Attempt(name, "task", Transcript(spans), outcome=Outcome.from_reward(reward), turns=[Turn("", "ls", "", 0)])


class Sampler:
    def update(self, params, version):
        self.params, self.version = params, version


class MadeUp:
    """A roller whose groups are functions of their seeds; also its sandboxes, in which all commands are silent."""

    concurrent, limits, live_processes = 1, SimpleNamespace(command_timeout=1, output_limit=9), LiveProcesses()

    def __init__(self, stop, stop_in):
        self.stop, self.stop_in, self.rolled = stop, stop_in, []
        self.host = self

    async def start(self, task):
        return self

    async def exec(self, command, **_):
        return ExecResult("", 0, 0.1, False)

    async def snapshot(self):
        return Snapshot("again", "bubblewrap", "")

    async def close(self):
        pass

    async def release(self, snapshot):
        pass

    async def root_group(self, task, size, seed, gate, keep):
        await asyncio.sleep(0)
        self.rolled.append(seed)
        if seed == self.stop_in:
            self.stop.requested = True
            await asyncio.sleep(60)
        rng = np.random.default_rng(seed_of(seed))
        attempts = [sampled(f"{seed}/{i}", rng, float(i % 2)) for i in range(size)]
        return Group("root", task.id, tuple(attempts)), [
            FailureState.of(attempt, Snapshot(attempt.id, "bubblewrap", "")) for attempt in attempts[::2]
        ]

    async def recovery_group(self, task, state, forks, seed, gate, keep):
        self.rolled.append(seed)
        rng = np.random.default_rng(seed_of(seed))
        attempts = [sampled(f"{seed}/{i}", rng, float(rng.integers(2))) for i in range(forks)]
        return Group("recovery", task.id, tuple(attempts), state), []


@pytest.fixture
def job(tmp_path, policy, sft):
    """A function that trains in a directory and returns the state (None where it was stopped), with what it logged.

    The rollouts are made up by their seed; what is real is updates, checkpoints, scheduler and store.
    """
    step = make_rl_step(policy.config, StepConfig(micro_rows=2), sft.optimizer, policy.mesh, policy.shardings)
    user = SimpleNamespace(agent=SimpleNamespace(user=None))
    tasks = [SimpleNamespace(id=f"task{i}", config=user) for i in range(3)]

    def train(name, stop_in=None, **changes):
        settings, stop, lines = config(**{"steps": 4, "save_every": 3, **changes}), GracefulStop(), []
        roller = train.roller = MadeUp(stop, stop_in)
        shared = {key: getattr(settings, key) for key in ("seed", "steps", "tasks", "attempts", "states", "forks")}
        with (
            Checkpointer(tmp_path / name / "checkpoints") as saved,
            MetricsWriter(tmp_path / name, resume_step=saved.latest_step or 0, tensorboard=False) as metrics,
        ):
            first, state, record = saved.latest_step or 0, policy.new_state(sft.optimizer), None
            if first:
                state, record = saved.restore(policy.abstract_state(sft.optimizer))
            options = {"checkpointer": saved, "metrics": metrics, "stop": stop, "log": lines.append}
            place = {"path": tmp_path / name / "groups", "first_step": first, "saved": record, "log": lines.append}
            try:
                rollouts = local_rollouts(Schedule(**shared), settings.pool, tasks, roller, Sampler(), **place)
                with stop.deferred():
                    state = asyncio.run(rl_loop.run(settings, rollouts, state, step, first_step=first, **options))
                return state, saved.metadata(), lines
            except KeyboardInterrupt:
                return None, saved.metadata(), lines

    return train


def test_a_run_stopped_in_a_rollout_saves_and_ends_exactly_like_an_unbroken_one(tmp_path, job):
    whole, record, _ = job("whole")
    stopped, halfway, lines = job("broken", stop_in="0/step2/root1")
    assert stopped is None and halfway["rl_step"] == 2  # save_every is 3
    assert "stopped after step 2" in lines[-1]
    resumed, again, _ = job("broken")
    assert "0/step2/root0" not in job.roller.rolled  # it was finished, and kept
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)
    assert again == record and set(record["recovery_rates"]) == {"task0", "task1", "task2"}
    losses = [[(m["step"], m["train/loss"]) for m in read_metrics(tmp_path / name)] for name in ("whole", "broken")]
    assert losses[0] == losses[1] and [step for step, _ in losses[0]] == [1, 2, 3, 4]


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
