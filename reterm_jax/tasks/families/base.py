"""What a task family is, and what it says about one of its tasks.

A family makes tasks of one kind. Each task has an obstacle that its instruction does not mention: with `none` the
plausible first attempt works, with any other the terminal shows why it did not. All that is known of a task is in its
`Blueprint`: what the agent starts from, how the result is checked, and how scripted agents act.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

NONE = "none"

Names = Mapping[str, str]


@dataclass(frozen=True)
class Action:
    """One turn of a scripted agent: a thought of at most four lowercase words, and a command."""

    thought: str
    command: str


SUBMIT = Action("done", "submit")


@dataclass(frozen=True)
class Blueprint:
    """One task in full. Paths are relative to /app, where the agent and the commands below start.

    Attributes:
      instruction: one sentence.
      files: contents of the start state; `directories` are those that may be empty; `setup` are Dockerfile commands.
      check: shell conditions, joined by "and", that hold exactly where the task is solved.
      attempt: the plausible first attempt. It ends up right exactly where the obstacle is `none`.
      fix: what solves the task, from the start and from the states that failed attempts leave.
      clue: text that shows the obstacle; a terminal that has printed it has said why the attempt fails.
      probe: what makes the terminal print the clue; None: the attempt does.
      look: what tells a detail that the fix needs beyond the clue; `evidence` is that detail as printed.
      slips: plausible single commands that do not solve the task, and leave a state that `fix` works from.
      messes: (pattern of an earlier command, what cleans up after it), to be done before `fix`.
      confirm: shows the result.
    """

    instruction: str
    files: Mapping[str, bytes | str]
    check: tuple[str, ...]
    attempt: tuple[Action, ...]
    fix: tuple[Action, ...]
    confirm: Action
    slips: tuple[Action, ...]
    directories: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    clue: str = ""
    probe: tuple[Action, ...] | None = None
    look: Action | None = None
    evidence: str = ""
    messes: tuple[tuple[str, Action], ...] = ()


@dataclass(frozen=True)
class Family:
    """A kind of task.

    Attributes:
      name, domain: the domain is one of ReTerm-10K's nine.
      obstacles: `none` first.
      draw: draws the words of one task; a task is given by these words and its obstacle.
      build: makes the blueprint from words and obstacle, the same one every time.
    """

    name: str
    domain: str
    obstacles: tuple[str, ...]
    draw: Callable[[random.Random], dict[str, str]] = field(repr=False)
    build: Callable[[Names, str], Blueprint] = field(repr=False)


def phrase(names: Names, *choices: str) -> str:
    """One of the wordings, the same one for the same names."""
    return choices[sum(map(ord, "".join(names.values()))) % len(choices)]
