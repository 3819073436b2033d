"""Reference agents, which tell whether a task set is sound: `oracle` must be judged 1, `nop` must be judged 0."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence

from reterm_jax.evaluation.records import AttemptRecord, TurnRecord
from reterm_jax.sandbox.base import ExecResult, Sandbox, SandboxHost
from reterm_jax.tasks.task import Task
from reterm_jax.tasks.verifier import verify

AGENTS = ("oracle", "nop")

_SOLVE = "bash /solution/solve.sh"
_OUTPUT_CHARS = 4000


@dataclasses.dataclass(frozen=True)
class Unsound:
    """A task on which a reference agent was not judged as it must be."""

    agent: str
    record: AttemptRecord
    expected: float

    @property
    def verdict(self) -> str:
        """What was found: the reward, or why there is none."""
        return self.record.status if self.record.reward is None else f"{self.record.reward:g}"

    @property
    def reason(self) -> str:
        """The last lines that the verifier, or else the solution, printed; for people."""
        printed = self.record.detail.strip() or "".join(turn.output for turn in self.record.turns)
        return " / ".join(printed.strip().splitlines()[-2:])[-160:]


async def run_reference(agent: str, task: Task, host: SandboxHost, *, timeout: float, seed: int = 0) -> AttemptRecord:
    """One attempt of a reference agent: the task's own `solution/solve.sh` as the agent's user, or nothing; then the
    verifier.

    Args:
      agent: "oracle" or "nop".
      timeout: seconds for the solution where the task sets no `agent.timeout_sec`.

    Raises:
      SandboxError: where the environment could not be started.
      ValueError: for another agent, or a task without a solution.
    """
    if agent not in AGENTS:
        raise ValueError(f"reference agent {agent!r} is unknown; one of {', '.join(AGENTS)}")
    begun = time.monotonic()
    sandbox = await host.start(task)
    try:
        solved = await _solve(sandbox, task, timeout) if agent == "oracle" else None
        outcome = await verify(sandbox, task)
    finally:
        await sandbox.close()
    turns = []
    if solved is not None:
        output = solved.output[-_OUTPUT_CHARS:]
        turns = [TurnRecord("", _SOLVE, output, solved.exit_code, solved.duration, solved.timed_out)]
    return AttemptRecord(
        id=f"{agent}/{task.id}",
        task_id=task.id,
        family=str(task.metadata.get("family", "")),
        turns=turns,
        reward=outcome.reward,
        status=outcome.status,
        ended="time_limit" if solved is not None and solved.timed_out else "submit",
        seed=seed,
        seconds=time.monotonic() - begun,
        detail=outcome.detail,
    )


def unsound(agent: str, records: Sequence[AttemptRecord]) -> list[Unsound]:
    """Those of an agent's attempts that were not judged 1 (oracle) or 0 (nop); not graded is not sound either."""
    expected = 1.0 if agent == "oracle" else 0.0
    return [Unsound(agent, record, expected) for record in records if record.reward != expected]


def unsound_table(found: Sequence[Unsound]) -> str:
    """One line a task and agent: what was expected, what was found, and what was printed."""
    rows = [("task", "agent", "expected", "found", "printed last")]
    rows += [(x.record.task_id, x.agent, f"{x.expected:g}", x.verdict, x.reason) for x in found]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join("  ".join([*(c.ljust(w) for c, w in zip(row, widths, strict=False)), row[4]]) for row in rows)


async def _solve(sandbox: Sandbox, task: Task, timeout: float) -> ExecResult:
    if task.solution is None:
        raise ValueError(f"{task.path / 'solution' / 'solve.sh'}: missing; the oracle has nothing to run")
    await sandbox.upload(task.solution.parent, "/solution")
    config = task.config
    return await sandbox.exec(
        _SOLVE,
        timeout=config.agent.timeout_sec or timeout,
        user=config.agent.user,
        env=config.solution.env,
        fresh=True,
    )
