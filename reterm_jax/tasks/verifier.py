"""Runs a task's verifier in the live sandbox and reads its verdict."""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reterm_jax.sandbox.base import ExecResult, Sandbox, SandboxError, TamperError
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tasks.task import Task

_DETAIL_CHARS = 2000
_HOUSEKEEPING_SEC = 60.0

# The agent can write anything into /logs and /tests while it works, so both are emptied just before the tests run. The
# chmod is for sandboxes whose root has no capabilities: permissions taken away by the agent must not stop its grading.
# Programs that the agent put in front on the task's PATH must not answer for rm.
_CLEAR = """
PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
chmod -R u+rwX /tests /logs/verifier 2>/dev/null
for path in /logs /tests; do [ -d "$path" ] && [ ! -L "$path" ] || rm -rf "$path"; done
rm -rf /tests /logs/verifier && mkdir -p /logs/verifier
"""
_RUN = "command -p chmod +x /tests/test.sh 2>/dev/null; exec /tests/test.sh"
# What the machine, not the agent, is to blame for where the sandbox cannot be cleared.
_MACHINE = ("No space left on device", "Input/output error", "Read-only file system")


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
            return _not_cleared(task, cleared)
        if task.config.network("verifier") != task.config.network("agent"):
            await sandbox.set_network("verifier")
        private = sandbox.lingers  # the agent's processes may still run, and would write the verdict
        if private:
            with tempfile.TemporaryDirectory() as empty:
                await sandbox.upload(Path(empty), "/logs/verifier", private=True)
        await sandbox.upload(task.tests_dir, "/tests", private=private)
        tests = await sandbox.exec(
            _RUN, timeout=config.timeout_sec, user=user, env=config.env, fresh=True, private=private
        )
        if tests.timed_out:
            detail = f"task {task.id}: tests/test.sh ran past verifier.timeout_sec = {config.timeout_sec:g}"
            return Outcome(None, "verifier_error", f"{detail}\n{_tail(tests.output)}")
        name, text = await _read(sandbox, private)
        return Outcome.from_reward(parse_reward(name, text), _tail(tests.output))
    except TamperError as error:
        return Outcome.from_reward(0.0, f"task {task.id}: {error}")
    except SandboxError as error:
        return Outcome(None, "env_error", f"task {task.id}: {error}")
    except _BadReward as error:
        return Outcome(None, "verifier_error", f"task {task.id}: {error}\n{_tail(tests.output)}")


def _not_cleared(task: Task, cleared: ExecResult) -> Outcome:
    """An agent that destroyed what grading needs has failed; a disk that is full, or a slow machine, is no verdict."""
    said = f"task {task.id}: the sandbox cannot be graded as the attempt left it: {_tail(cleared.output)}"
    if cleared.timed_out or any(text in cleared.output for text in _MACHINE):
        return Outcome(None, "env_error", said)
    return Outcome.from_reward(0.0, said)


async def _read(sandbox: Sandbox, private: bool) -> tuple[str, str]:
    """Name and text of the reward file. Taken out through the daemon: the sandbox's own `cat` may be the agent's.

    Raises TamperError if it, or the tests that ran, are not what the verifier put there; ValueError if there is none.
    """
    with tempfile.TemporaryDirectory() as directory:
        seen, logs = Path(directory) / "test.sh", Path(directory) / "verifier"
        if private:
            with contextlib.suppress(FileNotFoundError):  # tests may remove themselves
                await sandbox.download("/tests/test.sh", seen, private=True)
        with contextlib.suppress(FileNotFoundError):
            await sandbox.download("/logs/verifier", logs, private=private)
        for name in ("reward.json", "reward.txt"):
            if (logs / name).is_file():
                return name, (logs / name).read_text(encoding="utf-8", errors="replace")
    raise _BadReward("tests/test.sh wrote neither /logs/verifier/reward.json nor reward.txt")


def parse_reward(name: str, text: str) -> float:
    """Reads the reward from the name of the file and its text; raises ValueError where it has none."""
    try:
        reward = _from_json(json.loads(text)) if name == "reward.json" else float(text.strip())
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
