"""From finished groups to training examples: advantages within each group, and the prefix of a recovery masked."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reterm_jax.agent.episode import Attempt
from reterm_jax.losses.advantages import group_advantages
from reterm_jax.rollout.groups import Group
from reterm_jax.tokens.packing import Example


def attempt_example(attempt: Attempt, *, advantage: float = 0.0, weight: float = 1.0) -> Example:
    """Loss on the policy's own tokens of this attempt: what a recovery inherited is context only."""
    ids, loss_mask, logprobs, _ = attempt.transcript.arrays()
    loss_mask = loss_mask & (np.arange(len(ids)) >= attempt.prefix_len)
    return Example(
        ids=ids, loss_mask=loss_mask, advantage=advantage, old_logprobs=logprobs, weight=weight, name=attempt.id
    )


@dataclasses.dataclass(frozen=True)
class Selection:
    """Examples with a gradient, and the counts of what carries none."""

    examples: list[Example]
    no_spread: int  # groups whose attempts all got the same reward
    ungraded: int  # attempts without a verdict


def group_examples(groups: Sequence[Group], *, recovery_weight: float, standardise: bool) -> Selection:
    """Examples of all attempts whose advantage is not zero.

    Args:
      recovery_weight: factor on the loss of recovery tokens against that of root tokens.
      standardise: divide a group's advantages by its standard deviation.
    """
    attempts = [attempt for group in groups for attempt in group.attempts]
    rewards = [reward for group in groups for reward in group.rewards]
    group_ids = [index for index, group in enumerate(groups) for _ in group.attempts]
    weights = [recovery_weight if group.kind == "recovery" else 1.0 for group in groups for _ in group.attempts]
    graded = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float32)
    advantages = group_advantages(values, np.array(group_ids), graded, standardise=standardise)
    examples = [
        dataclasses.replace(attempt_example(attempt, advantage=float(advantage), weight=weight), group=group)
        for attempt, advantage, weight, group in zip(attempts, advantages, weights, group_ids, strict=True)
        if advantage != 0 and weight != 0
    ]
    spread = {group_ids[i] for i in np.flatnonzero(advantages)}
    return Selection(examples, len(groups) - len(spread), int((~graded).sum()))
