"""Decoding gives the logits of the forward pass, whatever the pieces, and rows are independent."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import forward, init

from reterm_jax.policy.decode import extend, fork, init_cache, write
from reterm_jax.policy.forward import head

MAX_LEN = 96
step = jax.jit(extend, static_argnums=1)


@pytest.fixture
def model(config, key):
    tokens = np.random.default_rng(0).integers(0, 97, (3, 60)).astype(np.int32)
    params = init(config, key)
    positions = jnp.broadcast_to(jnp.arange(60), tokens.shape)
    logits = forward(params, config, tokens, jnp.ones_like(tokens), positions) @ head(params, config).T
    return params, config, tokens, logits


def piece(tokens, seen, lengths, width):
    """The next lengths[b] tokens of each row after seen[b], padded with garbage to `width`."""
    out = np.full((len(lengths), width), 13, np.int32)
    for row, (start, count) in enumerate(zip(seen, lengths, strict=True)):
        out[row, :count] = tokens[row, start : start + count]
    return out


def test_ragged_pieces_equal_forward(model):
    params, config, tokens, logits = model
    cache = init_cache(config, 3, MAX_LEN)
    seen = np.zeros(3, int)
    for lengths, width in (
        ((5, 20, 1), 20),
        ((0, 3, 17), 20),
        ((1, 1, 1), 1),
        ((1, 0, 1), 1),
        ((20, 2, 4), 20),
        ((1, 1, 0), 1),
    ):
        got, cache = step(params, config, cache, piece(tokens, seen, lengths, width), jnp.asarray(lengths))
        seen += np.asarray(lengths)
        for row in np.flatnonzero(lengths):
            np.testing.assert_allclose(got[row], logits[row, seen[row] - 1], atol=2e-4, err_msg=f"row {row} at {seen}")
    assert got.dtype == jnp.float32
    assert cache.lengths_B.tolist() == seen.tolist()


@pytest.mark.parametrize("width", [1, 8])
def test_empty_rows_keep_their_cache(model, width):
    params, config, tokens, _ = model
    _, before = step(params, config, init_cache(config, 3, MAX_LEN), tokens[:, :10], jnp.full(3, 10))
    _, after = step(params, config, before, tokens[:, 10 : 10 + width], jnp.asarray([0, width, 0]))
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(old[0], new[0])
        np.testing.assert_array_equal(old[2], new[2])


def test_fork_continues_each_copy_on_its_own(model):
    params, config, tokens, logits = model
    _, cache = step(params, config, init_cache(config, 3, MAX_LEN), tokens[:, :30], jnp.full(3, 30))
    forked = fork(cache, jnp.asarray([1, 1, 1, 0]))
    assert forked.lengths_B.tolist() == [30] * 4
    other = (tokens[1, 30:40] + 1) % 97
    continuation = np.stack([tokens[1, 30:40], other, tokens[1, 30:40], tokens[0, 30:40]])
    got, forked = step(params, config, forked, continuation, jnp.full(4, 10))
    np.testing.assert_allclose(got[0], logits[1, 39], atol=2e-4)
    np.testing.assert_allclose(got[2], got[0], atol=1e-5)
    np.testing.assert_allclose(got[3], logits[0, 39], atol=2e-4)
    assert np.abs(got[1] - got[0]).max() > 1e-2
    # The parent is untouched.
    again, _ = step(params, config, cache, tokens[:, 30:40], jnp.full(3, 10))
    np.testing.assert_allclose(again, logits[:, 39], atol=2e-4)


def test_a_shorter_copy_goes_on_like_the_row_and_can_be_written_back(model):
    params, config, tokens, logits = model
    _, cache = step(params, config, init_cache(config, 3, MAX_LEN), tokens[:, :10], jnp.full(3, 10))
    rows = jnp.asarray([2, 0])
    got, part = step(params, config, fork(cache, rows, 24), tokens[[2, 0], 10:20], jnp.full(2, 10))
    np.testing.assert_allclose(got, logits[jnp.asarray([2, 0]), 19], atol=2e-4)
    # The third row of `part` is written past the end: dropped.
    cache = write(cache, jnp.asarray([2, 0, 3]), fork(part, jnp.asarray([0, 1, 0])))
    assert cache.lengths_B.tolist() == [20, 10, 20]
    got, _ = step(params, config, cache, tokens[:, 20:21], jnp.asarray([1, 0, 1]))
    np.testing.assert_allclose(got[jnp.asarray([0, 2])], logits[jnp.asarray([0, 2]), 20], atol=2e-4)
    got, _ = step(params, config, cache, tokens[:, 10:11], jnp.asarray([0, 1, 0]))
    np.testing.assert_allclose(got[1], logits[1, 10], atol=2e-4)


def test_bfloat16_cache(model):
    params, config, tokens, logits = model
    config = config.replace(compute_dtype="bfloat16")
    cache = init_cache(config, 3, MAX_LEN)
    got, cache = step(params, config, cache, tokens[:, :40], jnp.full(3, 40))
    got, cache = step(params, config, cache, tokens[:, 40:41], jnp.ones(3, jnp.int32))
    assert got.dtype == jnp.float32
    want = logits[:, 40]
    assert np.linalg.norm(got - want) / np.linalg.norm(want) < 0.06
    assert {leaf.dtype.name for leaf in jax.tree.leaves(cache)} <= {"bfloat16", "float32", "int32"}
