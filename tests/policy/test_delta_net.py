"""The chunked delta rule against the recurrence it stands for."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.policy import delta_net
from reterm_jax.policy.chunk_inverse import unit_lower_inverse
from reterm_jax.policy.delta_net import chunked_delta_rule, delta_rule_step
from reterm_jax.policy.layers import l2_normalise

B, G, R, K, V = 2, 2, 2, 8, 6


def random_inputs(T, *, decay=1.0, seed=0):
    keys = jax.random.split(jax.random.key(seed), 6)
    q = l2_normalise(jax.random.normal(keys[0], (B, T, G, K)))
    k = l2_normalise(jax.random.normal(keys[1], (B, T, G, K)))
    v = jax.random.normal(keys[2], (B, T, G, R, V))
    log_decay = -decay * jax.random.uniform(keys[3], (B, T, G, R))
    strength = jax.random.uniform(keys[4], (B, T, G, R))
    state = jax.random.normal(keys[5], (B, G, R, K, V))
    return (q, k, v, log_decay, strength), state


def recurrence(inputs, documents, state):
    """Token by token, with the state cleared where a document begins."""

    def token(state, step):
        fresh, *inputs = step
        state = jnp.where(fresh[:, None, None, None, None], 0.0, state)
        out, state = delta_rule_step(*inputs, state)
        return state, out

    fresh = jnp.pad(documents[:, 1:] != documents[:, :-1], ((0, 0), (1, 0)))
    state, outputs = jax.lax.scan(token, state, [jnp.moveaxis(x, 1, 0) for x in (fresh, *inputs)])
    return jnp.moveaxis(outputs, 0, 1), state


def chunked(inputs, documents, state, chunk=16):
    return chunked_delta_rule(*inputs, documents, state, chunk=chunk)


@pytest.mark.parametrize("T", [2, 16, 39])
@pytest.mark.parametrize("decay", [1e-3, 5.0])
def test_chunks_equal_recurrence_with_documents(T, decay):
    inputs, state = random_inputs(T, decay=decay)
    starts = np.random.default_rng(T).random((B, T)) < 0.15
    documents = jnp.cumsum(jnp.asarray(starts), axis=1)
    expected, expected_state = jax.jit(recurrence)(inputs, documents, state)
    out, out_state = jax.jit(chunked)(inputs, documents, state)
    np.testing.assert_allclose(out, expected, atol=2e-5)
    np.testing.assert_allclose(out_state, expected_state, atol=2e-5)


def test_gradients_equal_recurrence():
    inputs, state = random_inputs(20)
    documents = jnp.asarray([[0] * 9 + [1] * 11, [0] * 20])

    def loss(run):
        def scalar(inputs, state):
            out, final = run(inputs, documents, state)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

        return jax.jit(jax.grad(scalar, argnums=(0, 1)))(inputs, state)

    for got, want in zip(jax.tree.leaves(loss(chunked)), jax.tree.leaves(loss(recurrence)), strict=True):
        np.testing.assert_allclose(got, want, atol=5e-5)


@pytest.mark.parametrize("trunks", [False, True])
def test_segments_change_nothing(trunks, monkeypatch):
    """Rows of more chunks than are in memory at one time: 5 chunks in segments of 2, the last one padded."""
    inputs, state = random_inputs(72)
    documents = jnp.repeat(jnp.asarray([[0, 1, 2], [0, 1, 2]]), jnp.asarray([30, 15, 27]), axis=1)
    trunk = jnp.zeros_like(documents) if trunks else None

    def run():
        def scalar(inputs, state):
            out, final = chunked_delta_rule(*inputs, documents, state, chunk=16, trunk_BT=trunk)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(final))

        return jax.jit(jax.value_and_grad(scalar, argnums=(0, 1)))(inputs, state)

    whole = run()
    monkeypatch.setattr(delta_net, "_SEGMENT", 2)
    for got, want in zip(jax.tree.leaves(run()), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=2e-5)


def test_fast_decay_stays_finite():
    """The sum of the log decays differs by thousands between documents of one chunk."""
    inputs, state = random_inputs(64, decay=200.0)
    documents = jnp.asarray([[0] * 64, [0] * 40 + [1] * 4 + [2] * 20])

    def loss(inputs):
        return jnp.sum(chunked(inputs, documents, state, chunk=64)[0])

    value, gradients = jax.jit(jax.value_and_grad(loss))(inputs)
    assert jnp.isfinite(value)
    assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(gradients))


def test_inverse_on_repetitive_keys():
    """Equal keys, full strength, no decay: the matrix that breaks power series and Newton iterations."""
    lower = np.tril(np.full((64, 64), 0.999), -1)
    expected = np.linalg.inv(np.eye(64) + lower)
    np.testing.assert_allclose(jax.jit(unit_lower_inverse)(lower.astype(np.float32)), expected, atol=1e-5)


def test_inverse_gradient():
    lower = jnp.tril(0.5 * jax.random.normal(jax.random.key(0), (2, 8, 8)), -1)
    weights = jax.random.normal(jax.random.key(1), (8, 8))

    def loss(inverse):
        return lambda lower: jnp.sum(weights * inverse(jnp.tril(lower, -1)))

    got = jax.jit(jax.grad(loss(unit_lower_inverse)))(lower)
    want = jax.jit(jax.grad(loss(lambda lower: jnp.linalg.inv(jnp.eye(8) + lower))))(lower)
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)


def test_inverse_names_a_wrong_size():
    with pytest.raises(ValueError, match="size 12 is not a power of two"):
        unit_lower_inverse(jnp.zeros((12, 12)))
