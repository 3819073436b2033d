"""Rollouts of a step in rounds, until a number of tokens has been sampled: what comparisons at equal cost need.

How many tokens a group takes depends on the policy, and how many recoveries a step has on how often it fails. A fixed
number of groups is therefore no equal budget.
"""

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from reterm_jax.rollout.groups import Group


class Rounds:
    """Where a run is in its rounds.

    The budget is that of the whole run so far, so that what one step had too much of the next has less of: after any
    number of steps the run has sampled its budget to within about half a round, and at least one round a step.

    Args:
        step_tokens: tokens that the policy samples in a step, on average; 0: each step is one round.
        saved: what `to_dict` gave, from a checkpoint.
    """

    def __init__(self, step_tokens: int, saved: Mapping[str, Any] | None = None):
        self._step_tokens = step_tokens
        self.rounds = self.tokens = 0
        if saved:
            self.rounds, self.tokens = saved["rounds"], saved["tokens"]

    async def roll(self, step: int, seed: str, roll: Callable[[int, str], Awaitable[list[Group]]]) -> list[Group]:
        """The groups of `step` (from 0).

        Nothing is counted before all rounds are done: a step that is cancelled leaves this as it was.

        Args:
            seed: of the step; rounds after its first add their number.
            roll: one round, from its number in the run and its seed.
        """
        groups: list[Group] = []
        rounds, tokens = 0, self.tokens
        while True:
            made = await roll(self.rounds + rounds, seed if not rounds else f"{seed}/round{rounds}")
            groups += made
            sampled = sum(attempt.own_tokens for group in made for attempt in group.attempts)
            rounds, tokens = rounds + 1, tokens + sampled
            # Half of what another round would take: the nearer of stopping and going on. A round that sampled nothing
            # (no sandbox could be had) would be followed by more of its kind.
            if not self._step_tokens or not sampled or tokens + sampled / 2 >= (step + 1) * self._step_tokens:
                break
        self.rounds, self.tokens = self.rounds + rounds, tokens
        return groups

    def to_dict(self) -> dict[str, int]:
        """JSON form."""
        return {"rounds": self.rounds, "tokens": self.tokens}
