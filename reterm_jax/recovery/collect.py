"""Collects recovery demonstrations: an attempt fails, its state is forked, and a teacher takes over in the fork."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from reterm_jax.agent.episode import (
    RETRY_MESSAGE,
    AgentLimits,
    Attempt,
    FailureState,
    run_attempt,
    start_messages,
)
from reterm_jax.agent.protocol import SYSTEM_PROMPT
from reterm_jax.agent.scripted import ScriptedAction, ScriptedPolicy
from reterm_jax.agent.turns import Turn, history, observation
from reterm_jax.recovery.dataset import Row, make_row
from reterm_jax.rollout.samplers.base import Sampler
from reterm_jax.sandbox.base import SandboxError, SandboxHost
from reterm_jax.tasks.task import Task
from reterm_jax.tokens.chat import ChatFormat

# Why an attempt gave no row, in the order in which it is found out.
REJECTIONS = (
    "env_error",  # a fault of sandbox, sampler or verifier, in either attempt
    "first_solved",  # there was nothing to recover from
    "no_state",  # the failed attempt left no room to go on, or its state could not be saved
    "unsolved",  # the recovery failed
    "not_submitted",  # the recovery ran into a limit
    "no_op",  # the recovery ran nothing
    "duplicate",  # the same messages as an earlier row
)

# The policy of a failed attempt, given the task and the attempt's seed; and what the teacher does after a history.
FailureSource = Callable[[Task, int], Sampler]
Teacher = Callable[[Task, Sequence[tuple[str, str]], int], Sequence[ScriptedAction]]


def scripted_failures(chat: ChatFormat, script: Callable[[Task, int], Sequence[ScriptedAction]]) -> FailureSource:
    """Failed attempts by script, as a source for `Collector`. `script` gets the task and a seed."""
    return lambda task, seed: ScriptedPolicy(chat, script(task, seed))


@dataclasses.dataclass(frozen=True)
class Collection:
    """Demonstrations, and what became of the rest.

    Attributes:
      rows: in the order of the tasks.
      counts: `kept` and each of `REJECTIONS`; they add up to the number of attempts.
    """

    rows: list[Row]
    counts: Mapping[str, int]


@dataclasses.dataclass(frozen=True)
class Collector:
    """What collecting needs, bound once.

    Attributes:
      failures: whose attempts fail; all are filtered, so it may at times solve a task.
      teacher: recovers; it sees commands and outputs so far, and a seed.
      limits: of the failed attempt and, again, of the recovery.
      concurrent: sandboxes alive at once.
      retry_message: the tool message between failure and recovery.
      temperature: at which a failure source that samples does so.
    """

    host: SandboxHost
    chat: ChatFormat
    failures: FailureSource
    teacher: Teacher
    limits: AgentLimits
    concurrent: int = 8
    retry_message: str = RETRY_MESSAGE
    system_prompt: str = SYSTEM_PROMPT
    temperature: float = 1.0

    async def collect(
        self,
        tasks: Sequence[Task],
        *,
        seed: int,
        attempts: int = 1,
        progress: Callable[[int, int, int], None] | None = None,
    ) -> Collection:
        """Tries `attempts` failures of each task, one recovery each.

        Args:
          seed: together with task and number of the attempt it decides what scripts and samplers do.
          progress: called with (rows so far, attempts done, attempts in all) after each.
        """
        gate = asyncio.Semaphore(self.concurrent)
        jobs = [(task, index) for index in range(attempts) for task in tasks]
        kept = done = 0

        async def one(task: Task, index: int) -> Row | str:
            nonlocal kept, done
            async with gate:
                name = f"{task.id}/{seed}/{index}"
                # Each its own: with a shared seed every task would fail in the same way.
                result = await self._demonstration(task, name, random.Random(name).getrandbits(31))
            done += 1
            kept += isinstance(result, Row)
            if progress is not None:
                progress(kept, done, len(jobs))
            return result

        async with asyncio.TaskGroup() as group:
            running = [group.create_task(one(task, index)) for task, index in jobs]
        counts: collections.Counter[str] = collections.Counter({name: 0 for name in ("kept", *REJECTIONS)})
        rows: dict[str, Row] = {}
        for result in (task.result() for task in running):
            if isinstance(result, Row) and result.trajectory_sha256 in rows:
                result = "duplicate"
            if isinstance(result, Row):
                rows[result.trajectory_sha256] = result
            counts["kept" if isinstance(result, Row) else result] += 1
        return Collection(list(rows.values()), dict(counts))

    async def _demonstration(self, task: Task, name: str, seed: int) -> Row | str:
        """One row, or the reason why there is none."""
        snapshot = None
        try:
            failed, snapshot = await self._attempt(task, self.failures(task, seed), f"{name}/failed", seed, None)
            if failed.outcome is None or not failed.outcome.graded:
                return "env_error"
            if failed.solved:
                return "first_solved"
            if snapshot is None:
                return "no_state"
            state = FailureState.of(failed, snapshot)
            actions = self.teacher(task, history(failed.turns), seed)
            recovery, _ = await self._attempt(task, ScriptedPolicy(self.chat, actions), f"{name}/recovery", seed, state)
            return self._filter(task, failed, recovery)
        except SandboxError as error:
            logging.warning("demonstration %s: %s", name, error)
            return "env_error"
        finally:
            if snapshot is not None:
                await self.host.release(snapshot)

    async def _attempt(self, task: Task, sampler: Sampler, name: str, seed: int, start: FailureState | None):
        # Closed before the next one starts: two sandboxes at once would wait for each other at the host's limit.
        sandbox = await (self.host.fork(start.snapshot, task) if start else self.host.start(task))
        try:
            return await run_attempt(
                task,
                sandbox,
                sampler,
                self.chat,
                self.limits,
                seed=seed,
                start=start,
                retry_message=self.retry_message if start else None,
                keep_failure=start is None,
                attempt_id=name,
                temperature=self.temperature,
                system_prompt=self.system_prompt,
                release=self.host.release,
            )
        finally:
            await sandbox.close()
            await sampler.end(name)

    def _filter(self, task: Task, failed: Attempt, recovery: Attempt) -> Row | str:
        if recovery.outcome is None or not recovery.outcome.graded:
            return "env_error"
        if not recovery.solved:
            return "unsolved"
        if recovery.ended != "submit":
            return "not_submitted"
        if not history(recovery.turns):
            return "no_op"
        messages = start_messages(task.instruction, self.system_prompt)
        messages += self._messages(failed)
        messages.append({"role": "tool", "content": self.retry_message})
        train_from = len(messages)
        return make_row(task.id, messages + self._messages(recovery), train_from)

    def _messages(self, attempt: Attempt) -> list[dict[str, Any]]:
        """Assistant and tool messages of the attempt's own turns; a submit has no answer."""
        own, start = [], 0
        for span in attempt.transcript.spans:
            if start >= attempt.prefix_len and span.source == "policy":
                own.append(self.chat.policy_text(span.ids))
            start += len(span.ids)
        messages = []
        for text, turn in zip(own, attempt.turns, strict=True):
            messages.append({"role": "assistant", "content": text})
            if not _submitted(turn):
                messages.append({"role": "tool", "content": observation(turn)})
        return messages


def _submitted(turn: Turn) -> bool:
    return turn.error is None and turn.exit_code is None
