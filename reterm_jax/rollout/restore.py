"""Failure states whose snapshots were lost with the process that made them."""

from __future__ import annotations

import logging

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.rollout.groups import Gate, Roller
from reterm_jax.sandbox.base import Sandbox, SandboxError
from reterm_jax.sandbox.output import shorten
from reterm_jax.tasks.task import Task


async def restore_state(roller: Roller, task: Task, attempt: Attempt, gate: Gate) -> FailureState | None:
    """The state that a finished attempt left, made again by running its commands in a new sandbox.

    None where that is not the same state as far as the terminal tells: a command that prints something else or ends
    otherwise, one that cannot be run, or an attempt that did not begin at the task's start.
    """
    if attempt.parent is not None:
        return None
    async with gate:
        try:
            sandbox = await roller.host.start(task)
            try:
                if not await _replayed(roller, task, attempt, sandbox):
                    logging.warning("attempt %s: its commands gave something else; no recovery from it", attempt.id)
                    return None
                snapshot = await sandbox.snapshot()
            finally:
                await sandbox.close()
        except SandboxError as error:
            logging.warning("attempt %s: its state could not be made again: %s", attempt.id, error)
            return None
    if not roller.live_processes.usable(snapshot):
        await roller.release(snapshot)
        return None
    return FailureState.of(attempt, snapshot)


async def _replayed(roller: Roller, task: Task, attempt: Attempt, sandbox: Sandbox) -> bool:
    limits = roller.limits
    for turn in attempt.turns[: attempt.forked_after]:
        if turn.command is None or turn.exit_code is None:
            continue
        done = await sandbox.exec(turn.command, timeout=limits.command_timeout, user=task.config.agent.user)
        said = (shorten(done.output, limits.output_limit), done.exit_code, done.timed_out)
        if said != (turn.output, turn.exit_code, turn.timed_out):
            return False
    return True
