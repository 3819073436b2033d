"""A task: one Harbor task directory, checked when it is loaded."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from reterm_jax.sandbox.base import COMPOSE_FILES
from reterm_jax.tasks.config import (
    AgentConfig,
    EnvironmentConfig,
    Phase,
    SolutionConfig,
    TaskConfig,
    TaskError,
    VerifierConfig,
)

__all__ = [
    "AgentConfig",
    "EnvironmentConfig",
    "SolutionConfig",
    "Task",
    "TaskConfig",
    "TaskError",
    "VerifierConfig",
    "load_tasks",
]


@dataclass(frozen=True)
class Task:
    """An instruction, an environment to work in, and a verifier.

    Attributes:
      id: the directory's name.
      path: the task directory (absolute).
      instruction: what the agent is told.
      config: the parsed `task.toml`.
      content_hash: names the environment: tasks with the same hash can share one built image.
    """

    id: str
    path: Path
    instruction: str
    config: TaskConfig
    content_hash: str

    @property
    def metadata(self) -> Mapping[str, Any]:
        return self.config.metadata

    @property
    def environment_dir(self) -> Path:
        return self.path / "environment"

    @property
    def tests_dir(self) -> Path:
        return self.path / "tests"

    @property
    def solution(self) -> Path | None:
        """The reference solution, where the task has one. Never for the agent's eyes."""
        script = self.path / "solution" / "solve.sh"
        return script if script.is_file() else None

    def fingerprint(self) -> str:
        """Hash of the whole directory: what verdicts on the task depend on."""
        digest = hashlib.sha256()
        _hash_tree(digest, self.path)
        return digest.hexdigest()

    @classmethod
    def load(cls, directory: str | os.PathLike[str]) -> Task:
        """Reads and checks one task directory; raises TaskError naming file, field and remedy."""
        path = Path(directory).absolute()
        if not path.is_dir():
            raise TaskError(path, None, "not a directory", "give the path of a Harbor task directory")
        config = TaskConfig.load(path / "task.toml")
        if (path / "steps").is_dir():
            raise TaskError(
                path / "steps", None, "multi-step tasks are not supported", "split it into one task per step"
            )
        instruction = _instruction(path / "instruction.md")
        if not (path / "tests" / "test.sh").is_file():
            raise TaskError(path / "tests" / "test.sh", None, "missing", "a task needs a verifier script of this name")
        described = any((path / "environment" / name).is_file() for name in ("Dockerfile", *COMPOSE_FILES))
        if config.environment.docker_image is None and not described:
            raise TaskError(
                path / "environment" / "Dockerfile",
                None,
                "missing",
                f"add it, or one of {', '.join(COMPOSE_FILES)}, or set environment.docker_image in task.toml",
            )
        return cls(
            id=path.name,
            path=path,
            instruction=instruction,
            config=config,
            content_hash=_content_hash(path / "environment", config),
        )


def load_tasks(directory: str | os.PathLike[str]) -> list[Task]:
    """Loads every task directory in `directory`, sorted by id; raises TaskError at the first bad one."""
    root = Path(directory)
    if not root.is_dir():
        raise TaskError(root, None, "not a directory", "give a directory that holds task directories")
    paths = sorted(path for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))
    if not paths:
        raise TaskError(root, None, "holds no task", "generate tasks into it or give another directory")
    return [Task.load(path) for path in paths]


def _instruction(file: Path) -> str:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except FileNotFoundError:
        raise TaskError(file, None, "missing", "a task needs an instruction") from None
    except UnicodeDecodeError:
        raise TaskError(file, None, "not UTF-8", "save it as UTF-8") from None
    if not text:
        raise TaskError(file, None, "empty", "write what the agent is to do")
    return text


def _content_hash(directory: Path, config: TaskConfig) -> str:
    """Hash of all that makes the environment: paths, kinds, permission bits, contents, the environment config, and the
    networks of agent and verifier."""
    digest = hashlib.sha256()
    environment = config.environment
    fields = {
        item.name: dict(value) if isinstance(value := getattr(environment, item.name), Mapping) else value
        for item in dataclasses.fields(environment)
    }
    fields |= {"networks": [config.network(phase) for phase in get_args(Phase)]}
    digest.update(json.dumps(fields, sort_keys=True, default=repr).encode())
    _hash_tree(digest, directory)
    return digest.hexdigest()


def _hash_tree(digest: hashlib._Hash, directory: Path) -> None:
    for path in sorted(directory.rglob("*")):
        status = path.lstat()
        # Directories count: COPY keeps empty ones. Permission bits count: COPY keeps them too.
        entry = f"\0{path.relative_to(directory).as_posix()}\0{status.st_mode:o}\0".encode()
        digest.update(entry)
        if stat.S_ISLNK(status.st_mode):
            digest.update(os.fsencode(os.readlink(path)))
        elif stat.S_ISREG(status.st_mode):
            digest.update(hashlib.sha256(path.read_bytes()).digest())
