"""The inverse of I + L for strictly lower-triangular L: what a DeltaNet chunk solves."""

from __future__ import annotations

import jax
import jax.numpy as jnp

_EXACT = jax.lax.Precision.HIGHEST


@jax.custom_vjp
def unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """(I + lower)^-1 for strictly lower-triangular `lower` [..., C, C], C a power of two, by block doubling.

    Every entry is a sum that forward substitution would also take, so repetitive keys (`lower` near a matrix of
    ones) are as accurate as there, whereas power series in `lower` lose all digits to cancellation.
    """
    size = lower.shape[-1]
    if size & (size - 1):
        raise ValueError(f"unit_lower_inverse: matrix size {size} is not a power of two; pad the chunk")
    return _doubled(lower)


def _doubled(lower: jax.Array) -> jax.Array:
    """With both diagonal blocks inverted to X1 and X2, the inverse is [[X1, 0], [-X2 L21 X1, X2]]."""
    size = lower.shape[-1]
    if size <= 2:
        return jnp.eye(size, dtype=lower.dtype) - lower
    half = size // 2
    # Both halves go down together, so each level is one batched product, small next to a product of full matrices.
    first, second = _doubled(jnp.stack([lower[..., :half, :half], lower[..., half:, half:]]))
    corner = -_matmul(_matmul(second, lower[..., half:, :half]), first)
    top = jnp.concatenate([first, jnp.zeros_like(first)], axis=-1)
    return jnp.concatenate([top, jnp.concatenate([corner, second], axis=-1)], axis=-2)


def _matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    if a.shape[-1] <= 4:
        # So many products of so few numbers each: as sums they are fused, where a call each takes three times as long.
        return jnp.sum(a[..., :, :, None] * b[..., None, :, :], axis=-2)
    return jnp.matmul(a, b, precision=_EXACT)


def _forward(lower: jax.Array) -> tuple[jax.Array, jax.Array]:
    inverse = unit_lower_inverse(lower)
    return inverse, inverse


def _backward(inverse: jax.Array, cotangent: jax.Array) -> tuple[jax.Array]:
    # d(M^-1) = -M^-1 dM M^-1: two products, where differentiating the doubling would keep every level.
    transposed = inverse.swapaxes(-1, -2)
    return (jnp.tril(-_matmul(_matmul(transposed, cotangent), transposed), -1),)


unit_lower_inverse.defvjp(_forward, _backward)
