import errno
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reterm_jax.checkpoint.checkpointer import Checkpointer, CheckpointError
from reterm_jax.training.state import TrainState

OPTIMIZER = optax.adam(0.1)


def make_state(hidden=4, step=0, layers=2, optimizer=OPTIMIZER):
    params = {
        "embed": jnp.arange(8.0 * hidden).reshape(8, hidden),
        "layers": {"q_proj": jnp.full((layers, hidden, 3), 0.5), "norm": jnp.ones((layers, hidden))},
    }
    opt_state = jax.tree.map(lambda x: x + 1, optimizer.init(params))
    return TrainState(params=params, opt_state=opt_state, step=jnp.int32(step))


def abstract(state):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)


def test_round_trip_of_state_and_metadata(tmp_path):
    state = make_state(step=7)
    with Checkpointer(tmp_path, fingerprint="abc") as saved:
        assert saved.latest_step is None
        saved.save(7, state, {"consumed": ["g1", "g2"], "tokens": 5})
    with Checkpointer(tmp_path, fingerprint="abc") as saved:
        restored, metadata = saved.restore(abstract(state))
        params = saved.restore_params(abstract(state).params)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, restored, state)
    jax.tree.map(np.testing.assert_array_equal, params, state.params)
    assert metadata == {"fingerprint": "abc", "step": 7, "consumed": ["g1", "g2"], "tokens": 5}


def test_an_average_is_restored_and_is_what_evaluation_and_export_get(tmp_path):
    plain = make_state(step=1)
    averaged = plain.replace(average=jax.tree.map(lambda x: x / 2, plain.params))
    with Checkpointer(tmp_path) as saved:
        saved.save(1, averaged)
        restored, _ = saved.restore(abstract(averaged))
        result = saved.restore_params(abstract(plain).params)
        without, _ = saved.restore(abstract(plain))
        saved.save(2, plain)
        with pytest.raises(CheckpointError, match="another average of the parameters: average embed is missing there"):
            saved.restore(abstract(averaged))
    jax.tree.map(np.testing.assert_array_equal, restored, averaged)
    jax.tree.map(np.testing.assert_array_equal, result, averaged.average)
    assert without.average is None


def test_only_the_latest_are_kept(tmp_path):
    with Checkpointer(tmp_path, keep=2) as saved:
        for step in (1, 2, 3):
            saved.save(step, make_state(step=step))
        assert saved.latest_step == 3
        assert int(saved.restore(abstract(make_state()), step=2)[0].step) == 2
        with pytest.raises(CheckpointError, match=r"no checkpoint of step 1; it has \[2, 3\]"):
            saved.metadata(1)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (make_state(hidden=6), r"another model: params embed is of shape \[8, 4\] there and of shape \[8, 6\] in this"),
        (make_state(layers=3), r"another model: params layers.norm is of shape \[2, 4\] there and of shape \[3, 4\]"),
        (make_state(optimizer=optax.sgd(0.1, momentum=0.9)), "another optimizer: opt_state .* missing"),
    ],
)
def test_a_checkpoint_of_another_model_or_optimizer_names_the_first_difference(tmp_path, other, message):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, make_state())
        with pytest.raises(CheckpointError, match=message):
            saved.restore(abstract(other))


def test_a_missing_parameter_is_named(tmp_path):
    state = make_state()
    wanted = abstract(state).params
    wanted["lm_head"] = wanted["embed"]
    with Checkpointer(tmp_path) as saved:
        saved.save(1, state)
        with pytest.raises(CheckpointError, match=r"lm_head is missing there and of shape \[8, 4\]"):
            saved.restore_params(wanted)
        del wanted["lm_head"], wanted["embed"]
        with pytest.raises(CheckpointError, match=r"embed is of shape \[8, 4\] there and missing in this"):
            saved.restore_params(wanted)


def test_a_checkpoint_of_another_configuration_is_refused_and_left_alone(tmp_path):
    with Checkpointer(tmp_path, fingerprint="abc") as saved:
        saved.save(1, make_state())
    with Checkpointer(tmp_path, fingerprint="xyz") as saved:
        with pytest.raises(CheckpointError, match="another configuration .*--workdir"):
            saved.restore(abstract(make_state()))
        assert saved.latest_step == 1


def test_an_empty_directory_is_an_error_that_says_so(tmp_path):
    with Checkpointer(tmp_path) as saved, pytest.raises(CheckpointError, match="no finished checkpoint"):
        saved.restore(abstract(make_state()))


def test_a_full_disk_is_reported_and_the_previous_step_survives(tmp_path, monkeypatch):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, make_state(step=1))

        def full(*_, **__):
            raise ValueError("write failed") from OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patched:
            patched.setattr(saved._manager, "save", full)
            with pytest.raises(CheckpointError, match="no space left to save step 2 .* continues from step 1"):
                saved.save(2, make_state(step=2))
        assert int(saved.restore(abstract(make_state()))[0].step) == 1


def test_training_goes_on_while_a_step_is_written_and_does_not_change_what_is_written(tmp_path):
    """Updates donate the buffers of the state that is being saved."""
    update = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    params = {str(i): jnp.full((512, 512), float(i)) for i in range(8)}
    state = TrainState(params=params, opt_state=(), step=jnp.int32(0))
    described = abstract(state)
    with Checkpointer(tmp_path) as saved:
        for step in range(3):
            saved.save(step, state.replace(step=jnp.int32(step)))
            for _ in range(10):
                state = state.replace(params=update(state.params))
            jax.block_until_ready(state.params)
            restored, _ = saved.restore(described, step)
            for i in range(8):
                np.testing.assert_array_equal(restored.params[str(i)], i + 10.0 * step)


SAVE_UNTIL_FULL = """
import sys
import jax, jax.numpy as jnp
from reterm_jax.checkpoint.checkpointer import Checkpointer, CheckpointError
from reterm_jax.training.state import TrainState
def state(step, size):  # random, so that compression does not help
    return TrainState(params={"w": jax.random.normal(jax.random.key(0), (size,))}, opt_state=(), step=jnp.int32(step))
with Checkpointer(sys.argv[1]) as saved:
    saved.save(1, state(1, 1000))
    try:
        saved.save(2, state(2, 1_000_000))
        saved.wait()
    except CheckpointError as error:
        print(error)
    saved.save(3, state(3, 1000))
    print(saved.latest_step)
"""


def test_a_disk_that_is_really_full_is_one_line_and_leaves_room_for_the_next_save(tmp_path):
    mount = f'mount -t tmpfs -o size=2m none {tmp_path} && exec "$@"'
    prefix = ["unshare", "--user", "--map-root-user", "--mount", "sh", "-c", mount, "sh"]
    if subprocess.run([*prefix, "true"], capture_output=True).returncode != 0:
        pytest.skip("cannot mount a small file system here")
    done = subprocess.run(
        [*prefix, sys.executable, "-c", SAVE_UNTIL_FULL, str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    message, latest = done.stdout.splitlines()
    assert message.startswith(f"no space left to save step 2 in {tmp_path}") and "continues from step 1" in message
    assert latest == "3"
    assert "Traceback" not in done.stderr, done.stderr


def test_other_failures_are_not_called_a_full_disk(tmp_path):
    with Checkpointer(tmp_path) as saved, pytest.raises(TypeError):
        saved.save(1, make_state(), {"not json": object()})


SAVE_FOREVER = """
import sys
import jax.numpy as jnp
from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.training.state import TrainState
saved = Checkpointer(sys.argv[1])
step = saved.latest_step or 0
while True:
    step += 1
    params = {str(i): jnp.full((256, 256), float(step)) for i in range(20)}
    saved.save(step, TrainState(params=params, opt_state=(), step=jnp.int32(step)))
    print(step, flush=True)
"""


def test_a_kill_while_saving_leaves_the_previous_step_whole(tmp_path):
    """Three kills at different moments of a save, each continued from where the last one left it."""
    state = TrainState(params={str(i): jnp.zeros((256, 256)) for i in range(20)}, opt_state=(), step=jnp.int32(0))
    reported = 0
    for delay in (0.03, 0.08, 0.15):
        writer = subprocess.Popen(
            [sys.executable, "-c", SAVE_FOREVER, str(tmp_path)], stdout=subprocess.PIPE, text=True
        )
        for _ in range(2):
            reported = int(writer.stdout.readline())
        time.sleep(delay)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        with Checkpointer(tmp_path) as saved:
            restored, _ = saved.restore(abstract(state))
            # The last save to return may be under way still; the one before it had to end first.
            assert saved.latest_step >= reported - 1 and int(restored.step) == saved.latest_step
            for value in restored.params.values():
                np.testing.assert_array_equal(value, float(saved.latest_step))


def test_unfinished_directories_do_not_count_and_are_removed(tmp_path):
    with Checkpointer(tmp_path) as saved:
        saved.save(1, make_state(step=1))
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    with Checkpointer(tmp_path) as saved:
        assert saved.latest_step == 1
        saved.save(2, make_state(step=2))
        assert saved.latest_step == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "2"]
