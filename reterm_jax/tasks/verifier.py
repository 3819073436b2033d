"""Runs a task's verifier in the live sandbox and reads its verdict."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from reterm_jax.sandbox.base import Sandbox, SandboxError
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tasks.task import Task

_DETAIL_CHARS = 2000
_HOUSEKEEPING_SEC = 60.0

# The agent can write anything into /logs and /tests while it works, so both are emptied just before the tests run. The
# chmod is for sandboxes whose root has no capabilities: permissions taken away by the agent must not stop its grading.
# Programs that the agent put in front on the task's PATH must not answer for rm and cat.
_PATH = "PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_CLEAR = f"""
{_PATH}
chmod -R u+rwX /tests /logs/verifier 2>/dev/null
rm -rf /tests /logs/verifier && mkdir -p /logs/verifier
"""
_RUN = "command -p chmod +x /tests/test.sh && /tests/test.sh"
_READ = f"""
{_PATH}
cd /logs/verifier || exit 3
if [ -f reward.json ]; then echo json; cat reward.json
elif [ -f reward.txt ]; then echo text; cat reward.txt
else exit 3; fi
"""


class _BadReward(ValueError):
    pass


async def verify(sandbox: Sandbox, task: Task) -> Outcome:
    """Grades the sandbox's present state: `solved` or `failed`, or `verifier_error` / `env_error` without a reward.

    The exit status of the tests says nothing; what counts is the file they leave. Call it after the failure state has
    been saved: from here on the sandbox holds the tests.
    """
    config = task.config.verifier
    user = config.user or "root"
    try:
        cleared = await sandbox.exec(_CLEAR, timeout=_HOUSEKEEPING_SEC, user="root", fresh=True)
        if cleared.exit_code != 0:
            return Outcome(None, "env_error", f"task {task.id}: cannot clear /logs/verifier: {_tail(cleared.output)}")
        await sandbox.upload(task.tests_dir, "/tests")
        tests = await sandbox.exec(_RUN, timeout=config.timeout_sec, user=user, env=config.env, fresh=True)
        if tests.timed_out:
            detail = f"task {task.id}: tests/test.sh ran past verifier.timeout_sec = {config.timeout_sec:g}"
            return Outcome(None, "verifier_error", f"{detail}\n{_tail(tests.output)}")
        read = await sandbox.exec(_READ, timeout=_HOUSEKEEPING_SEC, user="root", fresh=True)
    except SandboxError as error:
        return Outcome(None, "env_error", f"task {task.id}: {error}")
    if read.exit_code != 0:
        problem = "tests/test.sh wrote neither /logs/verifier/reward.json nor reward.txt"
    else:
        try:
            return Outcome.from_reward(parse_reward(read.output), _tail(tests.output))
        except _BadReward as error:
            problem = str(error)
    return Outcome(None, "verifier_error", f"task {task.id}: {problem}\n{_tail(tests.output)}")


def parse_reward(output: str) -> float:
    """Reads the reward from the kind of the file (first line) and its text; raises ValueError where it has none."""
    kind, _, text = output.partition("\n")
    name = "reward.json" if kind.strip() == "json" else "reward.txt"
    try:
        reward = _from_json(json.loads(text)) if kind.strip() == "json" else float(text.strip())
    except _BadReward:
        raise
    except (ValueError, OverflowError, RecursionError):
        raise _BadReward(f"{name} holds {text.strip()[:80]!r}, which is not a number") from None
    if not math.isfinite(reward):
        raise _BadReward(f"{name} holds {reward}, which is not a finite number")
    return reward


def _from_json(value: Any) -> float:
    """A number; or a table with `reward`; or a table with one entry."""
    if isinstance(value, Mapping):
        if "reward" not in value and len(value) != 1:
            raise _BadReward(f"reward.json has the keys {sorted(value)}, but none is 'reward'")
        value = value["reward"] if "reward" in value else next(iter(value.values()))
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _BadReward(f"reward.json holds {value!r}, which is not a number")
    return float(value)


def _tail(text: str) -> str:
    return text[-_DETAIL_CHARS:].strip()
