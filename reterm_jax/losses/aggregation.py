"""From per-token losses to one number, the same however an update is cut into micro-batches.

Every mode is a sum of weighted token losses over a denominator that belongs to the whole update. The weights and the
denominator are computed once for the update; micro-batches only sum.
"""

import jax
import jax.numpy as jnp

MODES = ("token", "sequence", "constant")


def token_weights(
    mask_BT: jax.Array,
    segments_BT: jax.Array,
    weights_BT: jax.Array,
    *,
    mode: str = "token",
    max_length: int | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Weights and denominator: the update's loss is Σ weights · loss / denominator.

    Modes:
        token: mean over the loss tokens of the update (DAPO, arXiv 2503.14476).
        sequence: mean over documents of each one's token mean (GRPO, arXiv 2402.03300).
        constant: Σ over tokens / (documents · max_length), free of length bias (Dr. GRPO, arXiv 2503.20783).

    Args:
        mask_BT: bool, true on loss tokens. segments_BT: int, 0 is padding. weights_BT: float, constant in a document.
        max_length: the length that `constant` divides by, in tokens.

    Returns:
        (weights_BT, denominator []), float32; the denominator of an update without loss tokens is 1.

    Raises:
        ValueError: for an unknown mode, or `constant` without `max_length`.
    """
    if mode not in MODES:
        raise ValueError(f"aggregation {mode!r} is unknown; one of {', '.join(MODES)}")
    if mode == "constant" and not max_length:
        raise ValueError("aggregation 'constant' needs max_length, the number of tokens a document may have")
    weights_BT = weights_BT.astype(jnp.float32) * mask_BT
    if mode == "token":
        return weights_BT, _safe(jnp.sum(weights_BT))
    count_BT = jnp.maximum(segment_sum(mask_BT.astype(jnp.float32), segments_BT), 1.0)
    documents = jnp.sum(weights_BT / count_BT)
    if mode == "sequence":
        return weights_BT / count_BT, _safe(documents)
    return weights_BT, _safe(documents * max_length)


def segment_sum(values_BT: jax.Array, segments_BT: jax.Array) -> jax.Array:
    """For every token the sum of `values_BT` over its own document (row and segment). Shape [B,T]."""

    def one_row(values_T, segments_T):
        sums_S = jax.ops.segment_sum(values_T, segments_T, num_segments=values_T.shape[0] + 1)
        return sums_S[segments_T]

    return jax.vmap(one_row)(values_BT, segments_BT)


def _safe(denominator: jax.Array) -> jax.Array:
    return jnp.where(denominator > 0, denominator, 1.0)
