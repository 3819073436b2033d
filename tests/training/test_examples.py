"""Groups to training examples: which tokens, which advantages, what is left out."""

import dataclasses

import numpy as np
import pytest

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.rollout.groups import Group
from reterm_jax.sandbox.base import Snapshot
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tokens.transcript import Span, Transcript
from reterm_jax.training.examples import group_examples


def attempt(name, reward, *, prefix=0):
    spans = [Span("prompt", (1, 2)), Span("policy", (3, 4), (-0.5, -0.25), 1), Span("observation", (5,))]
    spans += [Span("policy", (6, 7, 8), (-1.0, -2.0, -3.0), 1)]
    outcome = Outcome(None, "env_error") if reward is None else Outcome.from_reward(reward)
    return Attempt(name, "task", Transcript(spans), prefix_len=prefix, outcome=outcome)


def test_advantages_are_centred_in_each_group_and_faults_leave_the_baseline():
    root = Group("root", "task", (attempt("a", 1.0), attempt("b", 0.0), attempt("c", None), attempt("d", 0.0)))
    selection = group_examples([root], recovery_weight=1.0, standardise=False)
    assert {e.name: round(e.advantage, 4) for e in selection.examples} == {"a": 0.6667, "b": -0.3333, "d": -0.3333}
    assert selection.ungraded == 1 and selection.no_spread == 0


def test_a_recovery_is_trained_on_its_own_tokens_with_its_weight():
    forks = Group("recovery", "task", (attempt("a", 1.0, prefix=5), attempt("b", 0.0, prefix=5)))
    example = group_examples([forks], recovery_weight=0.5, standardise=False).examples[0]
    np.testing.assert_array_equal(example.loss_mask, [0, 0, 0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(example.old_logprobs[5:], [-1.0, -2.0, -3.0])
    assert example.weight == 0.5


def test_groups_without_spread_give_nothing():
    groups = [
        Group("root", "task", (attempt("a", 1.0), attempt("b", 1.0))),
        Group("root", "task", (attempt("c", 0.0),)),
    ]
    selection = group_examples(groups, recovery_weight=1.0, standardise=True)
    assert selection.examples == [] and selection.no_spread == 2


def test_for_a_kl_graded_attempts_without_advantage_are_kept():
    groups = [
        Group("root", "task", (attempt("a", 1.0), attempt("b", 1.0), attempt("c", None))),
        Group("recovery", "task", (attempt("d", 0.0, prefix=5), attempt("e", 1.0, prefix=5))),
    ]
    kept = group_examples(groups, recovery_weight=1.0, zero_advantage=True)
    assert {e.name: e.advantage for e in kept.examples} == {"a": 0.0, "b": 0.0, "d": -0.5, "e": 0.5}
    assert (kept.no_spread, kept.ungraded) == (1, 1)
    assert {e.name for e in group_examples(groups, recovery_weight=0.0, zero_advantage=True).examples} == {"a", "b"}


def test_a_failed_attempt_is_credited_with_what_its_state_was_worth():
    """Rewards 1, 0, 0; the second attempt's state was recovered from in half of the tries that were graded."""
    root = Group("root", "task", (attempt("a", 1.0), attempt("b", 0.0), attempt("c", 0.0)))
    state = FailureState(
        "b", "task", Snapshot("s", "bubblewrap", "me"), root.attempts[1].transcript.until_turn(1), (), 1, 0, "b"
    )
    recoveries = (attempt("d", 1.0, prefix=4), attempt("e", None, prefix=4), attempt("f", 0.0, prefix=4))
    groups = [root, Group("recovery", "task", recoveries, state)]
    plain = {e.name: e.advantage for e in group_examples(groups, recovery_weight=1.0).examples}
    assert plain == pytest.approx({"a": 2 / 3, "b": -1 / 3, "c": -1 / 3, "d": 0.5, "f": -0.5})
    credited = {e.name: e.advantage for e in group_examples(groups, recovery_weight=1.0, failed_credit=0.8).examples}
    # The rewards are 1, 0.4 and 0 for what came before the fork, 1, 0 and 0 for what came after it.
    mean = 1.4 / 3
    np.testing.assert_allclose(credited["a"], [1 - mean] * 8, rtol=1e-6)
    np.testing.assert_allclose(credited["b"], [0.4 - mean] * 4 + [-1 / 3] * 4, rtol=1e-6)
    np.testing.assert_allclose(credited["c"], [-mean] * 8, rtol=1e-6)
    np.testing.assert_allclose(credited["d"], [0.5] * 8)


def test_lengths_count_the_tokens_that_are_trained():
    long = dataclasses.replace(attempt("a", 1.0), prefix_len=0)
    groups = [Group("root", "task", (long, attempt("b", 0.0, prefix=5)))]
    made = group_examples(groups, recovery_weight=1.0, baseline="length").examples
    np.testing.assert_allclose([e.advantage for e in made], [1 - 5 / 8, -5 / 8])


@pytest.mark.parametrize("reward", [None, 0.0])
@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("options", [{"standardise": True}, {"baseline": "leave_one_out"}, {"failed_credit": 1.0}])
def test_groups_that_say_nothing_give_no_example(reward, size, options):
    group = Group("root", "task", tuple(attempt(str(i), reward) for i in range(size)))
    assert group_examples([group], recovery_weight=1.0, **options).examples == []
