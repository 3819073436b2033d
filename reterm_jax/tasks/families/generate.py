"""Writes tasks of all families to disk, in the Harbor format."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

from reterm_jax.tasks.families import files, programs, settings, storage, text
from reterm_jax.tasks.families.base import NONE, Blueprint, Family, Names
from reterm_jax.tasks.task import Task, TaskError

Split = Literal["train", "test"]

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        files.COPY,
        files.REMOVE,
        text.REPLACE,
        text.WRITE,
        storage.UNPACK,
        storage.RESTORE,
        settings.CONFIGURE,
        settings.COLUMN,
        programs.SCRIPT,
        programs.TOOL,
    )
}

_NONE_SHARE = 0.35
_TEST_ONE_IN = 5
_DRAWS = 2000

_TEST_SH = """\
#!/bin/bash
# Judges what the attempt has done to the files. PATH is set anew: the agent's own programs must not judge it.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
cd /app
verdict=0
if {check}; then
  verdict=1
fi
echo "$verdict" > /logs/verifier/reward.txt
"""


def generate(
    out_dir: str | os.PathLike[str],
    *,
    split: Split,
    per_family: int,
    seed: int,
    families: tuple[str, ...] = tuple(FAMILIES),
) -> list[Task]:
    """Writes `per_family` tasks of each family into `out_dir` and loads them, ordered by id.

    The same arguments give the same bytes. A hash of the instruction decides which split a task belongs to, so no
    instruction is in both, whatever the seeds. About 35 % of each family's tasks have no obstacle; the others have each
    obstacle equally often. Tasks that are there already are kept if they are the same.

    Raises:
      TaskError: `out_dir` holds a task of the same id that these arguments do not give.
      ValueError: an unknown split or family, or more tasks than the family has.
    """
    if split not in ("train", "test"):
        raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
    unknown = [name for name in families if name not in FAMILIES]
    if unknown:
        raise ValueError(f"unknown families {unknown}; known: {', '.join(FAMILIES)}")
    out = Path(out_dir)
    out.mkdir(parents=True, exist_ok=True)
    tasks = []
    for name in families:
        family = FAMILIES[name]
        # All are drawn before the first is written: too large a number must not leave half a set.
        for index, (names, obstacle) in enumerate(list(_instances(family, split, per_family, seed))):
            path = out / f"{name}-{split}-{index:04d}"
            _write(path, family, names, obstacle, split)
            tasks.append(Task.load(path))
    return sorted(tasks, key=lambda task: task.id)


def split_of(instruction: str) -> Split:
    """The split that a task with this instruction belongs to."""
    digest = hashlib.sha256(instruction.encode()).digest()
    return "test" if int.from_bytes(digest[:4], "big") % _TEST_ONE_IN == 0 else "train"


def _instances(family: Family, split: Split, count: int, seed: int) -> Iterator[tuple[dict[str, str], str]]:
    rng = random.Random(f"{seed}/{split}/{family.name}")
    others = [obstacle for obstacle in family.obstacles if obstacle != NONE]
    easy = round(count * _NONE_SHARE)
    offset = rng.randrange(len(others))
    obstacles = [NONE] * easy + [others[(offset + index) % len(others)] for index in range(count - easy)]
    rng.shuffle(obstacles)
    seen = set()
    for obstacle in obstacles:
        for _ in range(_DRAWS):
            names = family.draw(rng)
            key = (obstacle, *names.values())
            if key not in seen and split_of(family.build(names, obstacle).instruction) == split:
                break
        else:
            raise ValueError(f"family {family.name} has not {count} different {split} tasks; ask for fewer")
        seen.add(key)
        yield names, obstacle


def _write(path: Path, family: Family, names: Names, obstacle: str, split: Split) -> None:
    """Writes one task directory; it appears complete or not at all."""
    config = _task_toml(family, names, obstacle, split)
    if path.exists():
        present = path / "task.toml"
        if not present.is_file() or present.read_text(encoding="utf-8") != config:
            raise TaskError(path, None, "is another task than the one to be written", "give an empty directory")
        return
    partial = path.with_name(f".{path.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    plan = family.build(names, obstacle)
    contents: dict[str, bytes | str] = {
        "task.toml": config,
        "instruction.md": f"{plan.instruction}\n",
        "environment/Dockerfile": _dockerfile(plan),
        "tests/test.sh": _TEST_SH.format(check=" &&\n  ".join(plan.check)),
        "solution/solve.sh": "#!/bin/bash\ncd /app\n" + "".join(f"{action.command}\n" for action in plan.fix),
    }
    contents |= {f"environment/files/{name}": data for name, data in plan.files.items()}
    for directory in ("environment/files", *(f"environment/files/{name}" for name in plan.directories)):
        (partial / directory).mkdir(parents=True, exist_ok=True)
    for name, data in contents.items():
        file = partial / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data.encode() if isinstance(data, str) else data)
        if file.suffix == ".sh" and "environment" not in name:
            file.chmod(0o755)
    partial.rename(path)


def _dockerfile(plan: Blueprint) -> str:
    lines = ["FROM reterm-sandbox-base", "WORKDIR /app", "COPY files/ /app/"]
    return "\n".join(lines + [f"RUN {command}" for command in plan.setup]) + "\n"


def _task_toml(family: Family, names: Names, obstacle: str, split: Split) -> str:
    words = "\n".join(f"{key} = {json.dumps(value)}" for key, value in names.items())
    return f"""\
schema_version = "1.0"

[metadata]
family = "{family.name}"
domain = "{family.domain}"
obstacle = "{obstacle}"
split = "{split}"

[metadata.names]
{words}

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 30.0

[environment]
workdir = "/app"
network_mode = "no-network"

[environment.env]
LC_ALL = "C"
PATH = "/app/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
"""
