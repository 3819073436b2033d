"""Grouped-query full attention: one function for training rows, one for rows with a key/value cache.

Dimension letters: B rows, T query tokens, S key tokens, G key/value heads, R query heads per key/value head, K head
size, D hidden size.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reterm_jax.policy.blockwise import blockwise_attention
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.fused_attention import fused_attention, takes
from reterm_jax.policy.layers import apply_rotary, project, rms_norm, rotary_angles

AttentionParams = dict[str, jax.Array]


class KVCache(NamedTuple):
    """Keys and values of one layer. Heads come before time, so that a decode step reads them without a transpose."""

    k_BGSK: jax.Array
    v_BGSK: jax.Array


def self_attention(
    p: AttentionParams, config: QwenConfig, x_BTD: jax.Array, documents: Documents
) -> tuple[jax.Array, KVCache]:
    """Causal attention in which a token sees its own document and its trunk; also returns the keys and values."""
    q_BGRTK, kv = _queries_keys_values(p, config, x_BTD, documents.positions_BT)
    if takes(config.attention, documents):
        out_BGRTK = fused_attention(q_BGRTK, *kv, documents, kernel=config.attention)
    else:
        out_BGRTK = blockwise_attention(q_BGRTK, *kv, documents, block=config.attention_block)
    return _output(p, config, x_BTD, out_BGRTK), kv


def cached_attention(
    p: AttentionParams,
    config: QwenConfig,
    x_BTD: jax.Array,
    positions_BT: jax.Array,
    valid_BT: jax.Array,
    cache: KVCache,
) -> tuple[jax.Array, KVCache]:
    """Appends these tokens' keys and values at `positions_BT` and attends to the cache up to each token's position.

    Tokens that are not valid are not written, and what is computed for them is meaningless.
    """
    q_BGRTK, new = _queries_keys_values(p, config, x_BTD, positions_BT)
    B, G, max_len, _ = cache.k_BGSK.shape
    rows_BGT = jnp.arange(B)[:, None, None]
    heads_BGT = jnp.arange(G)[None, :, None]
    # A slot past the end is dropped by the scatter: that is how invalid tokens leave the cache alone.
    slots_BGT = jnp.where(valid_BT, positions_BT, max_len)[:, None, :]
    cache = KVCache(
        *(
            old.at[rows_BGT, heads_BGT, slots_BGT].set(update.astype(old.dtype), mode="drop", unique_indices=True)
            for old, update in zip(cache, new, strict=True)
        )
    )
    mask_BTS = jnp.arange(max_len) <= positions_BT[:, :, None]
    out_BGRTK = attend(q_BGRTK, cache.k_BGSK, cache.v_BGSK, mask_BTS)
    return _output(p, config, x_BTD, out_BGRTK), cache


def attend(q_BGRTK: jax.Array, k_BGSK: jax.Array, v_BGSK: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """softmax(q k / sqrt(K)) v with scores and softmax in float32. Every query must be allowed at least one key."""
    scale = q_BGRTK.shape[-1] ** -0.5
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q_BGRTK * scale, k_BGSK, preferred_element_type=jnp.float32)
    scores = jnp.where(mask_BTS[:, None, None], scores, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(v_BGSK.dtype)
    return jnp.einsum("bgrts,bgsk->bgrtk", weights, v_BGSK)


def _queries_keys_values(
    p: AttentionParams, config: QwenConfig, x_BTD: jax.Array, positions_BT: jax.Array
) -> tuple[jax.Array, KVCache]:
    cos, sin = rotary_angles(positions_BT, config)
    norm = {"eps": config.rms_norm_eps, "offset": config.norm_offset}
    q_BTHK = apply_rotary(rms_norm(project(x_BTD, p["q_proj"]), p["q_norm"], **norm), cos, sin)
    k_BTGK = apply_rotary(rms_norm(project(x_BTD, p["k_proj"]), p["k_norm"], **norm), cos, sin)
    v_BTGK = project(x_BTD, p["v_proj"])
    B, T, H, K = q_BTHK.shape
    G = config.num_key_value_heads
    q_BGRTK = q_BTHK.reshape(B, T, G, H // G, K).transpose(0, 2, 3, 1, 4)
    return q_BGRTK, KVCache(k_BTGK.transpose(0, 2, 1, 3), v_BTGK.transpose(0, 2, 1, 3))


def _output(p: AttentionParams, config: QwenConfig, x_BTD: jax.Array, out_BGRTK: jax.Array) -> jax.Array:
    B, G, R, T, K = out_BGRTK.shape
    out_BTHK = out_BGRTK.transpose(0, 3, 1, 2, 4).reshape(B, T, G * R, K)
    if config.gated_attention:
        gate_BTHK = project(x_BTD, p["gate_proj"]).astype(jnp.float32)
        out_BTHK = (out_BTHK * jax.nn.sigmoid(gate_BTHK)).astype(x_BTD.dtype)
    return project(out_BTHK, p["o_proj"], axes=2)
