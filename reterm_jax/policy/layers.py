"""The small parts that every layer shares: norms, rotary positions and the gated MLP."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from reterm_jax.policy.config import QwenConfig

# The name of what `QwenConfig.remat` = "mixers" keeps: what attention and DeltaNet would otherwise compute again.
MIXED = "mixed"


def mixed(x: jax.Array) -> jax.Array:
    """x, by name one of a mixer's results, see `MIXED`."""
    return checkpoint_name(x, MIXED)


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float, offset: float) -> jax.Array:
    """x / rms(x) * (offset + weight) over the last axis, computed in float32 and returned in x's dtype."""
    x32 = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return times_weight(x32 * scale, offset + weight).astype(x.dtype)


def gated_rms_norm(x: jax.Array, gate: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """silu(gate) * weight * x / rms(x) over the last axis, in float32; returned in the gate's dtype."""
    normed = rms_norm(x.astype(jnp.float32), weight, eps=eps, offset=0.0)
    return (normed * jax.nn.silu(gate.astype(jnp.float32))).astype(gate.dtype)


def l2_normalise(x: jax.Array, *, eps: float = 1e-6) -> jax.Array:
    """x / |x| over the last axis, in float32."""
    x32 = x.astype(jnp.float32)
    return x32 * jax.lax.rsqrt(jnp.sum(x32 * x32, axis=-1, keepdims=True) + eps)


def rotary_angles(positions_BT: jax.Array, config: QwenConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B,T,rotary_dim/2] in float32 of the rotary embedding at these positions."""
    exponent = jnp.arange(0, config.rotary_dim, 2, dtype=jnp.float32) / config.rotary_dim
    angles = positions_BT[..., None].astype(jnp.float32) / config.rope_theta**exponent
    return jnp.cos(angles), jnp.sin(angles)


def apply_rotary(x_BTHK: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the first 2 * cos.shape[-1] dimensions of every head; the others pass through."""
    half = cos.shape[-1]
    x32 = x_BTHK.astype(jnp.float32)
    first, second, rest = x32[..., :half], x32[..., half : 2 * half], x32[..., 2 * half :]
    cos, sin = cos[:, :, None, :], sin[:, :, None, :]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)
    return rotated.astype(x_BTHK.dtype)


@jax.custom_vjp
def times_weight(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x * weight, where the weight's dimensions are x's last ones, both float32."""
    return x * weight


def _times_weight_backward(residuals: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = residuals
    tokens = tuple(range(x.ndim - weight.ndim))
    # XLA's CPU backend takes twenty times as long where the product is fused into such a sum.
    dweight = jax.lax.platform_dependent(
        dy * x,
        cpu=lambda terms: jnp.sum(jax.lax.optimization_barrier(terms), axis=tokens),
        default=lambda terms: jnp.sum(terms, axis=tokens),
    )
    return dy * weight, dweight


times_weight.defvjp(lambda x, weight: (x * weight, (x, weight)), _times_weight_backward)


def mlp(p: dict[str, jax.Array], x_BTD: jax.Array) -> jax.Array:
    """down(silu(gate(x)) * up(x))."""
    return project(jax.nn.silu(project(x_BTD, p["gate"])) * project(x_BTD, p["up"]), p["down"])


def project(x: jax.Array, weight: jax.Array, *, axes: int = 1) -> jax.Array:
    """x [B,T,...] times a weight whose first `axes` dimensions are x's last ones: [B,T,...] in x's dtype.

    As one product of two matrices: in XLA's CPU backend the gradient of a product over B and T apart takes twice as
    long (`benchmarks/policy_step.py`).
    """
    size = math.prod(weight.shape[:axes])
    out = x.reshape(-1, size) @ weight.astype(x.dtype).reshape(size, -1)
    return out.reshape(*x.shape[:-axes], *weight.shape[axes:])
