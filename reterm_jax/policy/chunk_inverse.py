"""The inverse of I + L for strictly lower-triangular L: what a DeltaNet chunk solves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 for strictly lower-triangular `lower` [..., C, C], C a power of two, by block doubling.

    With both diagonal blocks X1, X2 of size b inverted, the block of size 2b is [[X1, 0], [-X2 L21 X1, X2]]. Every
    entry is the sum that forward substitution would take, so repetitive keys (L near a matrix of ones) are as
    accurate as there, whereas power series in L lose all digits to cancellation.
    """
    size = lower.shape[-1]
    if size & (size - 1):
        raise ValueError(f"unit_lower_inverse: matrix size {size} is not a power of two; pad the chunk")
    index = jnp.arange(size)
    inverse = jnp.eye(size, dtype=lower.dtype)
    block = 1
    while block < size:
        # Rows of the second and columns of the first half of every pair of neighbouring blocks.
        second, first = (index // block) % 2 == 1, (index // block) % 2 == 0
        same_pair = (index // (2 * block))[:, None] == (index // (2 * block))[None, :]
        corner = jnp.where(same_pair & second[:, None] & first[None, :], lower, 0.0)
        if block == 1:
            inverse = inverse - corner
        else:
            inverse = inverse - _matmul(_matmul(inverse, corner), inverse)
        block *= 2
    return inverse


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.matmul(a, b, precision=_EXACT)


def _forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    # d(M^-1) = -M^-1 dM M^-1: two products, where differentiating the doubling would keep every level.
    transposed = inverse.swapaxes(-1, -2)
    return (jnp.tril(-_matmul(_matmul(transposed, cotangent), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
