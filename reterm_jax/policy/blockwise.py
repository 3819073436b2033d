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
from reterm_jax.policy.layers import mixed

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
    pairs = _Pairs(own_BT, trunk_BT, block)
    B, G, R, T, K = q_BGRTK.shape

    def queries(i, carry):
        q_BGRCK = _slice(q_BGRTK, i, block, axis=3)

        def meet(pair, carry):
            total_BGRCK, weight_BGRC, largest_BGRC = carry
            j = pairs.keys_N[pair]
            k, v = (_slice(x, j, block, axis=2) for x in (k_BGTK, v_BGTK))
            scores = jnp.einsum("bgrtk,bgsk->bgrts", q_BGRCK, k, preferred_element_type=jnp.float32)
            visible = pairs.visible(i, j)[:, None, None]
            scores = jnp.where(visible, scores, _LOWEST)
            new_largest = jnp.maximum(largest_BGRC, jnp.max(scores, axis=-1))
            weights = jnp.where(visible, jnp.exp(scores - new_largest[..., None]), 0.0)
            rescale = jnp.exp(largest_BGRC - new_largest)
            seen = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
            return total_BGRCK * rescale[..., None] + seen, weight_BGRC * rescale + jnp.sum(weights, -1), new_largest

        nothing = jnp.zeros((B, G, R, block), jnp.float32)
        start = jnp.zeros((B, G, R, block, K), jnp.float32), nothing, nothing + _LOWEST
        total, weight, largest = lax.fori_loop(pairs.starts_N[i], pairs.starts_N[i + 1], meet, start)
        results = (total / weight[..., None]).astype(v_BGTK.dtype), largest + jnp.log(weight)
        return tuple(_put(x, result, i, block, axis=3) for x, result in zip(carry, results, strict=True))

    empty = jnp.zeros(q_BGRTK.shape, v_BGTK.dtype), jnp.zeros((B, G, R, T), jnp.float32)
    out_BGRTK, norm_BGRT = (mixed(x) for x in lax.fori_loop(0, T // block, queries, empty))
    return out_BGRTK, (q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, out_BGRTK, norm_BGRT)


def _backward(block, residuals, dout_BGRTK):
    q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, out_BGRTK, norm_BGRT = residuals
    pairs = _Pairs(own_BT, trunk_BT, block)
    B, G, R, T, K = q_BGRTK.shape
    # sum_s p_ts dp_ts, by which the softmax's gradient is centred.
    centre_BGRT = jnp.einsum("bgrtk,bgrtk->bgrt", dout_BGRTK, out_BGRTK, preferred_element_type=jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # With K first the queries' gradient takes the scores, its larger side, as they lie. The keys are turned here, as
    # XLA's CPU backend refuses bfloat16 where it has to turn them in the product.
    k_BGKT = k_BGTK.swapaxes(2, 3)

    def queries(i, carry):
        dq_BGRTK, dk_BGTK, dv_BGTK = carry
        q, dout = (_slice(x, i, block, axis=3) for x in (q_BGRTK, dout_BGRTK))
        norm, centre = (_slice(x, i, block, axis=3)[:, :, None] for x in (norm_BGRT, centre_BGRT))

        def meet(pair, carry):
            dq_BGKRC, dk_BGTK, dv_BGTK = carry
            j = pairs.keys_N[pair]
            k, v = (_slice(x, j, block, axis=2) for x in (k_BGTK, v_BGTK))
            # Keys first, as two of the three gradients need them: [B,G,S,R,T].
            visible = pairs.visible(i, j).swapaxes(-1, -2)[:, None, :, None]
            weights = jnp.where(visible, jnp.exp(product("bgsk,bgrtk->bgsrt", k, q) - norm), 0.0)
            dscores = (weights * (product("bgsk,bgrtk->bgsrt", v, dout) - centre)).astype(q.dtype)
            dq = product("bgks,bgsrt->bgkrt", _slice(k_BGKT, j, block, axis=3), dscores)
            dk = product("bgsrt,bgrtk->bgsk", dscores, q)
            dv = product("bgsrt,bgrtk->bgsk", weights.astype(dout.dtype), dout)
            return dq_BGKRC + dq, _add(dk_BGTK, dk, j, block, axis=2), _add(dv_BGTK, dv, j, block, axis=2)

        start = jnp.zeros((B, G, K, R, block), jnp.float32), dk_BGTK, dv_BGTK
        dq, dk_BGTK, dv_BGTK = lax.fori_loop(pairs.starts_N[i], pairs.starts_N[i + 1], meet, start)
        dq = jnp.moveaxis(dq, 2, -1).astype(dq_BGRTK.dtype)
        return _put(dq_BGRTK, dq, i, block, axis=3), dk_BGTK, dv_BGTK

    start = jnp.zeros_like(q_BGRTK), *(jnp.zeros(x.shape, jnp.float32) for x in (k_BGTK, v_BGTK))
    dq, dk, dv = lax.fori_loop(0, T // block, queries, start)
    return dq, dk.astype(k_BGTK.dtype), dv.astype(v_BGTK.dtype), None, None


_attention.defvjp(_forward, _backward)


class _Pairs:
    """The pairs of a block of queries and a block of keys that have any score, by the block of queries.

    Attributes:
      starts_N: for each block of queries where its pairs start, and then where the last one's end.
      keys_N: a pair's block of keys; what is after the last pair means nothing.
    """

    def __init__(self, own_BT, trunk_BT, block):
        self._block = block
        self._own_BT, self._trunk_BT = own_BT, trunk_BT
        # Documents are numbered along the row, so a block's keys lie in a range of them. A range of trunks may cover
        # more than the queries need: that costs time, not exactness.
        blocks = own_BT.shape[1] // block
        own_BNC, trunk_BNC = (x.reshape(x.shape[0], blocks, block) for x in (own_BT, trunk_BT))
        first_BN, last_BN = own_BNC.min(axis=-1), own_BNC.max(axis=-1)

        def overlap(from_BN, to_BN):
            return (from_BN[:, :, None] <= last_BN[:, None, :]) & (to_BN[:, :, None] >= first_BN[:, None, :])

        seen_BNN = overlap(first_BN, last_BN) | overlap(trunk_BNC.min(axis=-1), trunk_BNC.max(axis=-1))
        meet_NN = jnp.any(seen_BNN, axis=0) & jnp.tril(jnp.ones((blocks, blocks), bool))
        self.starts_N = jnp.pad(jnp.cumsum(jnp.sum(meet_NN, axis=1)), (1, 0))
        self.keys_N = jnp.nonzero(meet_NN, size=blocks * (blocks + 1) // 2, fill_value=0)[1]

    def visible(self, i, j):
        """Which of the queries of block i see which of the keys of block j: bool [B,C,C]."""
        block = self._block
        of_keys = _slice(self._own_BT, j, block, 1)[:, None, :]
        own, trunk = (_slice(x, i, block, 1)[:, :, None] for x in (self._own_BT, self._trunk_BT))
        times = jnp.arange(block)
        return ((own == of_keys) | (trunk == of_keys)) & (i * block + times[:, None] >= j * block + times)


def _slice(x, index, block, axis):
    return lax.dynamic_slice_in_dim(x, index * block, block, axis)


def _put(x, part, index, block, axis):
    return lax.dynamic_update_slice_in_dim(x, part, index * block, axis)


def _add(x, part, index, block, axis):
    return _put(x, _slice(x, index, block, axis) + part, index, block, axis)
