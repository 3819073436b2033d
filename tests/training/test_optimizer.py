import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reterm_jax.training.optimizer import OptimizerConfig, make_optimizer, make_schedule


def rates(steps, **fields):
    schedule = make_schedule(OptimizerConfig(learning_rate=1.0, **fields), steps)
    return [float(schedule(i)) for i in range(steps + 1)]


def test_schedules():
    np.testing.assert_allclose(rates(4), [1] * 5)
    np.testing.assert_allclose(rates(4, schedule="linear"), [1, 0.75, 0.5, 0.25, 0])
    np.testing.assert_allclose(rates(4, schedule="linear", final_fraction=0.5), [1, 0.875, 0.75, 0.625, 0.5])
    np.testing.assert_allclose(rates(4, schedule="cosine"), 0.5 + 0.5 * np.cos(np.pi * np.arange(5) / 4), atol=1e-7)


def test_warmup_in_steps_and_as_a_fraction():
    expected = [0.25, 0.5, 0.75, 1, 1, 1, 1, 1, 1]
    np.testing.assert_allclose(rates(8, warmup=4), expected)
    np.testing.assert_allclose(rates(8, warmup=0.5), expected)
    np.testing.assert_allclose(rates(2, warmup=1), [1, 1, 1])
    np.testing.assert_allclose(rates(1, warmup=0.03), [1, 1])


@pytest.mark.parametrize("fields", [{"name": "sgd"}, {"schedule": "step"}, {"learning_rate": -1.0}])
def test_errors_name_the_field(fields):
    with pytest.raises(ValueError, match=f"optimizer.{next(iter(fields))}"):
        OptimizerConfig(**fields)


def first_update(hybrid, config):
    optimizer = make_optimizer(config, hybrid.specs, 10)
    params = hybrid.new_state(optimizer).params
    grads = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), params)
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    return params, updates


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_spares_norms_biases_and_decay_rates(hybrid, name):
    config = {"name": name, "learning_rate": 0.1}
    params, plain = first_update(hybrid, OptimizerConfig(**config))
    _, decayed = first_update(hybrid, OptimizerConfig(**config, weight_decay=0.5))
    decay = jax.tree.map(lambda a, b: a - b, plain, decayed)
    linear = decay["layers"]["0"]["mixer"]
    norms = decay["layers"]["0"]["input_norm"], decay["final_norm"], linear["norm"]
    for free in (*norms, linear["a_log"], linear["dt_bias"]):
        np.testing.assert_array_equal(free, 0)
    np.testing.assert_allclose(decay["embed"], 0.05 * params["embed"], atol=1e-6)
    np.testing.assert_allclose(linear["q_proj"], 0.05 * params["layers"]["0"]["mixer"]["q_proj"], atol=1e-6)


def test_muon_makes_the_matrices_of_every_layer_orthogonal(hybrid):
    _, updates = first_update(hybrid, OptimizerConfig(name="muon", learning_rate=1.0))
    output = updates["layers"]["1"]["mixer"]["o_proj"].reshape(1, -1, 16)
    for update_LIO in (updates["layers"]["0"]["mlp"]["up"], output):
        singular = np.linalg.svd(np.asarray(update_LIO), compute_uv=False)
        # Newton–Schulz brings singular values near one common value.
        assert (singular.max(-1) / singular.min(-1) < 2.5).all()
    adam = np.abs(np.asarray(updates["embed"]))
    np.testing.assert_allclose(adam, 1.0, atol=1e-3)


def test_updates_go_downhill_and_large_gradients_are_clipped(hybrid):
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.1, clip_norm=1.0), hybrid.specs, 10)
    params = hybrid.new_state(optimizer).params
    grads = jax.tree.map(lambda x: jnp.full_like(x, 1e6), params)
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    assert all((u < 0).all() for u in jax.tree.leaves(updates))
    adam = next(s for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu"))
    assert float(optax.global_norm(adam.mu)) == pytest.approx(0.1, rel=1e-3)  # (1 - b1) · clip_norm
