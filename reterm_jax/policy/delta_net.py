"""Gated DeltaNet (arXiv 2412.06464): a linear-attention layer with a decaying matrix state per head.

Per token t and head, with decay exp(g_t), write strength b_t, unit key k_t and scaled unit query q_t:

    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

Training runs the chunked form of it (`chunked_delta_rule`), decoding the recurrence itself (`delta_rule_step`).
Gates, norms and the state are float32. Dimension letters: B rows, T tokens, N chunks, C tokens of a chunk, G key
heads, R value heads per key head, K key size, V value size, W convolution width.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from reterm_jax.policy.chunk_inverse import unit_lower_inverse
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.layers import gated_rms_norm, l2_normalise, project

DeltaNetParams = dict[str, jax.Array]

# Accelerators multiply float32 in fewer bits by default; the chunk algebra needs them all.
_EXACT = jax.lax.Precision.HIGHEST


class DeltaState(NamedTuple):
    """What one layer carries from token to token: the last W-1 convolution inputs, and the matrix state (float32)."""

    q_history_BWGK: jax.Array
    k_history_BWGK: jax.Array
    v_history_BWHV: jax.Array
    state_BGRKV: jax.Array


def initial_state(config: QwenConfig, batch: int) -> DeltaState:
    """The state before the first token: zeros."""
    c = config
    past = c.linear_conv_kernel_dim - 1
    keys = jnp.zeros((batch, past, c.linear_num_key_heads, c.linear_key_head_dim), c.compute_dtype)
    values = jnp.zeros((batch, past, c.linear_num_value_heads, c.linear_value_head_dim), c.compute_dtype)
    groups = c.linear_num_value_heads // c.linear_num_key_heads
    shape = (batch, c.linear_num_key_heads, groups, c.linear_key_head_dim, c.linear_value_head_dim)
    return DeltaState(keys, jnp.zeros_like(keys), values, jnp.zeros(shape, jnp.float32))


def delta_net(
    p: DeltaNetParams,
    config: QwenConfig,
    x_BTD: jax.Array,
    documents_BT: jax.Array,
    start: DeltaState,
    valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, DeltaState]:
    """The layer over T tokens from `start`, which belongs to each row's first document; returns the state after them.

    Convolution and state restart where `documents_BT` changes. With `valid_BT` (a prefix of each row), the tokens
    that are not valid leave the returned state as it was, and what is computed for them is meaningless.
    """
    B, T, _ = x_BTD.shape
    raw = [project(x_BTD, p[name]) for name in ("q_proj", "k_proj", "v_proj")]
    joined = [jnp.concatenate([past, new], axis=1) for past, new in zip(start[:3], raw, strict=True)]
    q_BTGK, k_BTGK, v_BTHV = (
        _short_convolution(x, p[name], documents_BT)
        for x, name in zip(joined, ("q_conv", "k_conv", "v_conv"), strict=True)
    )
    log_decay_BTH = -jnp.exp(p["a_log"]) * jax.nn.softplus(
        project(x_BTD, p["a_proj"]).astype(jnp.float32) + p["dt_bias"]
    )
    strength_BTH = jax.nn.sigmoid(project(x_BTD, p["b_proj"]).astype(jnp.float32))
    if valid_BT is not None:
        log_decay_BTH = jnp.where(valid_BT[..., None], log_decay_BTH, 0.0)
        strength_BTH = jnp.where(valid_BT[..., None], strength_BTH, 0.0)

    G, K = q_BTGK.shape[2:]
    H, V = v_BTHV.shape[2:]
    q_BTGK = l2_normalise(q_BTGK) * K**-0.5
    k_BTGK = l2_normalise(k_BTGK)
    v_BTGRV = v_BTHV.astype(jnp.float32).reshape(B, T, G, H // G, V)
    gates = [gate.reshape(B, T, G, H // G) for gate in (log_decay_BTH, strength_BTH)]
    if T == 1:
        out_BGRV, state = delta_rule_step(
            q_BTGK[:, 0], k_BTGK[:, 0], v_BTGRV[:, 0], gates[0][:, 0], gates[1][:, 0], start.state_BGRKV
        )
        out_BTGRV = out_BGRV[:, None]
    else:
        out_BTGRV, state = chunked_delta_rule(
            q_BTGK, k_BTGK, v_BTGRV, *gates, documents_BT, start.state_BGRKV, chunk=config.chunk_size
        )
    gate_BTHV = project(x_BTD, p["z_proj"])
    out_BTHV = gated_rms_norm(out_BTGRV.reshape(B, T, H, V), gate_BTHV, p["norm"], eps=config.rms_norm_eps)
    out_BTD = jnp.einsum("bthv,hvd->btd", out_BTHV, p["out_proj"].astype(x_BTD.dtype))
    histories = (_last_inputs(x, config.linear_conv_kernel_dim - 1, valid_BT) for x in joined)
    return out_BTD, DeltaState(*histories, state)


def delta_rule_step(
    q_BGK: jax.Array,
    k_BGK: jax.Array,
    v_BGRV: jax.Array,
    log_decay_BGR: jax.Array,
    strength_BGR: jax.Array,
    state_BGRKV: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """One token of the recurrence in the module's docstring: (output [B,G,R,V], next state). All float32."""
    decayed = state_BGRKV * jnp.exp(log_decay_BGR)[..., None, None]
    # Sums of products, not matmuls: the state is read once, where it lies, at full precision.
    remembered_BGRV = jnp.sum(decayed * k_BGK[:, :, None, :, None], axis=-2)
    write_BGRV = (v_BGRV - remembered_BGRV) * strength_BGR[..., None]
    state = decayed + k_BGK[:, :, None, :, None] * write_BGRV[..., None, :]
    return jnp.sum(state * q_BGK[:, :, None, :, None], axis=-2), state


def chunked_delta_rule(
    q_BTGK: jax.Array,
    k_BTGK: jax.Array,
    v_BTGRV: jax.Array,
    log_decay_BTGR: jax.Array,
    strength_BTGR: jax.Array,
    documents_BT: jax.Array,
    state_BGRKV: jax.Array,
    *,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence for T tokens at once, restarted where the document changes: (outputs, state after the last).

    Within a chunk the writes solve a unit lower-triangular system (the UT transform of arXiv 2406.06484, with decays
    as in arXiv 2412.06464). Everything that does not depend on the state is computed for all chunks in parallel; the
    sequential scan only carries S <- A S + M per chunk. All arrays are float32 except the integer documents.
    """
    T = q_BTGK.shape[1]
    chunk = min(chunk, 1 << (T - 1).bit_length())
    pad = -T % chunk
    # Padding neither decays (log decay 0) nor writes (strength 0), so the state passes through it.
    q, k, v, log_decay, strength = (
        _chunks_first(x, chunk, pad) for x in (q_BTGK, k_BTGK, v_BTGRV, log_decay_BTGR, strength_BTGR)
    )
    documents_NBC = _chunks_first(documents_BT, chunk, pad, mode="edge")
    q_NBGCK, k_NBGCK = q.swapaxes(2, 3), k.swapaxes(2, 3)
    v_NBGRCV = jnp.moveaxis(v, 2, 4)
    strength_NBGRC = jnp.moveaxis(strength, 2, 4)

    # Only the document that enters a chunk reads the carried state, and only the one that leaves it writes it.
    last_NB = documents_NBC[:, :, -1]
    entering_NB = jnp.concatenate([documents_NBC[:1, :, 0], last_NB[:-1]])
    from_state_NBC = documents_NBC == entering_NB[..., None]
    in_document_NBCC = documents_NBC[..., :, None] == documents_NBC[..., None, :]
    visible_NBCC = in_document_NBCC & jnp.tril(jnp.ones((chunk, chunk), bool))

    def product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum(formula, a, b, precision=_EXACT)

    # Summed from the document's first token in the chunk, not as a running sum over the chunk: no rounding error, not
    # even in gradients, then comes from the document before.
    decay_sum_NBGRC = product("nbij,nbjgr->nbgri", visible_NBCC.astype(log_decay.dtype), log_decay)
    # Masked before exp: above the diagonal and across documents the difference may be positive, and its exp overflow.
    difference = decay_sum_NBGRC[..., :, None] - decay_sum_NBGRC[..., None, :]
    decay_NBGRCC = jnp.exp(jnp.where(visible_NBCC[:, :, None, None], difference, -jnp.inf))
    decay_in = jnp.where(from_state_NBC[:, :, None, None], jnp.exp(decay_sum_NBGRC), 0.0)
    decay_out = decay_NBGRCC[..., -1, :]
    decay_through_NBGR = jnp.where((last_NB == entering_NB)[..., None, None], jnp.exp(decay_sum_NBGRC[..., -1]), 0.0)

    key_key = product("nbgik,nbgjk->nbgij", k_NBGCK, k_NBGCK)[:, :, :, None]
    query_key = product("nbgik,nbgjk->nbgij", q_NBGCK, k_NBGCK)[:, :, :, None]
    inverse_NBGRCC = unit_lower_inverse(jnp.tril(strength_NBGRC[..., None] * key_key * decay_NBGRCC, -1))
    # With the incoming state S, the chunk's corrected writes are `own` - `read` S.
    values_NBGRCV = strength_NBGRC[..., None] * v_NBGRCV
    keys_NBGRCK = (strength_NBGRC * decay_in)[..., None] * k_NBGCK[:, :, :, None]
    solved = product("nbgrij,nbgrjx->nbgrix", inverse_NBGRCC, jnp.concatenate([values_NBGRCV, keys_NBGRCK], -1))
    own_NBGRCV, read_NBGRCK = solved[..., : v.shape[-1]], solved[..., v.shape[-1] :]
    k_out_NBGRCK = k_NBGCK[:, :, :, None] * decay_out[..., None]
    forget_NBGRKK = product("nbgrck,nbgrcl->nbgrkl", k_out_NBGRCK, read_NBGRCK)
    write_NBGRKV = product("nbgrck,nbgrcv->nbgrkv", k_out_NBGRCK, own_NBGRCV)

    def next_state(state: jax.Array, step: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        through, forget, write = step
        return through[..., None, None] * state - product("bgrkl,bgrlv->bgrkv", forget, state) + write, state

    final_state, states_NBGRKV = jax.lax.scan(
        next_state, state_BGRKV, (decay_through_NBGR, forget_NBGRKK, write_NBGRKV)
    )
    # Own writes reach the outputs directly, the state through the query less what the writes have corrected of it.
    seen = product("nbgrij,nbgrjx->nbgrix", query_key * decay_NBGRCC, solved)
    from_own_NBGRCV, corrected_NBGRCK = seen[..., : v.shape[-1]], seen[..., v.shape[-1] :]
    q_in_NBGRCK = q_NBGCK[:, :, :, None] * decay_in[..., None] - corrected_NBGRCK
    out = from_own_NBGRCV + product("nbgrck,nbgrkv->nbgrcv", q_in_NBGRCK, states_NBGRKV)
    N, B, G, R, C, V = out.shape
    return out.transpose(1, 0, 4, 2, 3, 5).reshape(B, N * C, G, R, V)[:, :T], final_state


def _chunks_first(x_BT: jax.Array, chunk: int, pad: int, mode: str = "constant") -> jax.Array:
    """[B,T,...] to [N,B,C,...], padded at the end of T."""
    B, T = x_BT.shape[:2]
    x_BT = jnp.pad(x_BT, ((0, 0), (0, pad), *((0, 0),) * (x_BT.ndim - 2)), mode=mode)
    return jnp.moveaxis(x_BT.reshape(B, (T + pad) // chunk, chunk, *x_BT.shape[2:]), 1, 0)


def _short_convolution(joined_BSHK: jax.Array, weight_HKW: jax.Array, documents_BT: jax.Array) -> jax.Array:
    """silu of the causal depthwise convolution; `joined` holds W-1 earlier inputs, then the T new ones.

    An input of another document counts as zero. The earlier inputs belong to each row's first document.
    """
    T, W = documents_BT.shape[1], weight_HKW.shape[-1]
    documents_BS = jnp.pad(documents_BT, ((0, 0), (W - 1, 0)), mode="edge")
    total = 0.0
    for tap in range(W):
        same_BT = documents_BS[:, tap : tap + T] == documents_BT
        term = joined_BSHK[:, tap : tap + T].astype(jnp.float32) * weight_HKW[..., tap]
        total = total + jnp.where(same_BT[..., None, None], term, 0.0)
    return jax.nn.silu(total).astype(joined_BSHK.dtype)


def _last_inputs(joined_BSHK: jax.Array, past: int, valid_BT: jax.Array | None) -> jax.Array:
    """The `past` inputs before each row's next token."""
    if valid_BT is None:
        return joined_BSHK[:, joined_BSHK.shape[1] - past :]
    index_BW = jnp.sum(valid_BT, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(past)
    return jnp.take_along_axis(joined_BSHK, index_BW[..., None, None], axis=1)
