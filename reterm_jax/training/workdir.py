"""The directory of a run: who it belongs to, what is finished, and files that are either whole or absent."""

import contextlib
import dataclasses
import fcntl
import json
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any


class WorkdirError(RuntimeError):
    """A run directory that cannot be used; the message names file and field."""


@dataclasses.dataclass(frozen=True)
class Workdir:
    """Paths of one run. `config.json` names the config that it belongs to."""

    root: Path

    def write_json(self, name: str, value: Any) -> None:
        """Replaces a file in one move."""
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.tmp")
        temporary.write_text(json.dumps(value, indent=1, sort_keys=True), encoding="utf-8")
        os.replace(temporary, path)

    def read_json(self, name: str) -> Any | None:
        """The file's value, or None where there is no such file."""
        try:
            return json.loads((self.root / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except ValueError as error:
            raise WorkdirError(f"{self.root / name}: not JSON ({error}); remove it to have it made again") from error

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[bool]:
        """Yields whether the phase still has to run; marks it finished, with its wall seconds, when the body ends.

        Seconds add up over interruptions, so far as they were written.
        """
        marker = f"phases/{name}.json"
        if self.read_json(marker) is not None:
            yield False
            return
        start = time.monotonic()
        yield True
        self.write_json(marker, {"seconds": round(time.monotonic() - start, 1)})

    def phase_seconds(self) -> dict[str, float]:
        """Wall seconds of each finished phase, in the order in which they finished."""
        markers = sorted((self.root / "phases").glob("*.json"), key=lambda p: p.stat().st_mtime)
        return {p.stem: json.loads(p.read_text(encoding="utf-8"))["seconds"] for p in markers}


@contextlib.contextmanager
def open_workdir(root: str | os.PathLike[str], config: Mapping[str, Any]) -> Iterator[Workdir]:
    """Creates or reopens a run directory and holds it, so that no second process works in it.

    Args:
      config: plain nested mapping; must equal the one that the directory was made with.

    Raises:
      WorkdirError: the directory belongs to another config (names the first field that differs), holds something else,
        or is in use by another process.
    """
    path = Path(root).absolute()
    path.mkdir(parents=True, exist_ok=True)
    lock = open(path / ".lock", "w")  # noqa: SIM115  (held for the life of the run)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise WorkdirError(
                f"{path} is in use by another process; wait for it or choose another --workdir"
            ) from error
        workdir = Workdir(path)
        known = workdir.read_json("config.json")
        if known is None:
            strangers = [p.name for p in path.iterdir() if p.name != ".lock" and not p.name.startswith(".config.json")]
            if strangers:
                raise WorkdirError(
                    f"{path} is not empty and holds no config.json (found {strangers[0]}); choose another --workdir"
                )
            workdir.write_json("config.json", config)
        else:
            difference = first_difference(known, json.loads(json.dumps(config)), "config")
            if difference:
                raise WorkdirError(
                    f"{path}/config.json belongs to another run: {difference}. "
                    "Choose another --workdir, or give the flags that it was started with"
                )
        yield workdir
    finally:
        lock.close()


def find_policy(root: str | os.PathLike[str], stage: str) -> tuple[Path, Path]:
    """Where the policy of a run's stage (base, sft or rl) is: the model's directory, and that of its checkpoints.

    The result of RL is its best checkpoint where one was kept by validation, else the last one. What a run took over
    from another is found there.

    Raises:
      WorkdirError: there is no run in `root`, or it has no checkpoint of that stage.
    """
    work = Workdir(Path(root))
    config = work.read_json("config.json")
    if config is None:
        raise WorkdirError(f"{root} is not a run's directory: it holds no config.json")
    origin = Path(config.get("start_from") or work.root)
    directory = (work.root if stage == "rl" else origin) / stage
    checkpoints = next((path for path in (directory / "best", directory / "checkpoints") if path.exists()), None)
    if checkpoints is None:
        raise WorkdirError(f"{root} has no checkpoint of stage {stage} yet")
    return Path(config["model"]["path"] or origin / "model"), checkpoints


def first_difference(old: Any, new: Any, where: str) -> str | None:
    """Where two JSON values differ first, in words; None where they do not."""
    if isinstance(old, dict) and isinstance(new, dict):
        for key in sorted(old.keys() | new.keys()):
            if key not in old:
                return f"{where}.{key} is new"
            if key not in new:
                return f"{where}.{key} is gone"
            difference = first_difference(old[key], new[key], f"{where}.{key}")
            if difference:
                return difference
        return None
    return None if old == new else f"{where} was {old!r}, now {new!r}"
