"""Every family and obstacle in a real sandbox: what scripts do, what the terminal says, what the verifier decides."""

from __future__ import annotations

import asyncio
import random
import shutil

import pytest

from reterm_jax.sandbox import make_host
from reterm_jax.tasks import families
from reterm_jax.tasks.families import FAMILIES, NONE, SUBMIT
from reterm_jax.tasks.families.script import _wrong_repair
from reterm_jax.tasks.verifier import verify

pytestmark = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")

CASES = [(family.name, obstacle) for family in FAMILIES.values() for obstacle in family.obstacles]


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    """One task for each family and obstacle."""
    made = families.generate(tmp_path_factory.mktemp("tasks"), split="test", per_family=12, seed=3)
    return {(task.metadata["family"], task.metadata["obstacle"]): task for task in made}


@pytest.fixture(scope="module")
def loop():
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def host(loop, tmp_path_factory):
    host = make_host("bubblewrap", tmp_path_factory.mktemp("run"), max_concurrent=4, run_id="test")
    yield host
    loop.run(host.close())


async def act(sandbox, actions, history):
    for action in actions:
        if action == SUBMIT:
            return
        result = await sandbox.exec(action.command, timeout=10)
        history.append((action.command, result.output))


async def play(host, task, *scripts) -> tuple[list[float], list[tuple[str, str]]]:
    """Runs scripts one after the other in one sandbox, verifying after each; a script is a function of the history."""
    sandbox = await host.start(task)
    try:
        history: list[tuple[str, str]] = []
        rewards = []
        for script in scripts:
            await act(sandbox, script(history), history)
            outcome = await verify(sandbox, task)
            assert outcome.graded, outcome
            rewards.append(outcome.reward)
        return rewards, history
    finally:
        await sandbox.close()


@pytest.mark.parametrize("family,obstacle", CASES)
def test_scripts_get_the_rewards_that_they_should(loop, host, tasks, family, obstacle):
    task = tasks[family, obstacle]
    plan = families.blueprint(task)
    wrong = [[], *([slip] for slip in plan.slips)]
    if obstacle != NONE:
        repairs = {_wrong_repair(task, random.Random(seed)) for seed in range(8)}
        wrong += [[*plan.attempt, *repair] for repair in sorted(repairs, key=str)]
    for pattern, _ in plan.messes:
        wrong.append([families.Action("", pattern.replace(r"\S+", "/etc/passwd").rstrip("$"))])

    async def check():
        assert (await play(host, task, lambda _: plan.fix))[0] == [1]
        rewards, history = await play(host, task, lambda _: families.naive(task), lambda h: families.expert(task, h))
        assert rewards == [obstacle == NONE, 1], history
        shown = "\n".join(output for _, output in history)
        assert plan.clue in shown and plan.evidence in shown
        assert all(len(output) < 300 for _, output in history)
        for actions in wrong:
            rewards, history = await play(host, task, lambda _, a=actions: a, lambda h: families.expert(task, h))
            assert rewards == [0, 1], history

    loop.run(check())


def test_solutions_on_disk_solve_their_tasks(loop, host, tasks):
    async def check():
        for key in (("copy", "missing_dir"), ("tool", "module")):
            sandbox = await host.start(tasks[key])
            await sandbox.upload(tasks[key].solution, "/tmp/solve.sh")
            result = await sandbox.exec("bash /tmp/solve.sh", timeout=10, fresh=True)
            assert (await verify(sandbox, tasks[key])).solved, result.output
            await sandbox.close()

    loop.run(check())
