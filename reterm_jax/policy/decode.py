"""Incremental decoding: per-row caches that grow by any number of tokens, and that can be forked.

Every array of a cache has the row as its first axis, so selecting, repeating or overwriting rows is plain indexing.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from reterm_jax.policy.attention import KVCache, cached_attention
from reterm_jax.policy.config import LINEAR, QwenConfig
from reterm_jax.policy.delta_net import DeltaState, delta_net, initial_state
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.forward import embed, head, layer_norm
from reterm_jax.policy.layers import mlp
from reterm_jax.policy.spec import Params


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """Tokens seen per row [B], and one KVCache or DeltaState per layer."""

    lengths_B: jax.Array
    layers: tuple[KVCache | DeltaState, ...]


def init_cache(config: QwenConfig, batch: int, max_len: int) -> Cache:
    """An empty cache for `batch` rows of up to `max_len` tokens."""
    layers: list[KVCache | DeltaState] = []
    for kind in config.layer_types:
        if kind == LINEAR:
            layers.append(initial_state(config, batch))
        else:
            shape = (batch, config.num_key_value_heads, max_len, config.head_dim)
            layers.append(KVCache(jnp.zeros(shape, config.compute_dtype), jnp.zeros(shape, config.compute_dtype)))
    return Cache(jnp.zeros((batch,), jnp.int32), tuple(layers))


def extend(
    params: Params, config: QwenConfig, cache: Cache, tokens_BT: jax.Array, lengths_B: jax.Array
) -> tuple[jax.Array, Cache]:
    """Appends the first `lengths_B[b]` of T tokens to row b: (float32 logits [B,V] after its last token, cache).

    A row of length 0 keeps its cache as it is, and its logits mean nothing. The caller keeps every row's total within
    the cache's `max_len`: tokens past it are lost. Call it under `jax.jit`, donating the cache where it is not needed
    again; T = 1 takes the recurrent step.
    """
    T = tokens_BT.shape[1]
    positions_BT = cache.lengths_B[:, None] + jnp.arange(T, dtype=jnp.int32)
    valid_BT = jnp.arange(T) < lengths_B[:, None]
    documents = Documents(jnp.zeros_like(tokens_BT), positions_BT)
    x_BTD = embed(params, config, tokens_BT)
    layers = []
    # Unrolled, unlike training: a scan would copy every layer's cache in and out at each step.
    for index, (kind, layer_cache) in enumerate(zip(config.layer_types, cache.layers, strict=True)):
        block, position = divmod(index, len(config.layer_pattern))
        p = jax.tree.map(lambda stacked, block=block: stacked[block], params["layers"][str(position)])
        normed_BTD = layer_norm(x_BTD, p["input_norm"], config)
        if kind == LINEAR:
            mixed_BTD, layer_cache = delta_net(p["mixer"], config, normed_BTD, documents, layer_cache, valid_BT)
        else:
            mixed_BTD, layer_cache = cached_attention(
                p["mixer"], config, normed_BTD, positions_BT, valid_BT, layer_cache
            )
        x_BTD = x_BTD + mixed_BTD
        x_BTD = x_BTD + mlp(p["mlp"], layer_norm(x_BTD, p["post_norm"], config))
        layers.append(layer_cache)
    last_B11 = jnp.maximum(lengths_B - 1, 0)[:, None, None]
    last_BD = layer_norm(jnp.take_along_axis(x_BTD, last_B11, axis=1)[:, 0], params["final_norm"], config)
    logits_BV = jnp.einsum(
        "bd,vd->bv", last_BD, head(params, config).astype(last_BD.dtype), preferred_element_type=jnp.float32
    )
    return logits_BV, Cache(cache.lengths_B + lengths_B, tuple(layers))


def fork(cache: Cache, rows_B: jax.Array, max_len: int | None = None) -> Cache:
    """A cache whose row i is a copy of row `rows_B[i]`: repeats fork a row, omissions drop one.

    With `max_len` the copies have room for only so many tokens; rows that hold more lose the rest.
    """

    def copy(layer: KVCache | DeltaState) -> KVCache | DeltaState:
        if isinstance(layer, KVCache):
            layer = KVCache(*(x[:, :, :max_len] for x in layer))
        return jax.tree.map(lambda x: jnp.take(x, rows_B, axis=0), layer)

    return Cache(jnp.take(cache.lengths_B, rows_B), tuple(map(copy, cache.layers)))


def write(cache: Cache, rows_B: jax.Array, source: Cache) -> Cache:
    """Overwrites row `rows_B[i]` with row i of `source`, which may have less room; a row past the end is dropped."""

    def put(old: KVCache | DeltaState, new: KVCache | DeltaState) -> KVCache | DeltaState:
        if isinstance(old, KVCache):
            room = new.k_BGSK.shape[2]
            return KVCache(*(x.at[rows_B, :, :room].set(y, mode="drop") for x, y in zip(old, new, strict=True)))
        return jax.tree.map(lambda x, y: x.at[rows_B].set(y, mode="drop"), old, new)

    lengths_B = cache.lengths_B.at[rows_B].set(source.lengths_B, mode="drop")
    return Cache(lengths_B, tuple(put(o, n) for o, n in zip(cache.layers, source.layers, strict=True)))
