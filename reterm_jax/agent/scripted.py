"""Agents that act by script, behind the sampler protocol, so that they run through the very same episode loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from reterm_jax.agent.protocol import SUBMIT, render_turn
from reterm_jax.rollout.samplers.base import Completion
from reterm_jax.tokens.chat import ChatFormat


class ScriptedAction(Protocol):
    """One turn of a script (`tasks.families.Action` is one)."""

    thought: str
    command: str


class ScriptedPolicy:
    """Plays a list of actions, one a turn, in each session from its beginning; after the last one it submits.

    Its turns are the canonical text of the protocol. Implements `rollout.samplers.base.Sampler`; logprobs are 0.

    Args:
      chat: encodes the turns.
      actions: what to do.
      version: reported with every turn; -1: no trained policy.
    """

    def __init__(self, chat: ChatFormat, actions: Sequence[ScriptedAction], version: int = -1):
        self._version = version
        turns = [(action.thought, action.command) for action in actions]
        if not turns or turns[-1][1] != SUBMIT:
            turns.append(("done", SUBMIT))
        self._turns = [chat.policy_ids(render_turn(thought, command)) for thought, command in turns]
        self._next: dict[str, int] = {}

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        session: str,
        parent: str | None = None,
    ) -> Completion:
        """The session's next turn, cut where it is longer than `max_tokens`."""
        index = self._next.get(session, 0)
        self._next[session] = index + 1
        turn = self._turns[min(index, len(self._turns) - 1)]
        stop = "stop" if len(turn) <= max_tokens else "length"
        turn = turn[:max_tokens]
        return Completion(list(turn), [0.0] * len(turn), stop, self._version)

    async def end(self, session: str) -> None:
        self._next.pop(session, None)
