"""Task sets: where they come from and which of them are chosen."""

from __future__ import annotations

import json
import subprocess

import pytest

from reterm_jax.tasks.dataset import Selection, load_dataset
from reterm_jax.tasks.task import TaskError


@pytest.fixture
def tasks(make_task, tmp_path):
    for name in ("a1", "a2", "b1", "b2", "b3"):
        make_task(f"set/{name}")
    return tmp_path / "set"


def ids(source, **selection) -> list[str]:
    return [task.id for task in load_dataset(source, Selection(**selection))]


def test_selection(tasks):
    assert ids(tasks) == ["a1", "a2", "b1", "b2", "b3"] and ids(tasks / "b2") == ["b2"]
    assert ids(tasks, include=("a*", "b3"), exclude=("?1",)) == ["a2", "b3"]
    shuffled = ids(tasks, shuffle=1)
    assert sorted(shuffled) == ids(tasks) and shuffled == ids(tasks, shuffle=1)
    assert len({tuple(ids(tasks, shuffle=seed)) for seed in range(9)}) > 3
    assert ids(tasks, shuffle=1, limit=3) == shuffled[:3]
    shards = [ids(tasks, shuffle=1, shard=index, shards=2) for index in range(2)]
    assert sorted(shards[0] + shards[1]) == ids(tasks) and len(shards[0]) == 3


def test_selections_that_cannot_work(tasks):
    with pytest.raises(TaskError, match="has no task c"):
        ids(tasks, include=("c*",))
    with pytest.raises(TaskError, match="no task is left"):
        ids(tasks, exclude=("*",))
    with pytest.raises(ValueError, match="shard is 2 of 2"):
        Selection(shard=2, shards=2)
    with pytest.raises(ValueError, match="limit"):
        Selection(limit=0)


def test_registry(tasks):
    file = tasks / "registry.json"
    one = {"name": "one", "version": "1.0", "tasks": [{"name": "b", "path": "b1"}, {"name": "a", "path": "a1"}]}
    file.write_text(json.dumps([one]))
    assert ids(file) == ids(f"{file}#one") == ids(f"{file}#one@1.0") == ["a1", "b1"]
    file.write_text(json.dumps([one, one | {"version": "2.0", "tasks": [{"path": "b3"}]}]))
    assert ids(f"{file}#one@2.0") == ["b3"]
    for source, problem in ((f"{file}#one", "2 datasets match 'one'.*one@1.0, one@2.0"), (f"{file}#x", "0 datasets")):
        with pytest.raises(TaskError, match=problem):
            ids(source)
    for bad, problem in (
        ([one | {"tasks": [{}]}], r"tasks\[0\].path"),
        ({}, "not a list"),
    ):
        file.write_text(json.dumps(bad))
        with pytest.raises(TaskError, match=problem):
            ids(file)


@pytest.fixture
def repository(tasks, monkeypatch, tmp_path):
    """A repository of the tasks with two commits, of which the second has another instruction; gives both ids."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def git(*arguments: str) -> str:
        command = ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments]
        return subprocess.run(command, cwd=tasks, check=True, capture_output=True, text=True).stdout.strip()

    def commit(text: str) -> str:
        (tasks / "a1" / "instruction.md").write_text(text)
        git("add", ".")
        git("commit", "--quiet", "-m", text)
        return git("rev-parse", "HEAD")

    git("init", "--quiet")
    return commit("first"), commit("second")


def registry(tmp_path, **entry):
    file = tmp_path / "registry.json"
    file.write_text(json.dumps([{"name": "one", "tasks": [{"path": "a1", "git_url": "set"} | entry]}]))
    return file


def test_tasks_of_a_repository_are_those_of_the_pinned_commit(tasks, repository, tmp_path):
    first, second = repository
    for commit, text in ((first, "first"), (first[:10], "first"), (second, "second")):
        (task,) = load_dataset(registry(tmp_path, git_commit_id=commit))
        assert (task.id, task.instruction) == ("a1", text)
    (task,) = load_dataset(registry(tmp_path, git_commit_id=first, git_url=f"file://{tasks}"))
    assert task.instruction == "first"
    (tasks / ".git").rename(tmp_path / "gone")
    (task,) = load_dataset(registry(tmp_path, git_commit_id=first))
    assert task.instruction == "first", "what was fetched once is kept"
    assert not list((tmp_path / "cache" / "reterm" / "tasks").glob(".*"))


def test_repositories_that_cannot_be_fetched(repository, tmp_path):
    first, _ = repository
    for entry, problem in (
        ({"git_commit_id": "main"}, r"tasks\[0\].git_url.*'main' is no commit"),
        ({}, r"tasks\[0\].git_url.*is no commit"),
        ({"git_commit_id": "0" * 40}, r"tasks\[0\].git_url.*000 cannot be fetched|git_commit_id '0+' cannot"),
        ({"git_commit_id": first, "git_url": "nowhere"}, "nowhere at git_commit_id"),
        ({"git_commit_id": first, "git_url": "--upload-pack=x"}, "is no address"),
        ({"git_commit_id": first, "path": "../../x"}, r"tasks\[0\].path.*leaves the repository"),
    ):
        with pytest.raises(TaskError, match=problem):
            load_dataset(registry(tmp_path, **entry))
    assert not list((tmp_path / "cache" / "reterm" / "tasks").glob(".*")), "nothing is left of what failed"
