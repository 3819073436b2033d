import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reterm_jax.policy.spec import ArraySpec
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


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"name": "sgd"}, "optimizer 'sgd' is unknown"),
        ({"schedule": "step"}, "schedule 'step' is unknown"),
        ({"learning_rate": -1.0}, "learning_rate must not be negative"),
    ],
)
def test_errors_name_the_field(fields, said):
    with pytest.raises(ValueError, match=said):
        OptimizerConfig(**fields)


SPECS = {
    "embed": ArraySpec((32, 16), ("vocab", "embed")),
    "norm": ArraySpec((2, 16), ("layers", "norm")),
    "a_log": ArraySpec((2, 4), ("layers", "value_heads")),
    "up": ArraySpec((2, 16, 24), ("layers", "embed", "mlp")),
    "out": ArraySpec((2, 4, 6, 16), ("layers", "heads", "head_dim", "embed")),
    "conv": ArraySpec((2, 4, 6, 3), ("layers", "heads", "head_dim", "conv")),
}


def random_tree(seed):
    keys = dict(zip(SPECS, jax.random.split(jax.random.key(seed), len(SPECS)), strict=True))
    return {name: jax.random.normal(keys[name], spec.shape) for name, spec in SPECS.items()}


def first_update(config, grads):
    optimizer = make_optimizer(config, SPECS, 10)
    params = random_tree(0)
    return params, *jax.jit(optimizer.update)(grads, optimizer.init(params), params)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_weight_decay_spares_norms_biases_and_decay_rates(name):
    grads, config = random_tree(1), {"name": name, "learning_rate": 0.1}
    params, plain, _ = first_update(OptimizerConfig(**config), grads)
    _, decayed, _ = first_update(OptimizerConfig(**config, weight_decay=0.5), grads)
    for key in SPECS:
        expected = np.zeros_like(params[key]) if key in ("norm", "a_log") else 0.1 * 0.5 * params[key]
        np.testing.assert_allclose(plain[key] - decayed[key], expected, atol=1e-6)


def test_muon_makes_the_matrices_of_every_layer_orthogonal_and_leaves_the_rest_to_adam():
    _, updates, _ = first_update(OptimizerConfig(name="muon", learning_rate=1.0), random_tree(1))
    for update_LIO in (updates["up"], updates["out"].reshape(2, 24, 16)):
        singular = np.linalg.svd(np.asarray(update_LIO), compute_uv=False)
        assert singular.shape == (2, 16)
        # Newton–Schulz brings singular values near one common value.
        assert (singular.max(-1) / singular.min(-1) < 2.5).all()
        assert 0.1 < np.sqrt((update_LIO**2).mean()) < 0.3
    for key in ("embed", "norm", "a_log", "conv"):
        size = np.abs(updates[key])  # Adam's first update has one size everywhere
        assert 1 <= size.mean() < 1.5 and size.std() < 1e-3


def test_updates_go_downhill_and_large_gradients_are_clipped():
    grads = jax.tree.map(lambda spec: jnp.full(spec.shape, 1e6), SPECS)
    _, updates, state = first_update(OptimizerConfig(learning_rate=0.1, clip_norm=1.0), grads)
    assert all((u < 0).all() for u in jax.tree.leaves(updates))
    adam = next(s for s in jax.tree.leaves(state, is_leaf=lambda x: hasattr(x, "mu")) if hasattr(s, "mu"))
    assert float(optax.tree.norm(adam.mu)) == pytest.approx(0.1, rel=1e-3)  # (1 - b1) · clip_norm


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_moments_in_bfloat16_take_half_the_memory_and_make_nearly_the_same_updates(name):
    params, results = random_tree(0), []
    for dtype in ("float32", "bfloat16"):
        optimizer = make_optimizer(OptimizerConfig(name=name, learning_rate=0.1, moments_dtype=dtype), SPECS, 10)
        state = optimizer.init(params)
        stored = [x for x in jax.tree.leaves(state) if x.ndim]
        assert {x.dtype for x in stored} == {jnp.dtype(dtype)}
        for seed in range(3):
            updates, state = jax.jit(optimizer.update)(random_tree(seed), state, params)
        assert {x.dtype for x in jax.tree.leaves(state) if x.ndim} == {jnp.dtype(dtype)}
        assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype("float32")}
        results.append(updates)
    # Of the whole update: Newton–Schulz makes small singular values, and with them their rounding, large.
    for a, b in zip(*map(jax.tree.leaves, results), strict=True):
        assert np.linalg.norm(a - b) < 0.05 * np.linalg.norm(a)


def test_unknown_moments_are_named():
    with pytest.raises(ValueError, match="moments_dtype 'int8' is unknown; one of float32, bfloat16"):
        OptimizerConfig(moments_dtype="int8")
