import asyncio

import numpy as np
import pytest

from reterm_jax.agent.attempt import Attempt
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.rounds import Rounds
from reterm_jax.tokens.transcript import Span, Transcript


def group(tokens, inherited=0):
    """One attempt that sampled `tokens` tokens after it had inherited a policy turn of `inherited`."""
    spans = [Span("prompt", (1, 2))]
    for count in (inherited, tokens):
        if count:
            spans.append(Span("policy", (3,) * count, (-1.0,) * count, 0))
    return Group("root", "task", (Attempt("a", "task", Transcript(spans), prefix_len=2 + inherited),))


def roller(tokens):
    """Rounds of these sizes, whose numbers and seeds are kept."""
    seen = []

    async def roll(index, seed):
        seen.append((index, seed))
        return [group(tokens[index])]

    return roll, seen


def test_inherited_tokens_are_not_counted():
    assert group(7, inherited=5).attempts[0].own_tokens == 7


def test_without_a_budget_a_step_is_one_round():
    rounds, (roll, seen) = Rounds(0), roller([5, 900])
    for step in range(2):
        assert len(asyncio.run(rounds.roll(step, f"s/step{step}", roll))) == 1
    assert seen == [(0, "s/step0"), (1, "s/step1")]


def test_the_budget_is_that_of_the_run_so_far():
    rounds, (roll, seen) = Rounds(100), roller([60, 60, 60, 60, 60])
    made = [len(asyncio.run(rounds.roll(step, f"step{step}", roll))) for step in range(3)]
    assert made == [2, 1, 2]  # 120 of 100, 180 of 200, 300 of 300
    assert seen == [(0, "step0"), (1, "step0/round1"), (2, "step1"), (3, "step2"), (4, "step2/round1")]
    assert rounds.to_dict() == {"rounds": 5, "tokens": 300}


@pytest.mark.parametrize("size", [10, 35, 90])
def test_the_total_is_within_half_of_the_largest_round(size):
    rng = np.random.default_rng(size)
    sizes = rng.integers(size // 2, size, 500)
    rounds, (roll, _) = Rounds(100), roller(sizes)
    for step in range(20):
        asyncio.run(rounds.roll(step, str(step), roll))
        assert abs(rounds.tokens - 100 * (step + 1)) <= size


def test_a_step_larger_than_the_budget_is_one_round_and_nothing_sampled_ends_it():
    rounds, (roll, _) = Rounds(10), roller([50, 0])
    assert [len(asyncio.run(rounds.roll(step, "", roll))) for step in range(2)] == [1, 1]


def test_a_cancelled_step_counts_nothing():
    rounds = Rounds(100, {"rounds": 3, "tokens": 250})

    async def roll(index, seed):
        if index == 4:
            raise asyncio.CancelledError
        return [group(10)]

    with pytest.raises(asyncio.CancelledError):
        asyncio.run(rounds.roll(2, "", roll))
    assert rounds.to_dict() == {"rounds": 3, "tokens": 250}
