"""Import of finished Harbor trials: TASK__ID/ with result.json, agent/trajectory.json, verifier/reward.txt or .json."""

import json
import math
import re
from datetime import datetime
from pathlib import Path
from typing import Any

from reterm_jax.evaluation.json_codec import RecordError
from reterm_jax.evaluation.records import AttemptRecord, EvalResult, TurnRecord, read_json

_EXIT_CODE = re.compile(r"\s*\(exit_code=(-?\d+)\)\s*$")


class HarborError(ValueError):
    """A trial's file is malformed; the message names it."""


class NoTrialsError(HarborError):
    """A directory holds no trials."""


def is_trial(path: Path) -> bool:
    """Whether a directory holds one trial. A job's own result.json has no `trial_name`, so the agent's log decides."""
    return any((path / name).exists() for name in ("agent", "verifier", "exception.txt"))


def is_trials_dir(path: Path) -> bool:
    return path.is_dir() and any(is_trial(child) for child in _directories(path))


def job_directories(path: Path) -> list[Path]:
    """The directory itself where it holds trials, else those below it (one a model) that do.

    Raises:
        NoTrialsError: there are none.
    """
    if is_trials_dir(path):
        return [path]
    jobs = [child for child in _directories(path) if is_trials_dir(child)] if path.is_dir() else []
    if not jobs:
        raise NoTrialsError(f"{path}: no Harbor trials; expected TASK__ID/result.json or MODEL/TASK__ID/result.json")
    return jobs


def load_jobs(path: Path) -> list[EvalResult]:
    """Reads a directory of trials, or a directory of such directories, as one result each.

    Raises:
        NoTrialsError: there are no trials.
        HarborError: a file is malformed.
    """
    return [EvalResult(job.resolve().name, load_trials(job)) for job in job_directories(path)]


def load_trials(path: Path) -> list[AttemptRecord]:
    """All trials of a directory, by name."""
    return [load_trial(child) for child in _directories(path) if is_trial(child)]


def load_trial(path: Path) -> AttemptRecord:
    """Reads one trial.

    A reward that is missing, empty, not a number or NaN makes the attempt ungraded (`verifier_error`, or `env_error`
    where an exception kept the verifier from running), never a 0.

    Raises:
        HarborError: result.json is missing, or a JSON file is malformed; the message names file and field.
    """
    result_path = path / "result.json"
    result = _read(result_path)
    if not isinstance(result, dict):
        raise HarborError(f"{result_path}: expected an object, found {type(result).__name__}")
    task = _field(result, "task_name", str, result_path)
    exception = _exception(path, result, result_path)
    reward, detail = _reward(path, result, result_path)
    trajectory = path / "agent" / "trajectory.json"
    turns, submitted = _turns(_read(trajectory), trajectory) if trajectory.exists() else ([], False)
    tokens = _optional(_optional(result, "agent_result", dict, result_path), "n_output_tokens", int, result_path)
    return AttemptRecord(
        id=path.name,
        task_id=task,
        family=task,
        turns=turns,
        reward=reward,
        status=_status(reward, exception),
        ended=_ended(exception, submitted),
        tokens=tokens or 0,
        seconds=_seconds(_optional(result, "agent_execution", dict, result_path), result_path),
        detail="; ".join(filter(None, [exception, detail])),
    )


def instructions(path: Path) -> dict[str, str]:
    """Task to its instruction, the first user message of a trial whose agent started."""
    found: dict[str, str] = {}
    for trial in filter(is_trial, _directories(path)):
        trajectory = trial / "agent" / "trajectory.json"
        task = _field(_read(trial / "result.json"), "task_name", str, trial / "result.json")
        if task not in found and trajectory.exists():
            messages = _messages(_read(trajectory), trajectory)
            found[task] = next((_text(message) for message in messages if message["role"] == "user"), "")
    return found


def _status(reward: float | None, exception: str) -> str:
    if reward is None:
        return "env_error" if exception and "Timeout" not in exception else "verifier_error"
    if reward >= 1:
        return "solved"
    if "AgentTimeout" in exception:
        return "timeout"
    return "overflow" if "ContextLength" in exception else "failed"


def _ended(exception: str, submitted: bool) -> str:
    if "AgentTimeout" in exception:
        return "time_limit"
    if "ContextLength" in exception:
        return "overflow"
    return "env_error" if exception else "submit" if submitted else "stop without submit"


def _exception(path: Path, result: dict[str, Any], result_path: Path) -> str:
    info = _optional(result, "exception_info", dict, result_path)
    if info:
        return f"{info.get('exception_type', 'Exception')}: {info.get('exception_message', '')}".rstrip(": ")
    written = path / "exception.txt"
    lines = written.read_text(encoding="utf-8", errors="replace").strip().splitlines() if written.exists() else []
    return lines[-1] if lines else ""


def _reward(path: Path, result: dict[str, Any], result_path: Path) -> tuple[float | None, str]:
    """The verifier's own file, reward.json before reward.txt; without either, what result.json recorded."""
    as_json, as_text = path / "verifier" / "reward.json", path / "verifier" / "reward.txt"
    if as_json.exists():
        source, value = as_json, _read(as_json)
    elif as_text.exists():
        source, value = as_text, as_text.read_text(encoding="utf-8", errors="replace").strip()
    else:
        verdict = _optional(result, "verifier_result", dict, result_path)
        source, value = result_path, _optional(verdict, "rewards", dict, result_path)
    if isinstance(value, dict):
        value = value.get("reward", next(iter(value.values()), None))
    try:
        reward = float(value)
    except (TypeError, ValueError):
        reward = math.nan
    if not math.isfinite(reward):
        return None, f"{source.name} holds no number: {str(value)[:40]!r}"
    return reward, ""


def _turns(trajectory: Any, path: Path) -> tuple[list[TurnRecord], bool]:
    """Pairs each assistant message with what answered it; says too whether the last command was the submit."""
    turns: list[TurnRecord] = []
    answered: dict[str, int] = {}
    for number, message in enumerate(_messages(trajectory, path)):
        where = f"{path}: message {number}"
        if message["role"] == "assistant":
            calls = message.get("tool_calls") or []
            if not isinstance(calls, list):
                raise HarborError(f"{where}: tool_calls is not a list")
            thought = _thought(message)
            for call in calls or [None]:
                command, error = (None, "no tool call") if call is None else _command(call, where)
                if isinstance(call, dict) and isinstance(call.get("id"), str):
                    answered[call["id"]] = len(turns)
                turns.append(TurnRecord(thought, command, "", None, error=error))
                thought = ""
        elif message["role"] == "tool" or (message["role"] == "user" and turns):
            index = answered.get(message.get("tool_call_id"), len(turns) - 1)
            if index < 0:
                raise HarborError(f"{where}: a tool result stands before any tool call")
            turns[index] = _with_output(turns[index], _text(message))
    return turns, bool(turns) and "COMPLETE_TASK_AND_SUBMIT" in (turns[-1].command or "")


def _with_output(turn: TurnRecord, text: str) -> TurnRecord:
    found = _EXIT_CODE.search(text)
    output = text[: found.start()] if found else text
    return TurnRecord(
        turn.thought,
        turn.command,
        f"{turn.output}\n{output}" if turn.output else output,
        int(found.group(1)) if found else turn.exit_code,
        error=turn.error,
    )


def _command(call: Any, where: str) -> tuple[str, str | None]:
    """A bash call's command; another tool, or arguments that are not JSON, are shown as the model wrote them."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        raise HarborError(f"{where}: a tool call has no 'function' object")
    name, arguments = function.get("name"), function.get("arguments")
    try:
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError:
        return str(arguments), "arguments are not JSON"
    if name == "bash" and isinstance(parsed, dict) and isinstance(parsed.get("command"), str):
        return parsed["command"], None
    return f"{name}({arguments})", None if name == "bash" else f"tool {name!r}"


def _thought(message: dict[str, Any]) -> str:
    """Reasoning and text as one; a closing tag without an opening one ends reasoning that the prompt opened."""
    reasoning = message.get("reasoning_content")
    parts = [reasoning if isinstance(reasoning, str) else "", _text(message)]
    return "\n".join(re.sub(r"</?think>", "", part).strip() for part in parts if part).strip()


def _text(message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def _messages(trajectory: Any, path: Path) -> list[dict[str, Any]]:
    if not isinstance(trajectory, list):
        raise HarborError(f"{path}: expected a list of chat messages, found {type(trajectory).__name__}")
    for number, message in enumerate(trajectory):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise HarborError(f"{path}: message {number} has no field 'role'")
    return trajectory


def _seconds(timing: dict[str, Any], path: Path) -> float:
    if not timing.get("started_at") or not timing.get("finished_at"):
        return 0.0
    try:
        started, finished = (datetime.fromisoformat(timing[key]) for key in ("started_at", "finished_at"))
        return (finished - started).total_seconds()
    except (TypeError, ValueError) as error:
        raise HarborError(f"{path}: agent_execution holds no times: {error}") from error


def _directories(path: Path) -> list[Path]:
    return sorted(child for child in path.iterdir() if child.is_dir())


def _read(path: Path) -> Any:
    try:
        return read_json(path)
    except RecordError as error:
        raise HarborError(str(error)) from error
    except OSError as error:
        raise HarborError(f"{path}: cannot be read: {error.strerror}; a trial needs this file") from error


def _field(row: dict[str, Any], name: str, kind: type, path: Path) -> Any:
    value = row.get(name)
    if not isinstance(value, kind):
        raise HarborError(f"{path}: field {name!r} must be {kind.__name__}, found {type(value).__name__}")
    return value


def _optional(row: dict[str, Any], name: str, kind: type, path: Path) -> Any:
    """The field, or an empty value of its kind where it is absent or null."""
    return kind() if row.get(name) is None else _field(row, name, kind, path)
