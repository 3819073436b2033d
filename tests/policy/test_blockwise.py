"""Attention in blocks against attention with one [T,T] mask."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.policy.blockwise import blockwise_attention
from reterm_jax.policy.documents import Documents

B, G, R, T, K = 2, 2, 3, 53, 8

# Which document a token is in, and which document that continues.
ROWS = {
    "one document": ([0] * T, None),
    "short documents": ([0] * 3 + [1] * 20 + [2] * 1 + [3] * 25 + [4] * 4, None),
    "a trunk with branches": ([7] * 18 + [3] * 12 + [9] * 1 + [8] * 22, [7] * T),
    "two groups": (
        [1] * 9 + [2] * 7 + [3] * 9 + [4] * 10 + [5] * 11 + [6] * 5 + [0] * 2,
        [1] * 25 + [4] * 26 + [0] * 2,
    ),
}


def documents_of(name: str) -> Documents:
    own, trunk = (None if x is None else jnp.broadcast_to(jnp.asarray(x, jnp.int32), (B, T)) for x in ROWS[name])
    return Documents(own, jnp.zeros((B, T), jnp.int32), trunk)


def arrays(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, G, R, T, K), (B, G, T, K), (B, G, T, K), (B, G, R, T, K)
    return [jax.random.normal(key, shape).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


def masked_attention(q, k, v, documents):
    own, trunk = documents.index_BT, documents.index_BT if documents.trunk_BT is None else documents.trunk_BT
    same = (own[:, :, None] == own[:, None]) | (trunk[:, :, None] == own[:, None])
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q, k) / np.sqrt(K)
    scores = jnp.where((same & jnp.tril(jnp.ones((T, T), bool)))[:, None, None], scores, -jnp.inf)
    return jnp.einsum("bgrts,bgsk->bgrtk", jax.nn.softmax(scores), v)


@functools.partial(jax.jit, static_argnames=("attention", "block"))
def value_and_gradients(attention, q, k, v, documents, direction, block=None):
    kwargs = {} if block is None else {"block": block}
    out, pull = jax.vjp(lambda *qkv: attention(*qkv, documents, **kwargs), q, k, v)
    return out, *pull(direction)


@pytest.mark.parametrize(("name", "block"), [*itertools.product(ROWS, (8, 16, 53, 64)), ("two groups", 1)])
def test_values_and_gradients_equal_masked_attention(name, block):
    q, k, v, direction = arrays()
    documents = documents_of(name)
    expected = value_and_gradients(masked_attention, q, k, v, documents, direction)
    got = value_and_gradients(blockwise_attention, q, k, v, documents, direction, block=block)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=2e-6)


def test_large_scores_do_not_overflow():
    q, k, v, direction = arrays()
    documents = documents_of("short documents")
    expected = value_and_gradients(masked_attention, 100 * q, 10 * k, v, documents, direction)
    got = value_and_gradients(blockwise_attention, 100 * q, 10 * k, v, documents, direction, block=8)
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


def test_blocks_out_of_sight_are_not_computed():
    """Not a number in the values of one document: a product with weight zero would spread it."""
    q, k, v, direction = arrays()
    own = jnp.broadcast_to(jnp.repeat(jnp.arange(4), jnp.array([8, 8, 16, 21]), total_repeat_length=T), (B, T))
    documents = Documents(own, jnp.zeros((B, T), jnp.int32))
    poisoned = jnp.where((own == 1)[:, None, :, None], jnp.nan, v)
    out, dq, *_ = value_and_gradients(blockwise_attention, q, k, poisoned, documents, direction, block=8)
    for x_BGRTK in (out, dq):
        finite_T = np.isfinite(x_BGRTK).all(axis=(0, 1, 2, 4))
        np.testing.assert_array_equal(finite_T, own[0] != 1)


def test_bfloat16_is_near_float32():
    q, k, v, direction = arrays()
    documents = documents_of("two groups")
    expected = value_and_gradients(masked_attention, q, k, v, documents, direction)
    half = (x.astype(jnp.bfloat16) for x in (q, k, v))
    got = value_and_gradients(blockwise_attention, *half, documents, direction.astype(jnp.bfloat16), block=16)
    for a, b in zip(got, expected, strict=True):
        assert a.dtype == jnp.bfloat16
        assert float(jnp.linalg.norm(a.astype(jnp.float32) - b) / jnp.linalg.norm(b)) < 0.02
