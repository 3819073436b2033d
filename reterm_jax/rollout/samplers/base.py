"""What a sampler is: token ids in, token ids with logprobs out."""

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol


class SamplerError(RuntimeError):
    """The sampler could not answer. An attempt that meets it is not graded."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """One sampled turn.

    Attributes:
      ids: the sampled ids, with the stop token as the last one where `stop` is "stop".
      logprobs: one per id, of the sampling distribution (at the request's temperature).
      stop: "stop" where the policy ended its turn, "length" where `max_tokens` cut it.
      version: training step of the weights that sampled it.
    """

    ids: list[int]
    logprobs: list[float]
    stop: Literal["stop", "length"]
    version: int

    def __post_init__(self):
        if len(self.ids) != len(self.logprobs):
            raise SamplerError(f"completion has {len(self.ids)} ids, but {len(self.logprobs)} logprobs")
        if self.stop not in ("stop", "length"):
            raise SamplerError(f"completion's stop is {self.stop!r}, not 'stop' or 'length'")


class Sampler(Protocol):
    """Samples from the policy. Its calls may run side by side, those of one session one after the other.

    One that can be away has a property `away_seconds`, the time in which it could sample nothing: an attempt that ran
    out of time while it grew is not the policy's failure.
    """

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
        """Continues `ids` by at most `max_tokens` tokens, up to the stop token that ends a policy turn.

        Consecutive calls of one `session` extend the ids of the call before, so that its cache can be used again;
        a new session may name a `parent` session whose ids it continues. Both are hints: the answer depends on `ids`,
        `temperature` and `seed` alone. A call that is cancelled (an attempt's time limit) must leave the sampler and
        the session in order.

        Raises:
          SamplerError: no completion could be made.
        """
        ...

    async def end(self, session: str) -> None:
        """Frees what is held for a session; unknown sessions are ignored."""
        ...
