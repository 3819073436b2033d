"""What an episode is bounded by, what it leaves, and the failed state that recoveries start from."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, get_args

from reterm_jax.agent.errors import label_turns
from reterm_jax.agent.turns import Turn
from reterm_jax.sandbox.base import Snapshot
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tokens.transcript import Transcript

Ended = Literal["submit", "turn_limit", "token_limit", "time_limit", "overflow", "env_error"]


@dataclasses.dataclass(frozen=True)
class AgentLimits:
    """Bounds of one attempt; a recovery gets its own time, but shares the tokens with its prefix.

    Attributes:
      max_turns: policy turns of this attempt.
      max_tokens: the whole transcript, an inherited prefix included.
      max_turn_tokens: sampled tokens of one turn.
      command_timeout: seconds that one command may run.
      attempt_timeout: seconds for the attempt, sampling included; the task's own limit holds too.
      output_limit: characters of a command's output that the policy sees, half from each end.
      recovery_budget: turns of a recovery: as many as any attempt (`fresh`), or what was left of the failed attempt's
        at the moment it is forked (`remaining`; there is none to recover from where it used them all).
    """

    max_turns: int
    max_tokens: int
    max_turn_tokens: int
    command_timeout: float
    attempt_timeout: float
    output_limit: int = 10_000
    recovery_budget: str = "fresh"

    def __post_init__(self):
        for field in dataclasses.fields(self):
            if field.name != "recovery_budget" and not getattr(self, field.name) > 0:
                raise ValueError(f"limit {field.name} is {getattr(self, field.name)}; it must be positive")
        if self.recovery_budget not in ("fresh", "remaining"):
            raise ValueError(f"limit recovery_budget is {self.recovery_budget!r}; it must be 'fresh' or 'remaining'")

    def recovery_turns(self, prefix: Transcript) -> int:
        """Turns of a recovery that continues `prefix`; at most 0 where it may not have any."""
        if self.recovery_budget == "fresh":
            return self.max_turns
        return self.max_turns - sum(span.source == "policy" for span in prefix.spans)


@dataclasses.dataclass
class Attempt:
    """One episode.

    Attributes:
      id: names the attempt, and its session at the sampler.
      transcript: all ids, the inherited prefix included.
      prefix_len: ids that a recovery inherited; it is trained only on those after.
      outcome: None until the verifier has spoken.
      turns: its own turns, not the inherited ones.
      timings: seconds by part (`sampling`, `commands`, `snapshot`, `verify`), which do not overlap.
      ended: why it ended. `overflow`: the first prompt already filled the context.
      parent: id of the FailureState that it started from; None for a root attempt.
      depth: failures before it on its way: 0 for a root attempt.
      version: the oldest weights that sampled any of its tokens; -1 if it sampled none.
      forked_after: own turns before its failure state; None where it left none.
    """

    id: str
    task_id: str
    transcript: Transcript
    prefix_len: int = 0
    outcome: Outcome | None = None
    turns: list[Turn] = dataclasses.field(default_factory=list)
    timings: dict[str, float] = dataclasses.field(default_factory=dict)
    ended: Ended = "env_error"
    parent: str | None = None
    depth: int = 0
    version: int = -1
    forked_after: int | None = None

    @property
    def solved(self) -> bool:
        return self.outcome is not None and self.outcome.solved

    @property
    def errors(self) -> list[str | None]:
        """The error category of each turn (see `errors.py`), None where nothing went wrong."""
        return label_turns(self.turns)

    @property
    def own_tokens(self) -> int:
        """Ids that the policy sampled in this attempt."""
        _, loss_mask, _, _ = self.transcript.arrays()
        return int(loss_mask[self.prefix_len :].sum())

    @classmethod
    def not_run(cls, id: str, task_id: str, outcome: Outcome, *, parent: str | None = None, depth: int = 0) -> Attempt:
        """An attempt that never began, because its sandbox could not be had."""
        return cls(id, task_id, Transcript(), outcome=outcome, parent=parent, depth=depth)

    def to_dict(self) -> dict[str, Any]:
        """JSON form; `from_dict` gives back an equal attempt."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return fields | {
            "transcript": self.transcript.to_dict(),
            "outcome": None if self.outcome is None else dataclasses.asdict(self.outcome),
            "turns": [dataclasses.asdict(turn) for turn in self.turns],
            "timings": dict(self.timings),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Attempt:
        """Raises ValueError naming what is wrong where `data` is not what `to_dict` gives."""
        try:
            attempt = cls(
                **{
                    **data,
                    "transcript": Transcript.from_dict(data["transcript"]),
                    "outcome": None if data["outcome"] is None else Outcome(**data["outcome"]),
                    "turns": [Turn(**turn) for turn in data["turns"]],
                    "timings": dict(data["timings"]),
                }
            )
        except (KeyError, TypeError) as error:
            raise ValueError(f"stored attempt: {error}") from error
        if attempt.ended not in get_args(Ended):
            raise ValueError(f"stored attempt {attempt.id}: ended is {attempt.ended!r}, not one of {get_args(Ended)}")
        return attempt


@dataclasses.dataclass(frozen=True)
class FailureState:
    """A moment of a failed attempt: the sandbox as it was then, and all that had been said.

    Attributes:
      snapshot: taken before the verifier ran, right after the last of `turns`.
      transcript: ends with a policy turn; what its last command printed is in `turns`.
      turns: of the failed attempt up to that moment, which is its end unless `fork_points` chose another.
      version: the weights that failed.
      depth: 0: failed from the task's start.
      attempt_id: the failed attempt (its sampler session holds the prefix's cache).
    """

    id: str
    task_id: str
    snapshot: Snapshot
    transcript: Transcript
    turns: Sequence[Turn]
    version: int
    depth: int
    attempt_id: str

    @classmethod
    def of(cls, attempt: Attempt, snapshot: Snapshot) -> FailureState:
        """The state that `snapshot` belongs to: after `attempt.forked_after` turns, or the end."""
        turns = len(attempt.turns) if attempt.forked_after is None else attempt.forked_after
        transcript = attempt.transcript.until_turn(turns, after=attempt.prefix_len)
        _, _, _, versions_T = transcript.arrays()
        own_T = versions_T[attempt.prefix_len :]
        return cls(
            id=attempt.id,
            task_id=attempt.task_id,
            snapshot=snapshot,
            transcript=transcript,
            turns=tuple(attempt.turns[:turns]),
            version=min(own_T[own_T >= 0].tolist(), default=attempt.version),
            depth=attempt.depth,
            attempt_id=attempt.id,
        )
