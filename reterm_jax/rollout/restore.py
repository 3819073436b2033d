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
    """Sandboxes in one failure state, the same for all recoveries from it.

    Where its snapshot is lost, the state is made again, once for all of them; where that fails, for all of them too.
    Use it as an async context manager: leaving it releases what was made again (the state's own snapshot is its
    owner's).
    """

    def __init__(self, roller: Roller, task: Task, state: FailureState) -> None:
        self._roller, self._task, self._state = roller, task, state
        self._snapshot = state.snapshot
        self._lost: SnapshotLost | None = None  # why `_snapshot` is of no use any more
        self._prove = False
        self._lock = asyncio.Lock()
        self.ended = False  # the state is lost and cannot be made again

    async def __aenter__(self) -> Forks:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._release()

    def doubt(self) -> None:
        """Has every sandbox from now on run a command before it is given out, which shows a state that is not complete.

        To be called when a recovery met a fault of its environment: for all sandboxes it would take too long.
        """
        self._prove = True

    async def sandbox(self) -> Sandbox:
        """A new one; the caller closes it. Raises SandboxError, as a host's `fork` does."""
        snapshot = self._snapshot
        if self._lost is None:
            try:
                return await self._fork(snapshot)
            except SnapshotLost as lost:
                if self._snapshot is snapshot:
                    self._lost = lost
        async with self._lock:
            if self._lost is not None:
                await self._make_again(self._lost)
        return await self._fork(self._snapshot)

    async def _fork(self, snapshot: Snapshot) -> Sandbox:
        sandbox = await self._roller.host.fork(snapshot, self._task)
        if self._prove:
            try:
                await sandbox.exec("true", timeout=self._roller.limits.command_timeout, fresh=True)
            except BaseException:
                await sandbox.close()
                raise
        return sandbox

    async def _make_again(self, lost: SnapshotLost) -> None:
        await self._release()
        made = None
        # Deeper, its turns are not all that was done since the task's start.
        if not self.ended and not self._state.depth:
            logging.warning("%s: its state is made again from its commands", lost)
            made = await _made_again(self._roller, self._task, self._state.id, self._state.turns)
        if made is None:
            self.ended = True
            raise SnapshotLost(str(lost)) from lost
        self._snapshot, self._lost = made, None

    async def _release(self) -> None:
        if self._snapshot is not self._state.snapshot:
            await self._roller.release(self._snapshot)


async def _made_again(roller: Roller, task: Task, name: str, turns: Sequence[Turn]) -> Snapshot | None:
    """The state after `turns` from the task's start, or None. Takes a sandbox while it runs."""
    snapshot = None
    try:
        sandbox = await roller.host.start(task)
        try:
            if await _replayed(roller, task, turns, sandbox):
                snapshot = await sandbox.snapshot()
            else:
                logging.warning("attempt %s: its commands gave something else; no recovery from it", name)
        finally:
            await sandbox.close()
    except BaseException as error:
        if snapshot is not None:
            await roller.release(snapshot)
        if not isinstance(error, SandboxError):
            raise
        logging.warning("attempt %s: its state could not be made again: %s", name, error)
        return None
    return snapshot


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
