from __future__ import annotations

import random

import pytest

from reterm_jax.tasks import families
from reterm_jax.tasks.families import NONE, SUBMIT, Action
from reterm_jax.tasks.task import Task, TaskError


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    return families.generate(tmp_path_factory.mktemp("tasks"), split="train", per_family=20, seed=4)


def find(tasks, family, obstacle):
    return next(t for t in tasks if (t.metadata["family"], t.metadata["obstacle"]) == (family, obstacle))


def test_thoughts_and_commands_are_short(tasks):
    for task in tasks:
        rng = random.Random(task.id)
        scripts = [families.naive(task), families.expert(task, []), families.expert(task, [], rng)]
        scripts += [families.failure(task, rng), families.first_attempt(task, rng)]
        scripts += [families.next_attempt(task, rng)]
        for script in scripts:
            assert script[-1] == SUBMIT and SUBMIT not in script[:-1]
            assert 2 <= len(script) <= 10
            for action in script:
                assert len(action.thought.split()) <= 4 and action.thought == action.thought.lower()
                assert len(action.command) < 80 and "\n" not in action.command


def test_scripts_are_deterministic(tasks):
    for task in tasks[::7]:
        assert families.naive(task) == families.naive(task)
        for script in (families.failure, families.first_attempt, families.next_attempt):
            assert script(task, random.Random(1)) == script(task, random.Random(1))


def test_the_expert_looks_only_for_what_it_has_not_seen(tasks):
    task = find(tasks, "restore", "suffix")
    plan = families.blueprint(task)
    provoke = (plan.attempt[0].command, f"cp: {plan.clue}: No such file or directory\n")
    look = ("ls", f"{plan.evidence}\n")
    assert families.expert(task, []) == [plan.attempt[0], plan.look, *plan.fix, SUBMIT]
    assert families.expert(task, [look]) == [plan.attempt[0], *plan.fix, SUBMIT]
    assert families.expert(task, [provoke]) == [plan.look, *plan.fix, SUBMIT]
    assert families.expert(task, [provoke, look]) == [*plan.fix, SUBMIT]


def test_the_expert_cleans_up_after_a_mess(tasks):
    task = find(tasks, "copy", "missing_dir")
    place = task.metadata["names"]["dir"]
    plan = families.blueprint(task)
    history = [("cp x " + place, ""), (plan.attempt[0].command, plan.clue)]
    assert families.expert(task, history) == [
        Action("remove the wrong file", f"rm -f {place}"),
        *plan.fix,
        SUBMIT,
    ]


def test_failures_vary_and_first_attempts_mix(tasks):
    task = find(tasks, "remove", "readonly_dir")
    rng = random.Random(0)
    assert len({tuple(families.failure(task, rng)) for _ in range(100)}) >= 6
    plan = families.blueprint(task)
    # A base model's repairs are guesses: the right one is among them, and not always.
    for attempt, least, most in ((families.first_attempt, 0.1, 0.35), (families.next_attempt, 0.2, 0.55)):
        repaired = sum(plan.fix == tuple(attempt(task, rng)[-len(plan.fix) - 1 : -1]) for _ in range(400)) / 400
        assert least < repaired < most
    for task in tasks:
        if task.metadata["obstacle"] == NONE:
            assert tuple(families.failure(task, rng)[:-1]) != families.blueprint(task).attempt


def test_a_base_model_never_makes_up_names(tasks):
    """Each name in its commands is one of the instruction, or the terminal has been made to say it before."""
    told = 0
    for task in tasks:
        names, plan = task.metadata["names"].values(), families.blueprint(task)
        for seed in range(30):
            rng = random.Random(f"{task.id}/{seed}")
            script = families.next_attempt(task, rng) if seed % 2 else families.first_attempt(task, rng)
            for index, action in enumerate(script):
                hidden = [name for name in names if name in action.command and name not in task.instruction]
                if hidden:
                    asking = (plan.look, *(plan.probe or plan.attempt))
                    asked = [earlier for earlier in script[:index] if earlier in asking]
                    assert action in (*plan.fix, plan.look) and asked, (task.id, seed, action)
                    told += 1
    assert told > 20


def test_tasks_of_no_family_are_refused(make_task):
    with pytest.raises(TaskError, match="generated tasks only"):
        families.naive(Task.load(make_task()))
