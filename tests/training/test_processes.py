"""An update, scores and a checkpoint on two processes with two devices each, against one device."""

SCRIPT = """
import sys
import jax, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
rank, port, root = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from jax.experimental import multihost_utils
from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import abstract_params, init_params, param_specs
from reterm_jax.tokens.packing import Example, pack
from reterm_jax.training.optimizer import OptimizerConfig, make_optimizer
from reterm_jax.training.state import abstract_state, init_state, state_from_params
from reterm_jax.training.steps import StepConfig, make_rl_step, make_score

config = QwenConfig("qwen3", 32, 16, 24, 1, 2, 2, 8, ("full_attention",), compute_dtype="float32", remat="none")
rng = np.random.default_rng(0)
examples = [
    Example(rng.integers(0, 32, n), np.arange(n) > 1, float(rng.normal()), np.full(n, -3.0)) for n in range(4, 17)
]
batch, _ = pack(examples, length=16)
assert batch.rows > 4
optimizer = make_optimizer(OptimizerConfig(learning_rate=1e-2), param_specs(config), 10)
results = []
for mesh in (make_mesh(devices=jax.local_devices()[:1]), make_mesh(2, 2, 1)):
    shardings = param_shardings(config, mesh)
    state = init_state(lambda key: init_params(config, key), jax.random.key(0), optimizer, mesh, shardings)
    state = state_from_params(state.params, optimizer, mesh, shardings)
    logprobs, _ = make_score(config, StepConfig(micro_rows=4), mesh, shardings)(state.params, batch)
    step = make_rl_step(config, StepConfig(micro_rows=4), optimizer, mesh, shardings)
    for _ in range(2):
        state, metrics = step(state, batch)
    whole = jax.tree.map(lambda x: multihost_utils.process_allgather(x, tiled=True), state.params) if len(
        results) else jax.tree.map(np.asarray, state.params)
    results.append((logprobs, whole, float(metrics["train/loss"])))
assert len(state.params["embed"].sharding.device_set) == 4
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-5), *results)

with Checkpointer(root) as saved:
    saved.save(2, state, {"said": "by both"})
    expected = [np.asarray(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]
    state, _ = step(state, batch)  # while it is written
    abstract = abstract_state(abstract_params(config), optimizer, mesh, shardings)
    state, record = saved.restore(abstract)
    assert record["said"] == "by both" and saved.latest_step == 2
    found = [np.asarray(s.data) for x in jax.tree.leaves(state) for s in x.addressable_shards]
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)
print("done")
"""


def test_two_processes_make_the_same_update_as_one_device(on_two_processes, tmp_path):
    on_two_processes(SCRIPT, tmp_path / "checkpoints")
