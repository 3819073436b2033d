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
    """What a weak base model would do: the naive attempt, at times a slip, at times some repairs after it."""
    plan = blueprint(task)
    look = [rng.choice(_LOOKS)] if rng.random() < 0.1 else []
    kind = rng.random()
    if kind < 0.35:
        way = [*plan.attempt, *guesses(task, rng, tried=True)]
    elif kind < 0.5:
        way = [_slip(task, rng)]
    else:
        way = [*plan.attempt]
    return [*look, *way, SUBMIT]


def next_attempt(task: Task, rng: random.Random) -> list[Action]:
    """What a weak base model would do when told that it failed: something that it knows of such tasks, unread."""
    kind = rng.random()
    if kind < 0.2:
        way = [*blueprint(task).attempt]
    elif kind < 0.35:
        way = [_slip(task, rng)]
    else:
        way = guesses(task, rng, tried=False)
    return [*way, SUBMIT]


def guesses(task: Task, rng: random.Random, *, tried: bool) -> list[Action]:
    """Repairs of the family's obstacles one after another, whatever the terminal has said, until one is right or, most
    often after the first, patience ends: right as often as chance has it.

    No name is said that neither the instruction nor the terminal has told: where the obstacle is another one, a guess
    ends after the look that would have shown the name. A model that learns from made up names makes up names.

    Args:
      task: a generated task.
      rng: decides the guesses.
      tried: the naive attempt comes just before, so that its message need not be provoked.
    """
    family, real = FAMILIES[task.metadata["family"]], task.metadata["obstacle"]
    if real == NONE and tried:
        return []
    patience = rng.choices((1, 2, 3), weights=(7, 2, 1))[0]
    obstacles = [name for name in family.obstacles if name != NONE]
    actions: list[Action] = []
    for obstacle in rng.sample(obstacles, len(obstacles))[:patience]:
        actions += _guess(task, obstacle, tried or blueprint(task).attempt[0] in actions)
        if family.build(task.metadata["names"], obstacle).fix == blueprint(task).fix:
            break
    return actions


def _guess(task: Task, obstacle: str, tried: bool) -> list[Action]:
    """The repair of one obstacle, as far as its names have been told."""
    plan = FAMILIES[task.metadata["family"]].build(task.metadata["names"], obstacle)
    repair = [*([plan.look] if plan.look else []), *plan.fix]
    unseen = [index for index, action in enumerate(repair) if _says_unseen(task, action)]
    if not unseen:
        return repair
    if obstacle != task.metadata["obstacle"]:
        return repair[: unseen[0]] or list(plan.attempt[:1])
    provoke = plan.probe or (() if tried else plan.attempt[:1])
    return repair if unseen[0] > 0 else [*provoke, *repair]


def _slip(task: Task, rng: random.Random) -> Action:
    """A slip that says no name beyond those of the instruction."""
    slips = [slip for slip in blueprint(task).slips if not _says_unseen(task, slip)]
    return rng.choice(slips)


def _says_unseen(task: Task, action: Action) -> bool:
    return any(name in action.command and name not in task.instruction for name in task.metadata["names"].values())


def _wrong_repair(task: Task, rng: random.Random) -> tuple[Action, ...]:
    """The fix of another obstacle of the same family, where it is another one."""
    metadata = task.metadata
    family, fix = FAMILIES[metadata["family"]], blueprint(task).fix
    others = [family.build(metadata["names"], name).fix for name in family.obstacles if name != NONE]
    return rng.choice([other for other in others if other != fix])
