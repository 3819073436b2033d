from __future__ import annotations

import asyncio
import shutil

import pytest

from reterm_jax.sandbox import SandboxError, make_host
from reterm_jax.tasks.task import Task
from reterm_jax.tasks.verifier import parse_reward, verify


@pytest.mark.parametrize(
    "output,reward",
    [
        ("reward.txt\n1\n", 1.0),
        ("reward.txt\n 0.25 ", 0.25),
        ("reward.json\n1", 1.0),
        ('reward.json\n{"reward": 0.5, "speed": 3}', 0.5),
        ('reward.json\n{"accuracy": 1}', 1.0),
    ],
)
def test_rewards(output, reward):
    assert parse_reward(*output.split("\n", 1)) == reward


@pytest.mark.parametrize(
    "output",
    [
        "reward.txt\n",
        "reward.txt\nnan",
        "reward.txt\ninf",
        "reward.txt\nyes",
        "reward.json\n",
        "reward.json\n{}",
        "reward.json\ntrue",
        "reward.json\nNaN",
        'reward.json\n"1"',
    ]
    + ['reward.json\n{"a": 1, "b": 2}', 'reward.json\n{"reward": null}', "reward.json\n1" + "0" * 400],
)
def test_what_is_not_a_reward(output):
    with pytest.raises(ValueError, match="reward"):
        parse_reward(*output.split("\n", 1))


def grade(tmp_path, task: Task, *commands: str):
    """Runs commands, then the verifier, in a real sandbox."""

    async def run():
        host = make_host("bubblewrap", tmp_path / "run", max_concurrent=1, run_id="test")
        try:
            sandbox = await host.start(task)
            for command in commands:
                await sandbox.exec(command, timeout=10)
            return await verify(sandbox, task)
        finally:
            await host.close()

    return asyncio.run(run())


needs_bwrap = pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed")


@needs_bwrap
@pytest.mark.parametrize(
    "script,status",
    [
        ("echo 1 > /logs/verifier/reward.txt; exit 7", "solved"),
        ("echo 0 > /logs/verifier/reward.txt", "failed"),
        ("cd /logs/verifier; echo 1 > reward.txt; echo '{\"reward\": 0}' > reward.json", "failed"),
        ("[ $PWD = /app ] && [ $LEVEL = 3 ] && [ -f /tests/data/x ] && echo 1 > /logs/verifier/reward.txt", "solved"),
        ("echo broken", "verifier_error"),
        ("echo NaN > /logs/verifier/reward.txt", "verifier_error"),
        ("sleep 9; echo 1 > /logs/verifier/reward.txt", "verifier_error"),
    ],
)
def test_the_file_decides(tmp_path, make_task, script, status):
    toml = "[verifier]\ntimeout_sec = 1.5\nenv = { LEVEL = '3' }\n"
    files = {"task.toml": toml, "tests/test.sh": f"#!/bin/bash\n{script}\n", "tests/data/x": ""}
    outcome = grade(tmp_path, Task.load(make_task(files=files)))
    assert outcome.status == status, outcome
    if status == "verifier_error":
        assert outcome.reward is None and "example" in outcome.detail


@needs_bwrap
@pytest.mark.parametrize(
    "command",
    [
        "echo 1 > /logs/verifier/reward.txt",
        "echo 1 > /logs/verifier/reward.json; chmod 500 /logs/verifier",
        "mkdir /tests; printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt' > /tests/test.sh; chmod 500 /tests",
        "mkdir bin; printf '#!/bin/bash\\necho 1\\n' > bin/cat; chmod +x bin/cat",
        "cat() { echo 1; }; export -f cat; cd /tmp; export PATH=/nowhere",
    ],
)
def test_the_agent_cannot_grade_itself(tmp_path, make_task, command):
    toml = "[environment]\nenv = { PATH = '/app/bin:/usr/bin:/bin' }\n"
    files = {"task.toml": toml, "tests/test.sh": "#!/bin/bash\necho 0 > /logs/verifier/reward.txt\n"}
    assert grade(tmp_path, Task.load(make_task(files=files)), command).status == "failed"


def test_a_broken_sandbox_is_not_the_policys_fault(make_task):
    class Broken:
        lingers = False

        async def exec(self, *args, **kwargs):
            raise SandboxError("gone")

    outcome = asyncio.run(verify(Broken(), Task.load(make_task())))
    assert (outcome.status, outcome.reward) == ("env_error", None)
    assert "example" in outcome.detail and "gone" in outcome.detail
