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


def group_examples(
    groups: Sequence[Group],
    *,
    recovery_weight: float,
    baseline: str = "mean",
    standardise: bool = False,
    failed_credit: float = 0.0,
    zero_advantage: bool = False,
) -> Selection:
    """Examples of all attempts that have an advantage other than zero.

    Args:
      recovery_weight: factor on the loss of recovery tokens against that of root tokens.
      baseline, standardise: see `group_advantages`.
      failed_credit: c in [0, 1]. The tokens that led a failed attempt to a state from which its recoveries earned a
        mean reward V are trained as if it had earned r + c·(V − r), in its group's baseline too: to fail where one can
        recover is worth more than to fail for good. What it did after that state keeps its own r. Only where both are
        in the same step.
      zero_advantage: also those of graded attempts without one, which have a gradient where the loss has a KL or an
        entropy bonus. (An attempt that was not graded may be broken off anywhere, and is never trained on.)
    """
    attempts = [attempt for group in groups for attempt in group.attempts]
    rewards = [reward for group in groups for reward in group.rewards]
    group_ids = np.array([index for index, group in enumerate(groups) for _ in group.attempts], int)
    weights = [recovery_weight if group.kind == "recovery" else 1.0 for group in groups for _ in group.attempts]
    graded = np.array([reward is not None for reward in rewards], bool)
    values = np.array([0.0 if reward is None else reward for reward in rewards], np.float32)
    examples = [
        dataclasses.replace(attempt_example(attempt, weight=weight), group=int(group))
        for attempt, weight, group in zip(attempts, weights, group_ids, strict=True)
    ]
    options = {
        "baseline": baseline,
        "lengths": np.array([np.count_nonzero(example.loss_mask) for example in examples]),
        "standardise": standardise,
    }
    advantages = group_advantages(values, group_ids, graded, **options)
    forked = _recovered(groups) if failed_credit else {}
    credited = np.array(
        [forked.get(attempt.id, (0, value))[1] for attempt, value in zip(attempts, values, strict=True)]
    )
    before = group_advantages(values + failed_credit * (credited - values), group_ids, graded, **options)

    trained = []
    for attempt, example, advantage, earlier, is_graded in zip(
        attempts, examples, advantages, before, graded, strict=True
    ):
        value = float(advantage)
        if forked:
            # Up to the state that was forked; all of an attempt that was not, whose baseline may have moved.
            until, _ = forked.get(attempt.id, (len(example.ids), 0.0))
            value = np.where(np.arange(len(example.ids)) < until, earlier, advantage).astype(np.float32)
        if (np.any(value) or (zero_advantage and is_graded)) and example.weight != 0:
            trained.append(dataclasses.replace(example, advantage=value))
    spread = set(group_ids[(advantages != 0) | (before != 0)].tolist())
    return Selection(trained, len(groups) - len(spread), int((~graded).sum()))


def _recovered(groups: Sequence[Group]) -> dict[str, tuple[int, float]]:
    """By failed attempt: how many of its ids led to the state that was forked, and the mean reward from there."""
    found = {}
    for group in groups:
        earned = [reward for reward in group.rewards if reward is not None]
        if group.state is not None and earned:
            found[group.state.attempt_id] = len(group.state.transcript), float(np.mean(earned))
    return found
