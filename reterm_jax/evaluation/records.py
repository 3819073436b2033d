"""What evaluation stores and what the report shows: plain dataclasses with a JSON form."""

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from reterm_jax.evaluation.json_codec import RecordError, decode, encode


@dataclasses.dataclass(frozen=True)
class TurnRecord:
    """One turn as a person reads it. `command` is None where the policy called no tool; `duration` in seconds."""

    thought: str
    command: str | None
    output: str
    exit_code: int | None
    duration: float = 0.0
    timed_out: bool = False
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class AttemptRecord:
    """One attempt with its verdict.

    `reward` is None where the attempt was not graded (`env_error`, `verifier_error`). `parent` names the failure state
    that a recovery started from. `version` is the training step of the policy, -1 where that has no meaning. `tokens`
    counts sampled tokens, `seconds` is wall time.
    """

    id: str
    task_id: str
    family: str
    turns: list[TurnRecord]
    reward: float | None
    status: str
    ended: str
    version: int = -1
    parent: str | None = None
    depth: int = 0
    seed: int = 0
    tokens: int = 0
    seconds: float = 0.0
    detail: str = ""

    @property
    def graded(self) -> bool:
        """Whether the verifier gave a number; NaN is a verifier fault, not a grade."""
        return self.reward is not None and math.isfinite(self.reward)

    @property
    def solved(self) -> bool:
        return self.graded and self.reward >= 1

    def without_turns(self) -> "AttemptRecord":
        return dataclasses.replace(self, turns=[])

    @classmethod
    def from_attempt(cls, attempt: Any, family: str, *, seed: int = 0) -> "AttemptRecord":
        """The record of an `agent.episode.Attempt` (read by attribute, so that evaluation needs no sandbox code).

        The turns that a recovery inherited from its failed attempt are not repeated: `attempt.turns` are its own.
        """
        outcome = attempt.outcome
        _, policy_mask_T, _, _ = attempt.transcript.arrays()
        return cls(
            id=attempt.id,
            task_id=attempt.task_id,
            family=family,
            turns=[
                TurnRecord(
                    thought=turn.thought or "",
                    command=turn.command,
                    output=turn.output or "",
                    exit_code=turn.exit_code,
                    duration=float(turn.duration or 0.0),
                    timed_out=bool(turn.timed_out),
                    error=turn.error,
                )
                for turn in attempt.turns
            ],
            reward=None if outcome is None or outcome.reward is None else float(outcome.reward),
            status="env_error" if outcome is None else outcome.status,
            ended=attempt.ended,
            version=attempt.version,
            parent=attempt.parent,
            depth=attempt.depth,
            seed=seed,
            tokens=int(policy_mask_T[attempt.prefix_len :].sum()),
            seconds=float(attempt.timings.get("total", sum(attempt.timings.values()))),
            detail="" if outcome is None else outcome.detail,
        )


@dataclasses.dataclass(frozen=True)
class EvalResult:
    """One policy's evaluation.

    Attributes:
        recoveries: from a fixed set of failure states; `parent` is the id of the state.
        own: recoveries from the states that the failed ones among `attempts` left; `parent` is the attempt's id.
    """

    name: str
    attempts: list[AttemptRecord]
    recoveries: list[AttemptRecord] = dataclasses.field(default_factory=list)
    own: list[AttemptRecord] = dataclasses.field(default_factory=list)

    @property
    def with_recovery(self) -> list[AttemptRecord]:
        """What an attempt and, where it failed, one recovery from the state that it left came to.

        A failed attempt from whose state no recovery could start (its tokens were used up) stays failed. Where several
        recoveries were made, the first counts.
        """
        second = {recovery.parent: recovery for recovery in reversed(self.own)}
        return [attempt if attempt.solved else second.get(attempt.id, attempt) for attempt in self.attempts]


@dataclasses.dataclass(frozen=True)
class ForkTree:
    """A failed attempt, what it left behind, and the recoveries that started from there."""

    task_id: str
    family: str
    instruction: str
    failed: AttemptRecord
    state_listing: str
    recoveries: list[AttemptRecord]


@dataclasses.dataclass(frozen=True)
class RunReport:
    """What `report.json` holds. `facts` are shown as they are; `phases` maps a phase to wall seconds."""

    title: str
    facts: dict[str, str]
    phases: dict[str, float]
    results: list[EvalResult]
    trees: list[ForkTree] = dataclasses.field(default_factory=list)

    def save(self, path: Path) -> None:
        """Writes `path` in one move. Verdicts of all attempts are kept, turns only those of the trees."""
        slim = [
            dataclasses.replace(
                result,
                attempts=[attempt.without_turns() for attempt in result.attempts],
                recoveries=[attempt.without_turns() for attempt in result.recoveries],
                own=[attempt.without_turns() for attempt in result.own],
            )
            for result in self.results
        ]
        write_text(path, json.dumps(encode(dataclasses.replace(self, results=slim)), allow_nan=False) + "\n")

    @classmethod
    def load(cls, path: Path) -> "RunReport":
        """Raises RecordError, naming file and field, where the file is not such a report."""
        return decode(cls, read_json(path), str(path))


@dataclasses.dataclass(frozen=True)
class CurvePoint:
    """One row of metrics.jsonl: the numbers logged at a step."""

    step: int
    values: dict[str, float]


def read_curves(path: Path) -> list[CurvePoint]:
    """Reads metrics.jsonl: one object a line, with `step` and numbers by key; anything not a number is skipped.

    A last line that a kill cut short is ignored; any other line that is not such an object raises RecordError.
    """
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    points = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise RecordError(f"{path}: line {number} is not JSON ({error.msg}); remove that line") from error
        if not isinstance(row, dict) or not _is_number(row.get("step")):
            raise RecordError(f"{path}: line {number} has no number in field 'step'")
        values = {key: float(value) for key, value in row.items() if key != "step" and _is_number(value)}
        points.append(CurvePoint(int(row["step"]), values))
    return points


def curve(points: Iterable[CurvePoint], key: str) -> dict[int, float]:
    """Step to value of one metric, finite values only; of a step that a resumed run logged again, the last counts."""
    values = {p.step: p.values[key] for p in points if key in p.values and math.isfinite(p.values[key])}
    return dict(sorted(values.items()))


def read_json(path: Path) -> Any:
    """Raises RecordError naming the file where it is not UTF-8 JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise RecordError(f"{path}: not UTF-8 at byte {error.start}") from error
    except json.JSONDecodeError as error:
        raise RecordError(f"{path}: not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from error


def write_text(path: Path, text: str) -> None:
    """Writes a file that is either the old one or the whole new one, also where the disk fills up half way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".part")
    try:
        # Terminal output may hold lone surrogates, which UTF-8 cannot carry.
        temporary.write_bytes(text.encode("utf-8", errors="replace"))
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def by_family(attempts: Iterable[AttemptRecord]) -> Mapping[str, list[AttemptRecord]]:
    """Attempts by family, families in alphabetical order."""
    groups: dict[str, list[AttemptRecord]] = {}
    for attempt in attempts:
        groups.setdefault(attempt.family, []).append(attempt)
    return dict(sorted(groups.items()))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
