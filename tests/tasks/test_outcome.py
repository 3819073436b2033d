from __future__ import annotations

import pytest

from reterm_jax.tasks.outcome import Outcome


@pytest.mark.parametrize("reward,status", [(0.0, "failed"), (0.99, "failed"), (1.0, "solved"), (2, "solved")])
def test_from_reward(reward, status):
    outcome = Outcome.from_reward(reward)
    assert (outcome.status, outcome.graded, outcome.solved) == (status, True, status == "solved")


def test_what_is_graded():
    assert Outcome(0.0, "timeout").graded and Outcome(0.0, "overflow").graded
    assert not Outcome(None, "env_error").graded and not Outcome(None, "verifier_error").graded


@pytest.mark.parametrize(
    "reward,status",
    [
        (0.0, "env_error"),
        (None, "failed"),
        (float("nan"), "failed"),
        (1.0, "failed"),
        (0.5, "solved"),
        (1.0, "timeout"),
        (0.0, "lost"),
    ],
)
def test_contradictions_are_refused(reward, status):
    with pytest.raises(ValueError):
        Outcome(reward, status)
