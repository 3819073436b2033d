"""The supervised loss: negative log-likelihood of the demonstrated tokens."""

import jax


def nll(logprobs_BT: jax.Array, mask_BT: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Per-token negative log-likelihood, 0 where `mask_BT` is false.

    Returns (loss_BT, metrics) like the objectives of `policy_gradient`: one kind of step serves both.
    """
    return -logprobs_BT * mask_BT, {}
