"""A sampler that counts: how many requests it has, how long it had none, how many tokens it gave."""

from __future__ import annotations

import time
from collections.abc import Sequence

from reterm_jax.rollout.samplers.base import Completion, Sampler


class MeteredSampler:
    """Passes everything on to `sampler`.

    Attributes:
      running: requests that wait for an answer.
      turns, tokens: answered, in all.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.running = self.turns = self.tokens = self.failures = 0
        self._begun = self._idle_since = time.monotonic()
        self._idle = 0.0

    @property
    def idle_seconds(self) -> float:
        """Time without any request since this was made."""
        return self._idle + (time.monotonic() - self._idle_since if not self.running else 0.0)

    @property
    def away_seconds(self) -> float:
        """Time in which nothing could be sampled; see `Sampler`."""
        return getattr(self._sampler, "away_seconds", 0.0)

    @property
    def seconds(self) -> float:
        """Time since this was made."""
        return time.monotonic() - self._begun

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
        if not self.running:
            self._idle += time.monotonic() - self._idle_since
        self.running += 1
        try:
            completion = await self._sampler.generate(
                ids, max_tokens=max_tokens, temperature=temperature, seed=seed, session=session, parent=parent
            )
        except Exception:
            self.failures += 1
            raise
        finally:
            self.running -= 1
            if not self.running:
                self._idle_since = time.monotonic()
        self.turns += 1
        self.tokens += len(completion.ids)
        return completion

    async def end(self, session: str) -> None:
        await self._sampler.end(session)
