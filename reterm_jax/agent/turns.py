"""One turn of an attempt, and what the policy is shown of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True)
class Turn:
    """What the policy did and what came of it, as a person reads it.

    Attributes:
      thought: reasoning and remarks before the call.
      command: None where the turn called nothing that could be run; `submit` where it ended the attempt.
      output: the command's output, shortened to the limit.
      exit_code: None where nothing was run.
      duration: seconds that the command ran.
      timed_out: the command was ended at its time limit.
      error: protocol error that was told to the policy instead of an output.
    """

    thought: str
    command: str | None = None
    output: str = ""
    exit_code: int | None = None
    duration: float = 0.0
    timed_out: bool = False
    error: str | None = None


def observation(turn: Turn) -> str:
    """The content of the tool message that answers a turn; empty for a silent success and for `submit`."""
    if turn.error is not None:
        return turn.error
    if turn.timed_out:
        note = f"(stopped: time limit of {turn.duration:.0f} s)"
    elif turn.exit_code:
        note = f"(exit code {turn.exit_code})"
    else:
        return turn.output
    output = turn.output.rstrip("\n")
    return f"{output}\n{note}" if output else note


def history(turns: Sequence[Turn]) -> list[tuple[str, str]]:
    """The (command, output) pairs of the turns that ran something."""
    return [(turn.command, turn.output) for turn in turns if turn.command is not None and turn.exit_code is not None]
