"""Grouped-query full attention: one function for training rows, one for rows with a key/value cache.

Dimension letters: B rows, T query tokens, S key tokens, G key/value heads, R query heads per key/value head, K head
size, D hidden size.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.layers import apply_rotary, project, rms_norm, rotary_angles

AttentionParams = dict[str, jax.Array]

# Unrolled in the program, so few: eight already avoid 44 % of the work, of the 50 % that can be avoided.
_MAX_SLABS = 8


class KVCache(NamedTuple):
    """Keys and values of one layer. Heads come before time, so that a decode step reads them without a transpose."""

    k_BGSK: jax.Array
    v_BGSK: jax.Array


def self_attention(
    p: AttentionParams, config: QwenConfig, x_BTD: jax.Array, documents: Documents
) -> tuple[jax.Array, KVCache]:
    """Causal attention in which a token sees its own document and its trunk; also returns the keys and values."""
    q_BGRTK, kv = _queries_keys_values(p, config, x_BTD, documents.positions_BT)
    out_BGRTK = _causal(q_BGRTK, kv, documents, config)
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
    return jnp.einsum("bthk,hkd->btd", out_BTHK, p["o_proj"].astype(x_BTD.dtype))


def _causal(q_BGRTK: jax.Array, kv: KVCache, documents: Documents, config: QwenConfig) -> jax.Array:
    """Causal attention within documents, without [T,T] memory and without most of the upper triangle's work.

    The queries are cut into at most `_MAX_SLABS` slabs, each of which only reads the keys up to its own end; within a
    slab, `attention_block` queries are attended at a time.
    """
    T = q_BGRTK.shape[3]
    block = config.attention_block
    slab = block * max(1, -(-T // (block * _MAX_SLABS)))
    out = []
    for start in range(0, T, slab):
        end = min(start + slab, T)
        keys = KVCache(*(x[:, :, :end] for x in kv))
        out.append(_slab(q_BGRTK[:, :, :, start:end], keys, documents, start, config))
    return jnp.concatenate(out, axis=3)


def _slab(q_BGRTK: jax.Array, kv: KVCache, documents: Documents, start: int, config: QwenConfig) -> jax.Array:
    """Attention of the queries at times start.. over the keys [0, S), in blocks of `attention_block` queries."""
    B, G, R, T, K = q_BGRTK.shape
    block = config.attention_block
    blocks = -(-T // block)
    documents_BS = documents.index_BT[:, : start + T]

    def one_block(args: tuple[jax.Array, jax.Array, tuple[jax.Array, ...]]) -> jax.Array:
        first, q, queries_of = args
        return attend(q, *kv, _visible(first + jnp.arange(q.shape[3]), queries_of, documents_BS))

    if config.remat != "none":
        one_block = jax.checkpoint(one_block, prevent_cse=blocks == 1)
    own_and_trunk = (documents.index_BT,) if documents.trunk_BT is None else (documents.index_BT, documents.trunk_BT)
    queries_of = tuple(x_BT[:, start : start + T] for x_BT in own_and_trunk)
    if blocks == 1:
        return one_block((jnp.asarray(start), q_BGRTK, queries_of))
    # Padded queries are given the last document, so that they have a key to attend to.
    pad = blocks * block - T
    queries = jnp.pad(q_BGRTK, ((0, 0), (0, 0), (0, 0), (0, pad), (0, 0)))
    queries = jnp.moveaxis(queries.reshape(B, G, R, blocks, block, K), 3, 0)
    queries_of = tuple(
        jnp.moveaxis(jnp.pad(x_BT, ((0, 0), (0, pad)), mode="edge").reshape(B, blocks, block), 1, 0)
        for x_BT in queries_of
    )
    out = jax.lax.map(one_block, (start + jnp.arange(blocks) * block, queries, queries_of))
    return jnp.moveaxis(out, 0, 3).reshape(B, G, R, blocks * block, K)[:, :, :, :T]


def _visible(times_T: jax.Array, queries_of: tuple[jax.Array, ...], documents_BS: jax.Array) -> jax.Array:
    """[B,T,S]: keys that are not later, in the queries' documents or, where these are given second, their trunks."""
    causal_TS = times_T[:, None] >= jnp.arange(documents_BS.shape[1])
    same_BTS = (of_BT[:, :, None] == documents_BS[:, None, :] for of_BT in queries_of)
    return causal_TS & functools.reduce(jnp.logical_or, same_BTS)
