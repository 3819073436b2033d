"""A loss of one's own: `reterm-train ... --config.rl.objective=docs/my_loss.py:my_objective`."""


def my_objective(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, segments_BT):
    """Plain policy gradient. Arguments and result are those of `reterm_jax.losses.policy_gradient`."""
    return -advantages_BT * logprobs_BT * mask_BT, {"advantage": advantages_BT}
