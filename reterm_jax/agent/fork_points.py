"""Where a recovery starts from: the snapshots that are taken while an attempt runs, and which of them is kept.

| fork_at | the state that a failed attempt leaves |
|---|---|
| `end` | its end, as in ReTerm-10K (each recovery there follows the whole failed attempt) |
| `error` | after the first turn whose error was not repaired (`errors.unrepaired`); the end where no error shows |
| `uniform` | after one of its turns, each as likely as any other |

Whether an attempt will fail is known only at its end, so a snapshot is taken whenever a turn might turn out to be the
one, while the sandbox is as that turn left it. One that has become pointless is released at once.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Literal, get_args

from reterm_jax.agent.errors import unrepaired
from reterm_jax.agent.turns import Turn
from reterm_jax.sandbox.base import Snapshot

ForkAt = Literal["end", "error", "uniform"]
FORK_AT: tuple[str, ...] = get_args(ForkAt)


class ForkPoints:
    """The snapshots held of one attempt, by the number of its turns before them.

    Args:
      save: saves the sandbox as it is; None where no recovery could go on from here, or saving failed.
      release: called with a snapshot that is not needed any more; without it snapshots stay until their host closes.
      seed: of the choice that `uniform` makes.

    Raises:
      ValueError: `fork_at` is unknown.
    """

    def __init__(
        self,
        fork_at: ForkAt,
        save: Callable[[], Awaitable[Snapshot | None]],
        release: Callable[[Snapshot], Awaitable[None]] | None,
        seed: int,
    ):
        if fork_at not in FORK_AT:
            raise ValueError(f"fork_at {fork_at!r} is unknown; one of {', '.join(FORK_AT)}")
        self._fork_at, self._save, self._release = fork_at, save, release
        self._rng = random.Random(f"{seed}/fork")
        self._held: dict[int, Snapshot] = {}
        self._seen = 0

    async def after_turn(self, turns: Sequence[Turn], *, last: bool = False) -> None:
        """To be called when a turn is over, before the sandbox changes again; `last`: at the end of the attempt."""
        count, new = len(turns), len(turns) > self._seen
        self._seen = count
        if self._fork_at == "end":
            keep = last
        elif self._fork_at == "uniform":
            # Reservoir sampling: the n-th turn replaces the choice so far with probability 1/n.
            keep = new and self._rng.random() * count < 1
            if keep:
                await self.release()
        else:
            wrong = {index + 1 for index in unrepaired(turns)}
            await self.release(except_for=wrong)
            keep = count in wrong or (last and not self._held)
        if keep and count not in self._held and (snapshot := await self._save()) is not None:
            self._held[count] = snapshot

    def take(self) -> tuple[int, Snapshot] | None:
        """The chosen state (turns before it, snapshot), which is the caller's from here on; None if there is none."""
        if not self._held:
            return None
        first = min(self._held)
        return first, self._held.pop(first)

    async def release(self, except_for: set[int] = frozenset()) -> None:
        """Releases what is held."""
        for count in [count for count in self._held if count not in except_for]:
            snapshot = self._held.pop(count)
            if self._release is not None:
                await self._release(snapshot)
