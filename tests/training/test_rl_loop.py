"""What one step of the RL loop trains on, and which of its numbers mean what."""

import numpy as np
import pytest

from reterm_jax.tokens.packing import Example
from reterm_jax.training import rl_loop
from reterm_jax.training.rl_loop import RLConfig, choose_tasks


def config(**changes):
    values = dict(
        steps=2, tasks=2, attempts=4, states=2, forks=4, fork_at="end", recovery_weight=1.0, baseline="mean",
        standardise=False, failed_credit=0.0, epochs=3, updates=2, row_length=32, forked=True, save_every=1, seed=0,
    )  # fmt: skip
    return RLConfig(**{**values, **changes})


def test_every_epoch_goes_over_all_examples_once():
    examples = [Example([100 + i, i], [False, True], advantage=1.0) for i in range(7)]
    seen = []

    def step(state, batch):
        seen.append(sorted(batch.targets[batch.loss_mask].tolist()))
        return state + 1, {"train/loss": float(len(seen)), "train/logprob_diff_mean": float(len(seen))}

    state, values = rl_loop._train(config(), 0, examples, 0, step)
    assert state == 6
    epochs = [sorted(seen[i] + seen[i + 1]) for i in range(0, 6, 2)]
    assert epochs == [list(range(7))] * 3
    assert seen[0] != seen[2]  # another cut each time
    assert values["train/loss"] == np.mean(range(1, 7))
    # The policy that sampled is the one that the first update starts from.
    assert values["train/logprob_diff_mean"] == 1.0


def test_nothing_to_learn_from_is_said_and_changes_nothing():
    state, values = rl_loop._train(config(), 0, [], "state", lambda *_: pytest.fail("no update"))
    assert state == "state" and values == {"train/skipped": 1.0}


def test_tasks_are_walked_through_in_shuffled_rounds():
    tasks = list("abcdef")
    first = [t for step in range(3) for t in choose_tasks(tasks, 2, 0, step)]
    second = [t for step in range(3, 6) for t in choose_tasks(tasks, 2, 0, step)]
    assert sorted(first) == sorted(second) == tasks and first != second
    assert choose_tasks(tasks, 2, 0, 4) == second[2:4]
