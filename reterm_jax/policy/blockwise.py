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
    pairs = _Pairs(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block)

    def meet(pair, carry):
        i, j = pairs.queries_N[pair], pairs.keys_N[pair]
        total_BGRCK, weight_BGRC, largest_BGRC = (_slice(x, i, block, axis=3) for x in carry)
        q, k, v = pairs.arrays(i, j)
        scores = jnp.einsum("bgrtk,bgsk->bgrts", q, k, preferred_element_type=jnp.float32)
        visible = pairs.visible(i, j)[:, None, None]
        scores = jnp.where(visible, scores, _LOWEST)
        new_largest = jnp.maximum(largest_BGRC, jnp.max(scores, axis=-1))
        weights = jnp.where(visible, jnp.exp(scores - new_largest[..., None]), 0.0)
        rescale = jnp.exp(largest_BGRC - new_largest)
        seen = jnp.einsum("bgrts,bgsk->bgrtk", weights.astype(v.dtype), v, preferred_element_type=jnp.float32)
        new = (
            total_BGRCK * rescale[..., None] + seen,
            weight_BGRC * rescale + jnp.sum(weights, axis=-1),
            new_largest,
        )
        return tuple(_put(x, part, i, block, axis=3) for x, part in zip(carry, new, strict=True))

    nothing = jnp.zeros(q_BGRTK.shape[:-1], jnp.float32)
    start = jnp.zeros(q_BGRTK.shape, jnp.float32), nothing, nothing + _LOWEST
    total_BGRTK, weight_BGRT, largest_BGRT = lax.fori_loop(0, pairs.count, meet, start)
    out_BGRTK = mixed((total_BGRTK / weight_BGRT[..., None]).astype(v_BGTK.dtype))
    norm_BGRT = mixed(largest_BGRT + jnp.log(weight_BGRT))
    return out_BGRTK, (q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, out_BGRTK, norm_BGRT)


def _backward(block, residuals, dout_BGRTK):
    q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, out_BGRTK, norm_BGRT = residuals
    pairs = _Pairs(q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block)
    # sum_s p_ts dp_ts, by which the softmax's gradient is centred.
    centre_BGRT = jnp.einsum("bgrtk,bgrtk->bgrt", dout_BGRTK, out_BGRTK, preferred_element_type=jnp.float32)
    product = functools.partial(jnp.einsum, preferred_element_type=jnp.float32)
    # With K first the queries' gradient takes the scores, its larger side, as they lie. The keys are turned here, as
    # XLA's CPU backend refuses bfloat16 where it has to turn them in the product.
    k_BGKT = k_BGTK.swapaxes(2, 3)

    def meet(pair, carry):
        dq_BGKRT, dk_BGTK, dv_BGTK = carry
        i, j = pairs.queries_N[pair], pairs.keys_N[pair]
        q, k, v = pairs.arrays(i, j)
        dout = _slice(dout_BGRTK, i, block, axis=3)
        norm, centre = (_slice(x, i, block, axis=3)[:, :, None] for x in (norm_BGRT, centre_BGRT))
        # Keys first, as two of the three gradients need them: [B,G,S,R,T].
        visible = pairs.visible(i, j).swapaxes(-1, -2)[:, None, :, None]
        weights = jnp.where(visible, jnp.exp(product("bgsk,bgrtk->bgsrt", k, q) - norm), 0.0)
        dscores = (weights * (product("bgsk,bgrtk->bgsrt", v, dout) - centre)).astype(q.dtype)
        dq = product("bgks,bgsrt->bgkrt", _slice(k_BGKT, j, block, axis=3), dscores)
        dk = product("bgsrt,bgrtk->bgsk", dscores, q)
        dv = product("bgsrt,bgrtk->bgsk", weights.astype(dout.dtype), dout)
        return (
            _put(dq_BGKRT, _slice(dq_BGKRT, i, block, axis=4) + dq, i, block, axis=4),
            _put(dk_BGTK, _slice(dk_BGTK, j, block, axis=2) + dk, j, block, axis=2),
            _put(dv_BGTK, _slice(dv_BGTK, j, block, axis=2) + dv, j, block, axis=2),
        )

    start = (jnp.zeros(x.shape, jnp.float32) for x in (jnp.moveaxis(q_BGRTK, -1, 2), k_BGTK, v_BGTK))
    grads = lax.fori_loop(0, pairs.count, meet, tuple(start))
    dq_BGKRT, dk, dv = (grad.astype(x.dtype) for grad, x in zip(grads, (q_BGRTK, k_BGTK, v_BGTK), strict=True))
    return jnp.moveaxis(dq_BGKRT, 2, -1), dk, dv, None, None


_attention.defvjp(_forward, _backward)


class _Pairs:
    """The pairs of a block of queries and a block of keys that have any score.

    Attributes:
      count: how many there are.
      queries_N, keys_N: the blocks of each; what is after `count` means nothing.
    """

    def __init__(self, q_BGRTK, k_BGTK, v_BGTK, own_BT, trunk_BT, block):
        self._block = block
        self._arrays = q_BGRTK, k_BGTK, v_BGTK
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
        self.count = jnp.sum(meet_NN)
        self.queries_N, self.keys_N = jnp.nonzero(meet_NN, size=blocks * (blocks + 1) // 2, fill_value=0)

    def arrays(self, i, j):
        """Queries [B,G,R,C,K] of block i, keys and values [B,G,C,K] of block j."""
        return tuple(
            _slice(x, at, self._block, axis) for x, at, axis in zip(self._arrays, (i, j, j), (3, 2, 2), strict=True)
        )

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
