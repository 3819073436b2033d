"""Terms beside the objective: the distance to a frozen reference policy."""

import jax
import jax.numpy as jnp
from jax import lax

KL_ESTIMATES = ("k1", "k3")
# exp(20) is far beyond any use, and still finite in a sum.
_MAX_LOG_RATIO = 20.0


def kl_to_reference(
    logprobs_BT: jax.Array, reference_BT: jax.Array, mask_BT: jax.Array, *, estimate: str = "k3"
) -> jax.Array:
    """Per-token estimate of KL(π‖ref), 0 off the mask (Schulman, "Approximating KL Divergence", 2020).

    With d = log π − log ref:
        k1: d. Its own gradient is 0 in expectation; here it has the gradient d·∇log π, which in expectation is that of
            the KL itself for on-policy tokens (the term of KL in the reward, as in PPO for RLHF, arXiv 2203.02155).
        k3: exp(−d) + d − 1, never negative, differentiated as it stands (GRPO, arXiv 2402.03300).

    Args:
        reference_BT: log-probabilities of the same tokens under the reference, at the same temperature.

    Raises:
        ValueError: for an unknown estimate.
    """
    if estimate not in KL_ESTIMATES:
        raise ValueError(f"KL estimate {estimate!r} is unknown; one of {', '.join(KL_ESTIMATES)}")
    difference_BT = jnp.where(mask_BT, logprobs_BT - reference_BT, 0.0)
    if estimate == "k1":
        fixed_BT = lax.stop_gradient(difference_BT)
        return fixed_BT + fixed_BT * (difference_BT - fixed_BT)
    return jnp.exp(jnp.clip(-difference_BT, -_MAX_LOG_RATIO, _MAX_LOG_RATIO)) + difference_BT - 1.0
