"""The verdict on an attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Status = Literal["solved", "failed", "timeout", "overflow", "env_error", "verifier_error"]

GRADED = ("solved", "failed", "timeout", "overflow")
UNGRADED = ("env_error", "verifier_error")


@dataclass(frozen=True)
class Outcome:
    """Reward and status of one attempt.

    `timeout` and `overflow` are the policy's own doing and count. `env_error` and `verifier_error` are not: such an
    attempt has no reward and must be left out of its group, baseline included, rather than counted as 0.

    Attributes:
      reward: a finite number where the attempt is graded, else None.
      status: see above; a graded attempt is `solved` exactly where its reward is at least 1.
      detail: for people (verifier output, error message); never shown to the policy.
    """

    reward: float | None
    status: Status
    detail: str = ""

    def __post_init__(self):
        if self.status not in GRADED + UNGRADED:
            raise ValueError(f"unknown outcome status {self.status!r}; one of {', '.join(GRADED + UNGRADED)}")
        if not self.graded:
            if self.reward is not None:
                raise ValueError(f"outcome {self.status} is not graded, but has reward {self.reward}")
        elif self.reward is None or not math.isfinite(self.reward):
            raise ValueError(f"outcome {self.status} needs a finite reward, not {self.reward}")
        elif (self.reward >= 1) != self.solved:
            raise ValueError(f"outcome {self.status} contradicts reward {self.reward}")

    @property
    def graded(self) -> bool:
        return self.status in GRADED

    @property
    def solved(self) -> bool:
        return self.status == "solved"

    @classmethod
    def from_reward(cls, reward: float, detail: str = "") -> Outcome:
        return cls(reward, "solved" if reward >= 1 else "failed", detail)
