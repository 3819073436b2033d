"""A set of tasks: a directory of task directories, or a registry file; and which of them a process works on."""

from __future__ import annotations

import fnmatch
import json
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reterm_jax.tasks.config import TaskError
from reterm_jax.tasks.fetch import FetchError, checkout
from reterm_jax.tasks.task import Task, load_tasks


@dataclass(frozen=True)
class Selection:
    """Which tasks of a set, in which order.

    Attributes:
      include: patterns (`*`, `?`) of ids to keep; empty: all. A pattern that no task has is an error.
      exclude: patterns of ids to leave out.
      shuffle: the seed of a random order; None: the order of the set.
      limit: how many at most; None: all. Counted after the shuffle, before the shards.
      shard, shards: every `shards`-th task from the `shard`-th on, so that processes divide a set between them.
    """

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    shuffle: int | None = None
    limit: int | None = None
    shard: int = 0
    shards: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.shard < self.shards:
            raise ValueError(f"shard is {self.shard} of {self.shards}; it must be from 0 to {self.shards - 1}")
        if self.limit is not None and self.limit < 1:
            raise ValueError(f"limit is {self.limit}; it must be at least 1")

    def of(self, tasks: Sequence[Task], source: Path) -> list[Task]:
        """The chosen tasks; raises TaskError, naming `source`, where a pattern matches none or nothing is left."""
        for pattern in self.include:
            if not any(fnmatch.fnmatchcase(task.id, pattern) for task in tasks):
                raise TaskError(source, None, f"has no task {pattern}", "correct the id or the pattern")
        chosen = [
            task
            for task in tasks
            if (not self.include or any(fnmatch.fnmatchcase(task.id, pattern) for pattern in self.include))
            and not any(fnmatch.fnmatchcase(task.id, pattern) for pattern in self.exclude)
        ]
        if self.shuffle is not None:
            chosen = random.Random(f"tasks {self.shuffle}").sample(chosen, len(chosen))
        chosen = chosen[: self.limit][self.shard :: self.shards]
        if not chosen:
            raise TaskError(source, None, "no task is left after the selection", "widen it")
        return chosen


def load_dataset(source: str | os.PathLike[str], selection: Selection | None = None) -> list[Task]:
    """Loads a task set: one task's directory, a directory of them, or a registry file (JSON).

    A registry is a list of `{"name", "version", "tasks": [{"name", "path", "git_url", "git_commit_id"}]}`. Paths are
    relative to the file; with `git_url` (an address, or a path relative to the file) they are relative to that
    repository, which is fetched at its pinned commit and kept (see `fetch.py`). `FILE#NAME` or `FILE#NAME@VERSION`
    chooses one of several. Raises TaskError naming file, field and remedy.
    """
    text, _, name = os.fspath(source).partition("#")
    path = Path(text)
    if path.suffix == ".json":
        tasks = _of_registry(path, name)
    elif (path / "task.toml").exists():
        tasks = [Task.load(path)]
    else:
        tasks = load_tasks(path)
    return (selection or Selection()).of(tasks, path)


def _of_registry(file: Path, name: str) -> list[Task]:
    try:
        entries = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise TaskError(file, None, f"cannot be read ({error.strerror})", "give a registry file") from None
    except ValueError as error:
        raise TaskError(file, None, f"not valid JSON ({error})", "correct the syntax") from None
    if not isinstance(entries, list) or not all(
        isinstance(e, dict) and isinstance(e.get("name"), str) for e in entries
    ):
        raise TaskError(file, None, "not a list of datasets with names", "see the Harbor registry format")
    names = [f"{entry['name']}@{entry.get('version', '')}".rstrip("@") for entry in entries]
    found = [e for e, full in zip(entries, names, strict=True) if not name or name in (e["name"], full)]
    if len(found) != 1:
        problem = f"{len(found)} datasets match {name!r}" if name else f"it holds {len(found)} datasets"
        raise TaskError(file, "name", problem, f"give FILE#NAME, one of {', '.join(names)}")
    return sorted((_task(file, index, entry) for index, entry in enumerate(found[0].get("tasks", []))), key=_id)


def _task(file: Path, index: int, entry: Any) -> Task:
    field = f"tasks[{index}]"
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str):
        raise TaskError(file, f"{field}.path", "is missing", "each task needs its path")
    root = file.parent
    if entry.get("git_url"):
        url, commit = str(entry["git_url"]), str(entry.get("git_commit_id") or "")
        if ":" not in url and (root / url).is_dir():
            url = str((root / url).absolute())
        try:
            root = checkout(url, commit)
        except FetchError as error:
            problem = f"{url} at git_commit_id {commit!r} cannot be fetched: {error}"
            raise TaskError(file, f"{field}.git_url", problem, "correct both, or clone it") from None
        if not (root / entry["path"]).resolve().is_relative_to(root.resolve()):
            raise TaskError(file, f"{field}.path", f"{entry['path']!r} leaves the repository", "correct it")
    return Task.load(root / entry["path"])


def _id(task: Task) -> str:
    return task.id
