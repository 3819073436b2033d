import jax
import numpy as np
import pytest

from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.training.metrics import MetricsWriter, read_metrics
from reterm_jax.training.sft_loop import PackedEpochs, SFTConfig, run
from reterm_jax.training.stopping import GracefulStop

CONFIG = SFTConfig(epochs=2, row_length=16, rows_per_update=2, seed=3, log_every=2, checkpoint_every=2)


@pytest.fixture(scope="module")
def job(sft, examples):
    return PackedEpochs(examples, CONFIG), sft.optimizer, sft.step


def test_each_epoch_visits_every_row_once_in_its_own_order(job):
    data, *_ = job
    epochs = [
        np.concatenate([data.batch(e * data.steps_per_epoch + i).tokens for i in range(data.steps_per_epoch)])
        for e in range(2)
    ]
    rows = sorted(map(bytes, data.packed.tokens))
    for tokens in epochs:
        assert sorted(bytes(row) for row in tokens if row.any()) == rows
    assert not np.array_equal(*epochs)


def test_the_order_depends_on_the_seed(examples, job):
    data, *_ = job
    other = PackedEpochs(examples, SFTConfig(**{**vars(CONFIG), "seed": 4}))
    batches = [[d.batch(i).tokens for i in range(data.steps_per_epoch)] for d in (data, other)]
    assert not np.array_equal(*batches)


def test_a_run_stopped_after_a_checkpoint_ends_exactly_like_an_unbroken_one(tmp_path, policy, job):
    data, optimizer, step = job

    def train(directory, state, resume_step, stop_after=None):
        lines = []

        def limited(state, batch):
            if stop_after is not None and int(state.step) >= stop_after:
                raise KeyboardInterrupt
            return step(state, batch)

        with (
            Checkpointer(directory / "checkpoints") as saved,
            MetricsWriter(directory, resume_step=resume_step, tensorboard=False) as metrics,
        ):
            if resume_step:
                assert saved.latest_step == resume_step
                state, metadata = saved.restore(policy.abstract_state(optimizer))
                assert metadata["examples"] == 8
            try:
                options = {"checkpointer": saved, "metrics": metrics, "metadata": {"examples": 8}, "log": lines.append}
                state = run(data, state, limited, CONFIG, **options)
            except KeyboardInterrupt:
                return None, lines
        return state, lines

    whole, lines = train(tmp_path / "whole", policy.new_state(optimizer), 0)
    broken, _ = train(tmp_path / "broken", policy.new_state(optimizer), 0, stop_after=3)
    assert broken is None
    resumed, _ = train(tmp_path / "broken", None, 2)
    jax.tree.map(np.testing.assert_array_equal, whole, resumed)

    losses = [[(m["step"], m["train/loss"]) for m in read_metrics(tmp_path / d)] for d in ("whole", "broken")]
    assert losses[0] == losses[1]
    assert [step for step, _ in losses[0]] == list(range(1, data.total_steps + 1))
    assert "loss tokens in" in lines[0] and lines[-1].startswith(f"sft    {data.total_steps}/{data.total_steps}  loss ")


def test_a_requested_stop_saves_the_update_that_ran(tmp_path, policy, job):
    data, optimizer, step = job
    stop = GracefulStop()

    def stopped_by_the_third(state, batch):
        stop.requested = int(state.step) == 2
        return step(state, batch)

    with Checkpointer(tmp_path / "checkpoints") as saved, MetricsWriter(tmp_path, tensorboard=False) as metrics:
        options = {"checkpointer": saved, "metrics": metrics, "stop": stop, "log": lambda _: None}
        with pytest.raises(KeyboardInterrupt):
            run(data, policy.new_state(optimizer), stopped_by_the_third, CONFIG, **options)
        assert saved.latest_step == 3 and int(saved.restore(policy.abstract_state(optimizer))[0].step) == 3
    assert [line["step"] for line in read_metrics(tmp_path)] == [1, 2, 3]


def test_a_finished_run_does_nothing_more(tmp_path, policy, job):
    data, optimizer, step = job
    state = policy.new_state(optimizer).replace(step=jax.numpy.int32(data.total_steps))
    with MetricsWriter(tmp_path, tensorboard=False) as metrics:
        assert run(data, state, step, CONFIG, checkpointer=None, metrics=metrics, log=lambda _: None) is state
    assert read_metrics(tmp_path) == []


def test_errors_say_what_is_missing():
    with pytest.raises(ValueError, match="no examples"):
        PackedEpochs([], CONFIG)
    with pytest.raises(ValueError, match="epochs must be at least 1"):
        SFTConfig(epochs=0)
