"""Groups to training examples: which tokens, which advantages, what is left out."""

import numpy as np

from reterm_jax.agent.attempt import Attempt
from reterm_jax.rollout.groups import Group
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
