"""Agents that act by script on generated tasks: a naive one that fails at obstacles, and an expert that recovers.

They stand in for the base model and for the stronger teacher: their attempts start the policy off (SFT). All lists end
with `SUBMIT`. Whether an attempt solved its task is for the verifier to say.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from reterm_jax.tasks.families.base import NONE, SUBMIT, Action, Blueprint
from reterm_jax.tasks.families.generate import FAMILIES
from reterm_jax.tasks.task import Task, TaskError

_LOOKS = (Action("look around", "ls"), Action("where am i", "pwd"))


def blueprint(task: Task) -> Blueprint:
    """All that is known of a generated task; raises TaskError for a task that no family made."""
    metadata = task.metadata
    try:
        return FAMILIES[metadata["family"]].build(metadata["names"], metadata["obstacle"])
    except (KeyError, TypeError):
        raise TaskError(
            task.path / "task.toml",
            "metadata",
            "no known family made this task",
            "scripts exist for generated tasks only",
        ) from None


def naive(task: Task) -> list[Action]:
    """The first plausible attempt, errors ignored; at times after a look around. The same one every time."""
    rng = random.Random(task.id)
    look = [rng.choice(_LOOKS)] if rng.random() < 0.2 else []
    return [*look, *blueprint(task).attempt, SUBMIT]


def expert(task: Task, history: Sequence[tuple[str, str]], rng: random.Random | None = None) -> list[Action]:
    """Takes over after `history`, the (command, output) pairs so far, and solves the task.

    It acts on nothing that the terminal has not shown: where the history does not show the obstacle, it first provokes
    the message, then looks up what the fix needs, then fixes. So what it does can be learned from what is seen.

    Args:
      task: a generated task, in the state that `history` left.
      history: may be empty, or the way of a scripted or a sampled attempt.
      rng: if given, one recovery in five ends with a look at the result.
    """
    plan = blueprint(task)
    outputs = [output for _, output in history]
    actions = []
    if plan.clue and not any(plan.clue in output for output in outputs):
        actions += plan.probe or plan.attempt[:1]
    lines = {line.strip().removeprefix("./") for output in outputs for line in output.splitlines()}
    if plan.look and plan.evidence not in lines:
        actions.append(plan.look)
    for pattern, cleanup in plan.messes:
        if any(re.search(pattern, command) for command, _ in history):
            actions.append(cleanup)
    actions += plan.fix
    if rng is not None and len(actions) < 3 and rng.random() < 0.2:
        actions.append(plan.confirm)
    return [*actions, SUBMIT]


def failure(task: Task, rng: random.Random) -> list[Action]:
    """A plausible attempt that does not solve the task, in one of several ways, for recoveries to start from."""
    plan = blueprint(task)
    obstacle = task.metadata["obstacle"]
    slip = rng.choice(plan.slips)
    ways = [[slip], [rng.choice(_LOOKS)]]
    if obstacle != NONE:
        # Half of all failures are the naive attempt itself.
        ways += [list(plan.attempt)] * 5
        ways += [[slip, *plan.attempt], [*plan.attempt, slip], [*plan.attempt, *_wrong_repair(task, rng)]]
    return [*rng.choice(ways), SUBMIT]


def first_attempt(task: Task, rng: random.Random) -> list[Action]:
    """What a weak base model would do: the naive attempt, at times a slip, at times some repair after it."""
    plan = blueprint(task)
    look = [rng.choice(_LOOKS)] if rng.random() < 0.1 else []
    kind = rng.random()
    if kind < 0.3:
        way = [*plan.attempt, *guess(task, rng)]
    elif kind < 0.45:
        way = [rng.choice(plan.slips)]
    else:
        way = [*plan.attempt]
    return [*look, *way, SUBMIT]


def next_attempt(task: Task, rng: random.Random) -> list[Action]:
    """What a weak base model would do when told that it failed: something that it knows of such tasks, unread."""
    plan = blueprint(task)
    kind = rng.random()
    if kind < 0.2:
        way = [*plan.attempt]
    elif kind < 0.35:
        way = [rng.choice(plan.slips)]
    else:
        way = guess(task, rng)
    return [*way, SUBMIT]


def guess(task: Task, rng: random.Random) -> list[Action]:
    """The repair of one of the family's obstacles, whatever the terminal has said: right as often as chance has it."""
    metadata = task.metadata
    family = FAMILIES[metadata["family"]]
    plan = family.build(metadata["names"], rng.choice([name for name in family.obstacles if name != NONE]))
    return [*([plan.look] if plan.look else []), *plan.fix]


def _wrong_repair(task: Task, rng: random.Random) -> tuple[Action, ...]:
    """The fix of another obstacle of the same family."""
    metadata = task.metadata
    family = FAMILIES[metadata["family"]]
    others = [name for name in family.obstacles if name not in (NONE, metadata["obstacle"])]
    return family.build(metadata["names"], rng.choice(others)).fix
