from __future__ import annotations

import dataclasses
import re
import time
from collections import Counter

import pytest

from reterm_jax.tasks import families
from reterm_jax.tasks.families import FAMILIES, NONE
from reterm_jax.tasks.task import TaskError, load_tasks


def contents(directory):
    return {
        path.relative_to(directory).as_posix(): path.read_bytes() for path in directory.rglob("*") if path.is_file()
    }


def test_there_are_nine_domains():
    assert len({family.domain for family in FAMILIES.values()}) == 9
    assert all(family.obstacles[0] == NONE and len(family.obstacles) >= 3 for family in FAMILIES.values())


def test_splits_share_no_instruction(tmp_path):
    start = time.process_time()
    train = families.generate(tmp_path / "train", split="train", per_family=100, seed=0)
    assert time.process_time() - start < 15  # about 1.5 s where nothing else runs
    test = families.generate(tmp_path / "test", split="test", per_family=40, seed=1)
    assert not {task.instruction for task in train} & {task.instruction for task in test}
    for tasks, count in ((train, 100), (test, 40)):
        assert Counter(task.metadata["family"] for task in tasks) == dict.fromkeys(FAMILIES, count)
        assert len({str(task.metadata["names"]) + task.metadata["obstacle"] for task in tasks}) == len(tasks)
    shares = Counter((task.metadata["family"], task.metadata["obstacle"]) for task in train)
    for family in FAMILIES.values():
        assert shares[family.name, NONE] == 35
        rest = [shares[family.name, obstacle] for obstacle in family.obstacles[1:]]
        assert sum(rest) == 65 and max(rest) - min(rest) <= 1


def test_same_arguments_give_the_same_bytes(tmp_path):
    for name, seed in (("a", 5), ("b", 5), ("c", 6)):
        families.generate(tmp_path / name, split="train", per_family=4, seed=seed)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") != contents(tmp_path / "c")


def test_a_second_run_keeps_what_is_there(tmp_path):
    arguments = {"split": "train", "per_family": 2, "families": ("copy", "tool")}
    first = families.generate(tmp_path, seed=0, **arguments)
    # As a killed run would leave it: a task half written, others missing.
    (tmp_path / ".copy-train-0000.partial").mkdir()
    first[0].path.rename(tmp_path.parent / "moved")
    times = {task.id: task.path.stat().st_mtime_ns for task in first[1:]}
    second = families.generate(tmp_path, seed=0, **arguments)
    assert [task.content_hash for task in second] == [task.content_hash for task in first]
    assert {task.id: task.path.stat().st_mtime_ns for task in second[1:]} == times
    assert load_tasks(tmp_path) == second
    with pytest.raises(TaskError, match="another task"):
        families.generate(tmp_path, seed=1, **arguments)


def test_bad_arguments(tmp_path, monkeypatch):
    for bad in ({"split": "dev"}, {"families": ("copy", "cook")}):
        with pytest.raises(ValueError, match="dev|cook"):
            families.generate(tmp_path, **({"split": "test", "per_family": 1, "seed": 0} | bad))
    words = {"file": "memo", "other": "menu", "dir": "attic", "ext": "md", "text": "blue"}
    monkeypatch.setitem(FAMILIES, "copy", dataclasses.replace(FAMILIES["copy"], draw=lambda rng: words))
    with pytest.raises(ValueError, match="family copy has not 9 different train tasks"):
        families.generate(tmp_path, split="train", per_family=9, seed=0, families=("copy",))
    assert not list(tmp_path.iterdir())


def test_instructions_hide_the_obstacle_and_are_plain(tmp_path):
    for family in FAMILIES.values():
        tasks = families.generate(tmp_path, split="train", per_family=40, seed=2, families=(family.name,))
        for task in tasks:
            assert len(task.instruction.split()) <= 12 and task.instruction == task.instruction.lower()
            wordings = {family.build(task.metadata["names"], obstacle).instruction for obstacle in family.obstacles}
            assert wordings == {task.instruction}
            seen_by_agent = (task.path / "environment/Dockerfile").read_text()
            assert re.match(r"FROM reterm-sandbox-base\nWORKDIR /app\nCOPY files/ /app/\n", seen_by_agent)
