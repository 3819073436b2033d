"""Gated DeltaNet (arXiv 2412.06464): a linear-attention layer with a decaying matrix state per head.

Per token t and head, with decay exp(g_t), write strength b_t, unit key k_t and scaled unit query q_t:

    S_t = exp(g_t) S_{t-1} + b_t k_t (v_t - exp(g_t) S_{t-1}^T k_t)^T        o_t = S_t^T q_t

Training runs the chunked form of it (`chunked_delta_rule`), decoding the recurrence itself (`delta_rule_step`).
Gates, norms and the state are float32. Dimension letters: B rows, T tokens, N chunks, C tokens of a chunk, G key
heads, R value heads per key head, H value heads (G R), K key size, V value size, W convolution width.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from reterm_jax.policy.chunk_inverse import unit_lower_inverse
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.layers import gated_rms_norm, l2_normalise, mixed, project, times_weight

DeltaNetParams = dict[str, jax.Array]

# Accelerators multiply float32 in fewer bits by default; the chunk algebra needs them all.
_EXACT = jax.lax.Precision.HIGHEST

# Chunks of a long row whose algebra is in memory at one time; what is recomputed for it is so whatever `remat` says.
_SEGMENT = 32


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
    documents: Documents,
    start: DeltaState,
    valid_BT: jax.Array | None = None,
) -> tuple[jax.Array, DeltaState]:
    """The layer over T tokens from `start`, which belongs to each row's first document; returns the state after them.

    Convolution and state restart where the document changes: from nothing, or in a branch from where its trunk ends.
    With trunks the returned state is meaningless, and `start` must be `initial_state`. With `valid_BT` (a prefix of
    each row), the tokens that are not valid leave the returned state as it was, and what is computed for them is
    meaningless.
    """
    B, T, _ = x_BTD.shape
    raw = [project(x_BTD, p[name]) for name in ("q_proj", "k_proj", "v_proj")]
    joined = [jnp.concatenate([past, new], axis=1) for past, new in zip(start[:3], raw, strict=True)]
    q_BTGK, k_BTGK, v_BTHV = (
        _short_convolution(x, p[name], documents)
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
            q_BTGK,
            k_BTGK,
            v_BTGRV,
            *gates,
            documents.index_BT,
            start.state_BGRKV,
            chunk=config.chunk_size,
            trunk_BT=documents.trunk_BT,
        )
    # Rounded as the reference and the sampler's kernels do.
    out_BTHV = mixed(out_BTGRV.reshape(B, T, H, V).astype(config.compute_dtype))
    out_BTHV = gated_rms_norm(out_BTHV, project(x_BTD, p["z_proj"]), p["norm"], eps=config.rms_norm_eps)
    out_BTD = project(out_BTHV, p["out_proj"], axes=2)
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
    trunk_BT: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """The recurrence for T tokens at once, restarted where the document changes: (outputs, state after the last).

    With `trunk_BT` a branch starts from the state at the end of its trunk (see `documents.Documents`). Within a chunk
    that is a matter of which tokens see which. From chunk to chunk two states are carried, that of the document and
    that of the trunk at its end, and a token's way to its document's first token enters the chunk in one of them.

    Within a chunk the writes solve a unit lower-triangular system (the UT transform of arXiv 2406.06484, with decays
    as in arXiv 2412.06464). What does not depend on the state is computed for all chunks of a segment in parallel; the
    sequential scan only carries S <- A S + M per chunk. A row of several segments computes each again for its gradient,
    so that this takes the memory of one. All arrays are float32 except the integer documents.
    """
    B, T, G, R, V = v_BTGRV.shape
    chunk = min(chunk, 1 << (T - 1).bit_length())
    segments = -(-T // (chunk * _SEGMENT))
    pad = -T % (chunk * segments)
    # Padding neither decays (log decay 0) nor writes (strength 0), so the state passes through it.
    q, k, v, log_decay, strength = (
        _chunks_first(x, chunk, pad) for x in (q_BTGK, k_BTGK, v_BTGRV, log_decay_BTGR, strength_BTGR)
    )
    documents = _chunks_first(documents_BT, chunk, pad, mode="edge")
    trunks = None if trunk_BT is None else _chunks_first(trunk_BT, chunk, pad, mode="edge")
    # The token before a chunk; before the first, a token of the row's first document.
    entering = tuple(None if x is None else jnp.concatenate([x[:1, :, 0], x[:-1, :, -1]]) for x in (documents, trunks))
    chunks = _Chunks(q, k, v, log_decay, strength, documents, trunks, *entering)
    states = (state_BGRKV,) if trunk_BT is None else (state_BGRKV, state_BGRKV)
    if segments == 1:
        states, out = _segment(states, chunks)
    else:
        chunks = jax.tree.map(lambda x: x.reshape(segments, -1, *x.shape[1:]), chunks)
        recomputed = jax.checkpoint(_segment, prevent_cse=False)
        states, out = jax.lax.scan(lambda states, chunks: recomputed(mixed(states), chunks), states, chunks)
    out_BTGRV = jnp.moveaxis(out.reshape(-1, B, chunk, G, R, V), 0, 1).reshape(B, T + pad, G, R, V)
    return out_BTGRV[:, :T], states[0]


_States = tuple[jax.Array, ...]  # [B,G,R,K,V]: the document's, and with trunks that of its trunk's end
_Step = tuple[jax.Array, jax.Array]  # a state S becomes keep S + write: keep [N,B,G,R,K,K], write [N,B,G,R,K,V]


class _Chunks(NamedTuple):
    """The inputs of neighbouring chunks; without trunks the two fields of trunks are None."""

    q_NBCGK: jax.Array
    k_NBCGK: jax.Array
    v_NBCGRV: jax.Array
    log_decay_NBCGR: jax.Array
    strength_NBCGR: jax.Array
    documents_NBC: jax.Array
    trunks_NBC: jax.Array | None
    document_in_NB: jax.Array
    trunk_in_NB: jax.Array | None


def _segment(states: _States, chunks: _Chunks) -> tuple[_States, jax.Array]:
    """`chunked_delta_rule` for neighbouring chunks: (states after them, outputs [N,B,C,G,R,V])."""
    documents_NBC, trunks_NBC = chunks.documents_NBC, chunks.trunks_NBC
    chunk, R = chunks.v_NBCGRV.shape[2], chunks.v_NBCGRV.shape[4]
    q_NBGCK, k_NBGCK = (x.swapaxes(2, 3) for x in (chunks.q_NBCGK, chunks.k_NBCGK))
    v_NBGRCV, strength_NBGRC = (jnp.moveaxis(x, 2, 4) for x in (chunks.v_NBCGRV, chunks.strength_NBCGR))

    # Only the document that enters a chunk, or branches of a trunk that does, read the carried state.
    in_document_NBCC = documents_NBC[..., :, None] == documents_NBC[..., None, :]
    reads_own_NBC = documents_NBC == chunks.document_in_NB[..., None]
    reads_NBC = reads_own_NBC
    if trunks_NBC is not None:
        in_document_NBCC |= trunks_NBC[..., :, None] == documents_NBC[..., None, :]
        reads_own_NBC |= trunks_NBC == chunks.document_in_NB[..., None]
        reads_NBC = reads_own_NBC | (trunks_NBC == chunks.trunk_in_NB[..., None])
    visible_NBCC = in_document_NBCC & jnp.tril(jnp.ones((chunk, chunk), bool))

    # Summed from the document's first token in the chunk, not as a running sum over the chunk: no rounding error, not
    # even in gradients, then comes from the document before.
    decay_sum_NBGRC = _product("nbij,nbjgr->nbgri", visible_NBCC.astype(jnp.float32), chunks.log_decay_NBCGR)
    # Masked before exp: above the diagonal and across documents the difference may be positive, and its exp overflow.
    difference = decay_sum_NBGRC[..., :, None] - decay_sum_NBGRC[..., None, :]
    decay_NBGRCC = jnp.exp(jnp.where(visible_NBCC[:, :, None, None], difference, -jnp.inf))
    decay_in_NBGRC = jnp.where(reads_NBC[:, :, None, None], jnp.exp(decay_sum_NBGRC), 0.0)

    # What only keys and queries make is made once for the R value heads that share them.
    key_key = _for_value_heads(_product("nbgik,nbgjk->nbgij", k_NBGCK, k_NBGCK), R)
    query_key = _for_value_heads(_product("nbgik,nbgjk->nbgij", q_NBGCK, k_NBGCK), R)
    q_NBGRCK, k_NBGRCK = (_for_value_heads(x, R) for x in (q_NBGCK, k_NBGCK))
    inverse_NBGRCC = unit_lower_inverse(jnp.tril(strength_NBGRC[..., None] * key_key * decay_NBGRCC, -1))
    # With the incoming state S, the chunk's corrected writes are `own` - `read` S.
    values_NBGRCV = strength_NBGRC[..., None] * v_NBGRCV
    keys_NBGRCK = (strength_NBGRC * decay_in_NBGRC)[..., None] * k_NBGRCK
    # Products with `own` and with `read` stay apart: neither side is copied, and a CPU runs the two side by side.
    own_NBGRCV = _product("nbgrij,nbgrjv->nbgriv", inverse_NBGRCC, values_NBGRCV)
    read_NBGRCK = _product("nbgrij,nbgrjk->nbgrik", inverse_NBGRCC, keys_NBGRCK)

    def step(decay_out: jax.Array, decay_through: jax.Array) -> _Step:
        """The state at a token as a function of the state that its way enters the chunk in."""
        k_out_NBGRCK = k_NBGRCK * decay_out[..., None]
        forget_NBGRKK = _product("nbgrck,nbgrcl->nbgrkl", k_out_NBGRCK, read_NBGRCK)
        write_NBGRKV = _product("nbgrck,nbgrcv->nbgrkv", k_out_NBGRCK, own_NBGRCV)
        keep_NBGRKK = decay_through[..., None, None] * jnp.eye(forget_NBGRKK.shape[-1]) - forget_NBGRKK
        return keep_NBGRKK, write_NBGRKV

    at_end = step(decay_NBGRCC[..., -1, :], decay_in_NBGRC[..., -1])
    if trunks_NBC is None:
        states, entered = _carry(states, (at_end,), None)
    else:
        # The last token of the chunk that is in the trunk of the chunk's last token: after it that trunk has ended, or
        # goes on in the next chunk. Where there is none, the trunk had ended before, and its state is carried on.
        in_trunk_NBC = documents_NBC == trunks_NBC[..., -1:]
        last_NB = jnp.max(jnp.where(in_trunk_NBC, jnp.arange(chunk), -1), axis=-1)
        picked_NBC = last_NB[..., None] == jnp.arange(chunk)

        def at_last(x_NBGRC: jax.Array) -> jax.Array:
            return jnp.sum(jnp.where(picked_NBC[:, :, None, None], x_NBGRC, 0.0), axis=-1)

        seen_NBC = jnp.any(picked_NBC[..., None] & visible_NBCC, axis=-2)
        difference = at_last(decay_sum_NBGRC)[..., None] - decay_sum_NBGRC
        decay_out_NBGRC = jnp.exp(jnp.where(seen_NBC[:, :, None, None], difference, -jnp.inf))
        ended_NB11 = (last_NB < 0)[..., None, None]
        trunk_end = step(decay_out_NBGRC, jnp.where(ended_NB11, 1.0, at_last(decay_in_NBGRC)))
        own_at_end_NB = reads_own_NBC[..., -1]
        own_at_trunk_NB = jnp.any(in_trunk_NBC & reads_own_NBC, axis=-1) & (last_NB >= 0)

        states, entered = _carry(states, (at_end, trunk_end), (own_at_end_NB, own_at_trunk_NB))
    # Own writes reach the outputs directly, the state through the query less what the writes have corrected of it.
    weights_NBGRCC = query_key * decay_NBGRCC
    out_NBGRCV = _product("nbgrij,nbgrjv->nbgriv", weights_NBGRCC, own_NBGRCV)
    q_in_NBGRCK = q_NBGRCK * decay_in_NBGRC[..., None] - _product("nbgrij,nbgrjk->nbgrik", weights_NBGRCC, read_NBGRCK)
    if trunks_NBC is None:
        out_NBGRCV += _product("nbgrck,nbgrkv->nbgrcv", q_in_NBGRCK, entered[0])
    else:
        for reads, state_NBGRKV in zip((reads_own_NBC, ~reads_own_NBC), entered, strict=True):
            reading_NBGRCK = jnp.where(reads[:, :, None, None, :, None], q_in_NBGRCK, 0.0)
            out_NBGRCV += _product("nbgrck,nbgrkv->nbgrcv", reading_NBGRCK, state_NBGRKV)
    return states, jnp.moveaxis(out_NBGRCV, 4, 2)


@jax.custom_vjp
def _carry(
    states: _States, steps: tuple[_Step, ...], from_own: tuple[jax.Array, ...] | None
) -> tuple[_States, _States]:
    """Carries the states from chunk to chunk: (those after the last, those that enter each [N,B,G,R,K,V]).

    Per step there is one state, which it makes of the one that `from_own` [N,B] says, the first or the second. The
    gradient is written out for what the loop over chunks then does: one product a state and chunk, and nothing kept
    but the states. The gradients of the steps follow from them for all chunks at once.
    """

    def chunk(states: _States, inputs: tuple) -> tuple[_States, _States]:
        steps, from_own = inputs
        after = [
            _product("bgrkl,bgrlv->bgrkv", keep, state) + write
            for (keep, write), state in zip(steps, _step_inputs(states, from_own), strict=True)
        ]
        return tuple(after), states

    return jax.lax.scan(chunk, states, (steps, from_own))


def _carry_forward(
    states: _States, steps: tuple[_Step, ...], from_own: tuple[jax.Array, ...] | None
) -> tuple[tuple, tuple]:
    after, entered = _carry(states, steps, from_own)
    return (after, entered), (entered, [keep for keep, _ in steps], from_own)


def _carry_backward(kept: tuple, gradients: tuple[_States, _States]) -> tuple[_States, tuple[_Step, ...], None]:
    entered, keeps, from_own = kept
    d_after, d_entered = gradients

    def chunk(d_after: _States, inputs: tuple) -> tuple[_States, _States]:
        keeps, from_own, d_entered = inputs
        d_inputs = [_product("bgrlk,bgrlv->bgrkv", keep, d) for keep, d in zip(keeps, d_after, strict=True)]
        if from_own is None:
            return (d_entered[0] + d_inputs[0],), d_after
        owns = [own[:, None, None, None, None] for own in from_own]
        d_own, d_shared = d_entered
        for own, d in zip(owns, d_inputs, strict=True):
            d_own, d_shared = d_own + jnp.where(own, d, 0.0), d_shared + jnp.where(own, 0.0, d)
        return (d_own, d_shared), d_after

    d_states, d_writes = jax.lax.scan(chunk, d_after, (keeps, from_own, d_entered), reverse=True)
    d_steps = tuple(
        (_product("nbgrkv,nbgrlv->nbgrkl", d, state), d)
        for d, state in zip(d_writes, _step_inputs(entered, from_own), strict=True)
    )
    return d_states, d_steps, None


_carry.defvjp(_carry_forward, _carry_backward)


def _step_inputs(states: _States, from_own: tuple[jax.Array, ...] | None) -> _States:
    """For each step the state that it changes."""
    if from_own is None:
        return states
    own, shared = states
    return tuple(jnp.where(is_own[..., None, None, None, None], own, shared) for is_own in from_own)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(formula: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(formula, a, b, precision=_EXACT)


def _product_backward(formula: str, factors: tuple[jax.Array, jax.Array], d: jax.Array) -> tuple[jax.Array, jax.Array]:
    # Written out so that a gradient comes as its factor lies; by JAX's own rule every other one has to be turned.
    a, b = factors
    of_a, of_b, of_d = formula.replace("->", ",").split(",")
    return (
        jnp.einsum(f"{of_d},{of_b}->{of_a}", d, b, precision=_EXACT),
        jnp.einsum(f"{of_a},{of_d}->{of_b}", a, d, precision=_EXACT),
    )


_product.defvjp(lambda formula, a, b: (_product(formula, a, b), (a, b)), _product_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def _for_value_heads(x_NBG: jax.Array, heads: int) -> jax.Array:
    """[N,B,G,...] to [N,B,G,R,...]: the same for each of a key head's value heads."""
    return jnp.broadcast_to(x_NBG[:, :, :, None], (*x_NBG.shape[:3], heads, *x_NBG.shape[3:]))


def _sum_of_value_heads(heads: int, _: None, d_NBGR: jax.Array) -> tuple[jax.Array]:
    # Additions, not a sum over R: XLA's CPU backend is slow at sums over so short a dimension.
    return (functools.reduce(jnp.add, [d_NBGR[:, :, :, head] for head in range(heads)]),)


_for_value_heads.defvjp(lambda x_NBG, heads: (_for_value_heads(x_NBG, heads), None), _sum_of_value_heads)


def _chunks_first(x_BT: jax.Array, chunk: int, pad: int, mode: str = "constant") -> jax.Array:
    """[B,T,...] to [N,B,C,...], padded at the end of T."""
    B, T = x_BT.shape[:2]
    x_BT = jnp.pad(x_BT, ((0, 0), (0, pad), *((0, 0),) * (x_BT.ndim - 2)), mode=mode)
    return jnp.moveaxis(x_BT.reshape(B, (T + pad) // chunk, chunk, *x_BT.shape[2:]), 1, 0)


def _short_convolution(joined_BSHK: jax.Array, weight_HKW: jax.Array, documents: Documents) -> jax.Array:
    """silu of the causal depthwise convolution; `joined` holds W-1 earlier inputs, then the T new ones.

    An input of another document counts as zero, and before a branch's first input come its trunk's last ones. The
    earlier inputs belong to each row's first document; with trunks there are none.
    """
    T, W = documents.index_BT.shape[1], weight_HKW.shape[-1]
    documents_BS = jnp.pad(documents.index_BT, ((0, 0), (W - 1, 0)), mode="edge")
    total = 0.0
    for tap in range(W):
        if documents.trunk_BT is None or tap == W - 1:  # the last tap is the token itself
            same_BT = documents_BS[:, tap : tap + T] == documents.index_BT
            inputs_BTHK = joined_BSHK[:, tap : tap + T]
        else:
            column_BT, same_BT = documents.before(W - 1 - tap)
            inputs_BTHK = jnp.take_along_axis(joined_BSHK, (W - 1 + column_BT)[..., None, None], axis=1, mode="clip")
        term = times_weight(inputs_BTHK.astype(jnp.float32), weight_HKW[..., tap])
        total = total + jnp.where(same_BT[..., None, None], term, 0.0)
    return jax.nn.silu(total).astype(joined_BSHK.dtype)


def _last_inputs(joined_BSHK: jax.Array, past: int, valid_BT: jax.Array | None) -> jax.Array:
    """The `past` inputs before each row's next token."""
    if valid_BT is None:
        return joined_BSHK[:, joined_BSHK.shape[1] - past :]
    index_BW = jnp.sum(valid_BT, axis=1, dtype=jnp.int32)[:, None] + jnp.arange(past)
    return jnp.take_along_axis(joined_BSHK, index_BW[..., None, None], axis=1)
