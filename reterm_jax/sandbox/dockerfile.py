"""The part of the Dockerfile language that needs no Docker: FROM the base image, WORKDIR, ENV, COPY, RUN."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from reterm_jax.sandbox.base import BASE_IMAGE, SandboxError

_VARIABLE = re.compile(r"\\\$|\$(?:(\w+)|\{(\w+)\})")


@dataclass(frozen=True)
class Instruction:
    """One instruction: `name` in capitals, its text with continuation lines joined, and the line where it begins."""

    name: str
    text: str
    line: int


def parse(path: Path, task_id: str) -> list[Instruction]:
    """Reads a Dockerfile. Raises SandboxError, naming task, file and line, for what only Docker can build."""
    instructions: list[Instruction] = []
    pending, start = "", 0
    for number, raw in enumerate(path.read_text().splitlines(), start=1):
        if raw.lstrip().startswith("#") or (not raw.strip() and pending):
            continue  # also between the lines of one instruction, as Docker does
        start = number if not pending else start
        if raw.rstrip().endswith("\\"):
            pending += raw.rstrip()[:-1]
            continue
        line, pending = (pending + raw).strip(), ""
        if line:
            name, _, text = line.partition(" ")
            instructions.append(Instruction(name.upper(), text.strip(), start))
    if pending.strip():
        name, _, text = pending.strip().partition(" ")
        instructions.append(Instruction(name.upper(), text.strip(), start))
    _check(instructions, path, task_id)
    return instructions


def needs_docker(task_id: str, path: Path, line: int, what: str) -> SandboxError:
    return SandboxError(
        f"task {task_id}: {path}:{line}: {what} needs Docker: set config.sandbox.kind=docker "
        f"(bubblewrap builds FROM {BASE_IMAGE}, WORKDIR, ENV, COPY and RUN)"
    )


def _check(instructions: list[Instruction], path: Path, task_id: str) -> None:
    if not instructions or instructions[0].name != "FROM":
        raise SandboxError(f"task {task_id}: {path}: the first instruction must be FROM")
    for index, instruction in enumerate(instructions):
        name, text, line = instruction.name, instruction.text, instruction.line
        if name not in ("FROM", "WORKDIR", "ENV", "COPY", "RUN"):
            raise needs_docker(task_id, path, line, name)
        if not text:
            raise SandboxError(f"task {task_id}: {path}:{line}: {name} without an argument")
        if name == "FROM" and (index > 0 or text.split(":")[0] != BASE_IMAGE or len(text.split()) > 1):
            raise needs_docker(task_id, path, line, f"FROM {text}")
        if name in ("COPY", "RUN") and text.startswith("--"):
            raise needs_docker(task_id, path, line, f"{name} {text.split()[0]}")
        if name in ("COPY", "RUN") and re.match(r"<<-?[\"']?\w", text):
            raise needs_docker(task_id, path, line, f"{name} with a here-document")
    ignore = path.with_name(".dockerignore")
    if ignore.exists() and any(i.name == "COPY" for i in instructions):
        raise SandboxError(f"task {task_id}: {ignore} needs Docker: set config.sandbox.kind=docker")


def substitute(text: str, env: Mapping[str, str]) -> str:
    """Replaces $NAME and ${NAME}; unset names become empty, as in Docker."""
    return _VARIABLE.sub(lambda m: "$" if m[0] == "\\$" else env.get(m[1] or m[2], ""), text)


def env_pairs(text: str, env: Mapping[str, str]) -> dict[str, str]:
    """The variables of an ENV instruction, in both its forms. Raises ValueError if it is malformed."""
    name, _, value = text.partition(" ")
    if "=" not in name:
        return {name: substitute(value.strip(), env)}
    pairs = {}
    for word in shlex.split(substitute(text, env)):
        name, equals, value = word.partition("=")
        if not equals:
            raise ValueError(f"ENV: {word!r} is not NAME=VALUE")
        pairs[name] = value
    return pairs


def words(text: str) -> list[str]:
    """The arguments of an instruction: a JSON list, or words. Raises ValueError if it is malformed."""
    if text.startswith("["):
        try:
            parsed = json.loads(text)
        except json.JSONDecodeError:
            return shlex.split(text)
        if isinstance(parsed, list) and all(isinstance(word, str) for word in parsed):
            return parsed
    return shlex.split(text)


def run_command(text: str) -> str:
    """The shell command that a RUN instruction stands for: through /bin/sh, or directly for a JSON list."""
    if text.startswith("["):
        try:
            argv = json.loads(text)
        except json.JSONDecodeError:
            argv = None
        if isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv):
            return "exec " + shlex.join(argv)
    return "exec /bin/sh -c " + shlex.quote(text)


def copy_sources(context: Path, patterns: list[str], target: str) -> list[tuple[Path, str]]:
    """What a COPY brings: pairs of (source below `context`, path or directory inside, ending in "/" if a directory).

    Raises ValueError if a source is missing or outside the context, or several sources have one file as target.
    """
    sources: list[Path] = []
    for pattern in patterns:
        relative = pattern.lstrip("/") or "."
        found = sorted(context.glob(relative)) if any(c in relative for c in "*?[") else [context / relative]
        sources += found
        if not found or not found[0].exists():
            raise ValueError(f"COPY: {pattern} does not exist in {context}")
    for source in sources:
        if not source.resolve().is_relative_to(context.resolve()):
            raise ValueError(f"COPY: {source} is outside {context}")
    if len(sources) > 1 and not target.endswith("/"):
        raise ValueError(f"COPY: with several sources the target {target!r} must end with '/'")
    return [(source, target) for source in sources]
