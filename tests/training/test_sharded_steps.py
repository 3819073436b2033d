"""The same update on one device and on eight simulated ones, in a process of its own (devices are fixed at start)."""

import subprocess
import sys

import pytest

PLAIN = """
import jax, numpy as np
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import init_params, param_specs
from reterm_jax.tokens.packing import Example, pack
from reterm_jax.training.optimizer import OptimizerConfig, make_optimizer
from reterm_jax.training.state import init_state
from reterm_jax.training.steps import StepConfig, make_rl_step

config = QwenConfig("qwen3", 32, 16, 24, 1, 2, 2, 8, ("full_attention",), compute_dtype="float32", remat="none")
rng = np.random.default_rng(0)
examples = [
    Example(rng.integers(0, 32, n), np.arange(n) > 1, float(rng.normal()), np.full(n, -3.0)) for n in range(4, 17)
]
batch, _ = pack(examples, length=16)
results = []
for name in ("muon",):  # Adam is in it, for what is no matrix
    optimizer = make_optimizer(OptimizerConfig(name, 1e-2, weight_decay=0.1), param_specs(config), 10)
    for axes in ((1, 1, 1), (2, 2, 2)):
        mesh = make_mesh(*axes)
        shardings = param_shardings(config, mesh)
        state = init_state(lambda key: init_params(config, key), jax.random.key(0), optimizer, mesh, shardings)
        step = make_rl_step(config, StepConfig(micro_rows=4), optimizer, mesh, shardings)
        for _ in range(2):
            state, metrics = step(state, batch)
        assert jax.tree.all(jax.tree.map(lambda x, s: x.sharding == s, state.params, shardings))
        spread = {len(x.sharding.device_set) for x in jax.tree.leaves(state)}
        assert spread == {axes[0] * axes[1] * axes[2]}, spread
        moments = [x for x in jax.tree.leaves(state.opt_state) if x.ndim > 1]
        assert any(not x.sharding.is_fully_replicated for x in moments) or axes == (1, 1, 1)
        results.append((jax.tree.map(np.asarray, state.params), float(metrics["train/loss"])))
    one, eight = results[-2:]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-3, atol=2e-4), one, eight)
print("same")
"""


FORKED = """
import jax, numpy as np, optax
from reterm_jax.policy import delta_net
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import init_params
from reterm_jax.tokens.forking import pack_forked
from reterm_jax.tokens.packing import Example
from reterm_jax.training.state import init_state
from reterm_jax.training.steps import StepConfig, make_rl_step

delta_net._SEGMENT = 2  # chunks, so that a row has several segments of them
config = QwenConfig(
    "qwen3_5", 32, 16, 24, 2, 2, 2, 8, ("linear_attention", "full_attention"), compute_dtype="float32", remat="none",
    linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8, chunk_size=8,
)
rng = np.random.default_rng(0)
trunks = [rng.integers(0, 32, 9 + 3 * g) for g in range(4)]
examples = [
    Example(np.concatenate([trunks[g], rng.integers(0, 32, n)]), np.arange(len(trunks[g]) + n) >= len(trunks[g]),
            float(rng.normal()), np.full(len(trunks[g]) + n, -3.0), group=g,
            ref_logprobs=np.full(len(trunks[g]) + n, -3.2))
    for g in range(4) for n in (2, 5, 9)
]
batch, _ = pack_forked(examples, length=40)
assert batch.trunks is not None
results = []
for axes in ((1, 1, 1), (8, 1, 1), (1, 8, 1), (1, 4, 2), (2, 2, 2)):
    mesh = make_mesh(*axes)
    shardings = param_shardings(config, mesh)
    state = init_state(lambda key: init_params(config, key), jax.random.key(0), optax.sgd(1.0), mesh, shardings)
    before = jax.tree.map(np.array, state.params)
    terms = StepConfig(micro_rows=8, kl_weight=0.3, entropy_weight=0.2)
    step = make_rl_step(config, terms, optax.sgd(1.0), mesh, shardings)
    state, metrics = step(state, batch)
    grads = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
    results.append((grads, float(metrics["train/loss"])))
for one in results[1:]:
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), one, results[0])
print("same")
"""


@pytest.mark.parametrize("script", [PLAIN, FORKED], ids=["plain", "forked"])
def test_eight_devices_make_the_same_update_as_one(script, simulated):
    done = subprocess.run([sys.executable, "-c", script], env=simulated(8), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "same"
