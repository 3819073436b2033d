"""Packing, rematerialisation, blocks and dtypes of the forward pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import forward, init, slow_params, tiny_config

from reterm_jax.policy import delta_net
from reterm_jax.policy.forward import head, hidden_states


def alone(params, config, tokens):
    tokens = jnp.asarray(tokens)[None]
    return forward(params, config, tokens, jnp.ones_like(tokens), jnp.arange(tokens.shape[1])[None])[0]


def pack(lengths, width, *, reuse_ids=False):
    """(tokens, segments, positions) of one row; with `reuse_ids`, segment ids 1, 2, 1, 2, ..."""
    rng = np.random.default_rng(0)
    tokens, segments, positions = (np.zeros((1, width), np.int32) for _ in range(3))
    at = 0
    for number, length in enumerate(lengths):
        span = slice(at, at + length)
        tokens[0, span] = rng.integers(0, 97, length)
        segments[0, span] = 1 + (number % 2 if reuse_ids else number)
        positions[0, span] = np.arange(length)
        at += length
    return tokens, segments, positions


@pytest.mark.parametrize("reuse_ids", [False, True])
def test_packed_equals_alone(config, key, reuse_ids):
    params = slow_params(config, key)
    lengths = (1, 17, 30, 17)
    tokens, segments, positions = pack(lengths, 80, reuse_ids=reuse_ids)
    packed = forward(params, config, tokens, segments, positions)[0]
    at = 0
    for length in lengths:
        expected = alone(params, config, tokens[0, at : at + length])
        np.testing.assert_allclose(packed[at : at + length], expected, atol=2e-5)
        at += length
    assert jnp.isfinite(packed).all()


def test_no_gradient_crosses_a_boundary(config, key):
    params = slow_params(config, key)
    tokens, segments, positions = pack((20, 25), 80)

    def second_document(embeddings):
        changed = {**params, "embed": embeddings}
        return jnp.sum(forward(changed, config, tokens, segments, positions)[0, 20:45])

    touched = np.flatnonzero(np.abs(jax.jit(jax.grad(second_document))(params["embed"])).sum(axis=1))
    assert set(touched) <= set(tokens[0, 20:45].tolist())


def test_later_tokens_do_not_reach_earlier_ones(config, key):
    params = slow_params(config, key)
    tokens, segments, positions = pack((40,), 80)
    changed = tokens.copy()
    changed[0, 25] = (tokens[0, 25] + 1) % 97
    a, b = (forward(params, config, x, segments, positions)[0, :40] for x in (tokens, changed))
    np.testing.assert_allclose(a[:25], b[:25], atol=1e-6)
    assert np.abs(a[25:] - b[25:]).max(axis=1).min() > 1e-5


# A block with layers of one kind in a row, which run as a loop where they are recomputed.
HYBRID = {"num_hidden_layers": 6, "layer_types": ("linear_attention", "linear_attention", "full_attention") * 2}


@pytest.mark.parametrize(("family", "layers"), [("qwen3", {}), ("qwen3_5", HYBRID)])
def test_remat_segments_and_block_size_change_nothing(monkeypatch, key, family, layers):
    config = tiny_config(family, **layers)
    params = init(config, key)
    tokens, segments, positions = pack((30, 40), 80)

    def gradients(config):
        def loss(params):
            return jnp.sum(jnp.sin(forward(params, config, tokens, segments, positions)) * (segments > 0)[..., None])

        return jax.jit(jax.grad(loss))(params)

    want = gradients(config)
    monkeypatch.setattr(delta_net, "_SEGMENT", 2)
    for remat in ("dots", "mixers", "full"):
        got = gradients(config.replace(remat=remat, attention_block=7))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-4 * (1 + np.abs(b).max()))


def test_remat_keeps_less():
    config = tiny_config("qwen3_5", **HYBRID)
    tokens, segments, positions = pack((30, 40), 80)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))

    def kept(remat):
        """Numbers that the backward pass finds in memory, the weights of the layers aside."""

        def backward(params):
            return jax.vjp(lambda p: hidden_states(p, config.replace(remat=remat), tokens, segments, positions), params)

        leaves = jax.tree.leaves(jax.eval_shape(backward, params)[1])
        return sum(x.size for x in leaves) - sum(x.size for x in jax.tree.leaves(params["layers"]))

    inputs = config.num_hidden_layers * tokens.size * config.hidden_size
    none, dots, mixers, full = map(kept, ("none", "dots", "mixers", "full"))
    attention = config.num_attention_heads * (config.head_dim + 1)  # and the log-normaliser
    results = tokens.size * (2 * attention + 4 * config.linear_num_value_heads * config.linear_value_head_dim)
    assert inputs <= full < 1.5 * inputs
    assert full + results <= mixers < full + 1.1 * results < dots < none


@pytest.mark.parametrize(
    ("kind", "attention", "loop"),
    [
        ("full_attention", "blockwise", "while["),
        ("full_attention", "splash", "pallas_call["),
        ("full_attention", "pallas_gpu", "pallas_call["),
        ("linear_attention", "blockwise", "scan["),
    ],
)
def test_mixers_are_not_computed_again(monkeypatch, kind, attention, loop):
    monkeypatch.setattr(delta_net, "_SEGMENT", 2)
    config = tiny_config("qwen3_5", num_hidden_layers=1, layer_types=(kind,), head_dim=64, attention=attention)
    params = jax.eval_shape(lambda: init(config, jax.random.key(0)))

    def loops(remat):
        tokens, segments, positions = pack((100, 20), 128)

        def total(params):
            return jnp.sum(hidden_states(params, config.replace(remat=remat), tokens, segments, positions))

        return str(jax.make_jaxpr(jax.grad(total))(params)).count(loop)

    assert loops("dots") == loops("mixers") < loops("full")


def test_compute_dtype(config, key):
    params = init(config, key)
    tokens, segments, positions = pack((40,), 80)
    exact = forward(params, config, tokens, segments, positions)
    rounded = forward(params, config.replace(compute_dtype="bfloat16"), tokens, segments, positions)
    assert exact.dtype == jnp.float32 and rounded.dtype == jnp.bfloat16
    difference = np.linalg.norm(exact - rounded.astype(jnp.float32)) / np.linalg.norm(exact)
    assert difference < 0.05


def test_compile_size_does_not_grow_with_depth():
    def size(layers):
        config = tiny_config("qwen3", num_hidden_layers=layers, layer_types=("full_attention",) * layers)
        tokens, segments, positions = pack((10,), 10)
        params = init(config, jax.random.key(0))
        return len(str(jax.make_jaxpr(lambda p: hidden_states(p, config, tokens, segments, positions))(params)))

    assert size(12) < 1.05 * size(2)


def test_head_is_tied_or_own(key):
    tied = tiny_config("qwen3", tie_word_embeddings=True)
    params = init(tied, key)
    assert "lm_head" not in params and head(params, tied) is params["embed"]
    untied = tiny_config("qwen3")
    params = init(untied, key)
    assert head(params, untied) is params["lm_head"]
