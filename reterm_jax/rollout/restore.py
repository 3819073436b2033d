"""Failure states whose snapshots were lost: with the process that made them, with their daemon, or for newer ones."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.agent.turns import Turn
from reterm_jax.sandbox.base import Sandbox, SandboxError, Snapshot, SnapshotLost
from reterm_jax.sandbox.output import shorten
from reterm_jax.tasks.task import Task

if TYPE_CHECKING:
    from reterm_jax.rollout.groups import Gate, Roller


async def restore_state(roller: Roller, task: Task, attempt: Attempt, gate: Gate) -> FailureState | None:
    """The state that a finished attempt left, made again by running its commands in a new sandbox.

    None where that is not the same state as far as the terminal tells: a command that prints something else or ends
    otherwise, one that cannot be run, or an attempt that did not begin at the task's start.
    """
    if attempt.parent is not None:
        return None
    async with gate:
        snapshot = await _made_again(roller, task, attempt.id, attempt.turns[: attempt.forked_after])
    if snapshot is None:
        return None
    if not roller.live_processes.usable(snapshot):
        await roller.release(snapshot)
        return None
    return FailureState.of(attempt, snapshot)


class Forks:
    """Sandboxes in one failure state, the same for all recoveries of a group.

    Where its snapshot is lost, the state is made again, once for all of them. Use it as an async context manager:
    leaving it releases what was made again (the state's own snapshot is its owner's).
    """

    def __init__(self, roller: Roller, task: Task, state: FailureState) -> None:
        self._roller, self._task, self._state = roller, task, state
        self._snapshot = state.snapshot
        self._lock = asyncio.Lock()

    async def __aenter__(self) -> Forks:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._snapshot is not self._state.snapshot:
            await self._roller.release(self._snapshot)

    async def sandbox(self) -> Sandbox:
        """A new one; the caller closes it. Raises SandboxError, as a host's `fork` does."""
        host, snapshot = self._roller.host, self._snapshot
        try:
            return await host.fork(snapshot, self._task)
        except SnapshotLost as lost:
            async with self._lock:
                if self._snapshot is snapshot:
                    self._snapshot = await self._again(lost)
        return await host.fork(self._snapshot, self._task)

    async def _again(self, lost: SnapshotLost) -> Snapshot:
        state = self._state
        if state.depth:  # its turns are not all that was done since the task's start
            raise lost
        logging.warning("%s: its state is made again from its commands", lost)
        made = await _made_again(self._roller, self._task, state.id, state.turns)
        if made is None:
            raise lost
        return made


async def _made_again(roller: Roller, task: Task, name: str, turns: Sequence[Turn]) -> Snapshot | None:
    """The state after `turns` from the task's start, or None. Takes a sandbox while it runs."""
    try:
        sandbox = await roller.host.start(task)
        try:
            if not await _replayed(roller, task, turns, sandbox):
                logging.warning("attempt %s: its commands gave something else; no recovery from it", name)
                return None
            return await sandbox.snapshot()
        finally:
            await sandbox.close()
    except SandboxError as error:
        logging.warning("attempt %s: its state could not be made again: %s", name, error)
        return None


async def _replayed(roller: Roller, task: Task, turns: Sequence[Turn], sandbox: Sandbox) -> bool:
    limits = roller.limits
    for turn in turns:
        if turn.command is None or turn.exit_code is None:
            continue
        done = await sandbox.exec(turn.command, timeout=limits.command_timeout, user=task.config.agent.user)
        said = (shorten(done.output, limits.output_limit), done.exit_code, done.timed_out)
        if said != (turn.output, turn.exit_code, turn.timed_out):
            return False
    return True
