"""Exact attention of packed rows in blocks, forward and backward: no [T,T] array, and no work on blocks out of sight.

A block of queries meets one block of keys at a time and keeps a running softmax (arXiv 1805.02867, 2205.14135). A pair
of blocks is skipped where the keys are all later, or belong to none of the queries' documents or trunks, so that a row
of many short documents, or of many branches, costs what its documents cost. The backward pass computes a pair's
weights again from the saved log-normalisers.

Dimension letters: B rows, T tokens, N blocks, C tokens of a block, G key/value heads, R query heads per key/value
head, K head size.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax

from reterm_jax.policy.documents import Documents

# Stands for minus infinity in running maxima, where the difference of two infinities would not be a number.
_LOWEST = -1e30


def blockwise_attention(
    q_BGRTK: jax.Array, k_BGTK: jax.Array, v_BGTK: jax.Array, documents: Documents, *, block: int
) -> jax.Array:
    """softmax(q k / sqrt(K)) v over the keys that are not later and in the query's document or its trunk.

    Scores, softmax and sums are float32; products take the inputs' dtype. Differentiable in q, k and v.

    Args:
      block: tokens of a block of queries and of keys; at most this many squared scores per head exist at one time.
    """
    T = q_BGRTK.shape[3]
    block = min(block, T)
    pad = -T % block
    own_BT, trunk_BT = documents.index_BT, documents.trunk_BT
    # Padded queries join the last document, so that they see a key; padded keys are later than every query.
    own_BT = jnp.pad(own_BT, ((0, 0), (0, pad)), mode="edge")
    trunk_BT = own_BT if trunk_BT is None else jnp.pad(trunk_BT, ((0, 0), (0, pad)), mode="edge")
    q, k, v = (jnp.pad(x, ((0, 0),) * (x.ndim - 2) + ((0, pad), (0, 0))) for x in (q_BGRTK, k_BGTK, v_BGTK))
    return _attention(q * q.shape[-1] ** -0.5, k, v, own_BT, trunk_BT, block)[:, :, :, :T]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _attention(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block):
    return _forward(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block)[0]


def _forward(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block):
    pairs = _Pairs(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block)

    def queries(i):
        def keys(j, carry):
            def meet(carry):
                total_BGRCK, weight_BGRC, largest_BGRC = carry
                scores, visible, v = pairs.scores(i, j)
                new_largest = jnp.maximum(largest_BGRC, jnp.max(scores, axis=-1))
                weights = jnp.where(visible, jnp.exp(scores - new_largest[..., None]), 0.0)
                rescale = jnp.exp(largest_BGRC - new_largest)
                seen = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
                weight = weight_BGRC * rescale + jnp.sum(weights, axis=-1)
                return total_BGRCK * rescale[..., None] + seen, weight, new_largest

            return lax.cond(pairs.meet_NN[i, j], meet, lambda carry: carry, carry)

        B, G, R, _, K = q_BGRTK.shape
        nothing = jnp.zeros((B, G, R, block), jnp.float32)
        start = jnp.zeros((B, G, R, block, K), jnp.float32), nothing, nothing + _LOWEST
        total_BGRCK, weight_BGRC, largest_BGRC = lax.fori_loop(0, i + 1, keys, start)
        return (total_BGRCK / weight_BGRC[..., None]).astype(v_BGTK.dtype), largest_BGRC + jnp.log(weight_BGRC)

    out_NBGRCK, norm_NBGRC = lax.map(queries, jnp.arange(pairs.blocks))
    out_BGRTK = jnp.moveaxis(out_NBGRCK, 0, 3).reshape(q_BGRTK.shape)
    norm_BGRT = jnp.moveaxis(norm_NBGRC, 0, 3).reshape(q_BGRTK.shape[:-1])
    return out_BGRTK, (q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, out_BGRTK, norm_BGRT)


def _backward(block, residuals, dout_BGRTK):
    q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, out_BGRTK, norm_BGRT = residuals
    pairs = _Pairs(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block)
    # sum_s p_ts dp_ts, by which the softmax's gradient is centred.
    centre_BGRT = jnp.einsum("bgrtk,bgrtk->bgrt", dout_BGRTK, out_BGRTK, preferred_element_type=jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)

    def keys(j, carry):
        dq_BGRTK, dk_BGTK, dv_BGTK = carry

        def queries(i, carry):
            def meet(carry):
                dq_BGRTK, dk_BGCK, dv_BGCK = carry
                scores, visible, v = pairs.scores(i, j)
                norm, centre = (_slice(x, i, block, axis=3)[..., None] for x in (norm_BGRT, centre_BGRT))
                q, k = _slice(q_BGRTK, i, block, axis=3), _slice(k_BGTK, j, block, axis=2)
                dout = _slice(dout_BGRTK, i, block, axis=3)
                weights = jnp.where(visible, jnp.exp(scores - norm), 0.0)
                dweights = product("bgrtk,bgsk->bgrts", dout, v)
                dscores = (weights * (dweights - centre)).astype(q.dtype)
                dq = _slice(dq_BGRTK, i, block, axis=3) + product("bgrts,bgsk->bgrtk", dscores, k)
                dq_BGRTK = lax.dynamic_update_slice_in_dim(dq_BGRTK, dq, i * block, axis=3)
                dk_BGCK += product("bgrts,bgrtk->bgsk", dscores, q)
                dv_BGCK += product("bgrts,bgrtk->bgsk", weights.astype(dout.dtype), dout)
                return dq_BGRTK, dk_BGCK, dv_BGCK

            return lax.cond(pairs.meet_NN[i, j], meet, lambda carry: carry, carry)

        nothing = jnp.zeros_like(_slice(dk_BGTK, 0, block, axis=2))
        dq_BGRTK, dk, dv = lax.fori_loop(j, pairs.blocks, queries, (dq_BGRTK, nothing, nothing))
        dk_BGTK, dv_BGTK = (
            lax.dynamic_update_slice_in_dim(whole, part, j * block, axis=2)
            for whole, part in ((dk_BGTK, dk), (dv_BGTK, dv))
        )
        return dq_BGRTK, dk_BGTK, dv_BGTK

    start = (jnp.zeros(x.shape, jnp.float32) for x in (q_BGRTK, k_BGTK, v_BGTK))
    grads = lax.fori_loop(0, pairs.blocks, keys, tuple(start))
    dq, dk, dv = (grad.astype(x.dtype) for grad, x in zip(grads, (q_BGRTK, k_BGTK, v_BGTK), strict=True))
    return dq, dk, dv, None, None


_attention.defvjp(_forward, _backward)


class _Pairs:
    """The scores of one block of queries with one block of keys, and which pairs of blocks have any."""

    def __init__(self, q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block):
        self.blocks = q_BGRTK.shape[3] // block
        self._block = block
        self._arrays = q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT
        # Documents are numbered along the row, so a block's keys lie in a range of them. A range of trunks may cover
        # more than the queries need: that costs time, not exactness.
        own_BNC, trunk_BNC = (x.reshape(x.shape[0], self.blocks, block) for x in (own_BT, trunk_BT))
        first_BN, last_BN = own_BNC.min(axis=-1), own_BNC.max(axis=-1)

        def overlap(from_BN, to_BN):
            return (from_BN[:, :, None] <= last_BN[:, None, :]) & (to_BN[:, :, None] >= first_BN[:, None, :])

        seen_BNN = overlap(first_BN, last_BN) | overlap(trunk_BNC.min(axis=-1), trunk_BNC.max(axis=-1))
        self.meet_NN = jnp.any(seen_BNN, axis=0)

    def scores(self, i, j):
        """(scores, which count, values) of queries i and keys j: [B,G,R,C,C] float32, bool [B,1,1,C,C], [B,G,C,K]."""
        q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT = self._arrays
        block = self._block
        q, k, v = _slice(q_BGRTK, i, block, 3), _slice(k_BGTK, j, block, 2), _slice(v_BGTK, j, block, 2)
        of_keys = _slice(own_BT, j, block, 1)[:, None, :]
        same = (_slice(own_BT, i, block, 1)[:, :, None] == of_keys) | (
            _slice(trunk_BT, i, block, 1)[:, :, None] == of_keys
        )
        times = jnp.arange(block)
        visible = (same & (i * block + times[:, None] >= j * block + times))[:, None, None]
        scores = jnp.einsum("bgrtk,bgsk->bgrts", q, k, preferred_element_type=jnp.float32)
        return jnp.where(visible, scores, _LOWEST), visible, v


def _slice(x, index, block, axis):
    return lax.dynamic_slice_in_dim(x, index * block, block, axis)
