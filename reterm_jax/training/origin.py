"""A finished run whose model, SFT and their evaluation another run takes over: `config.start_from`."""

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reterm_jax.evaluation.records import EvalResult, RunReport
from reterm_jax.training.settings import UNTRAINED
from reterm_jax.training.workdir import Workdir, WorkdirError, first_difference

# What two runs may differ in and still share what comes before RL.
_OWN = ("rl", "rollout", "start_from")


@dataclasses.dataclass(frozen=True)
class Origin:
    """
    Attributes:
      root: the run's workdir; it is only read.
      fingerprint: that its checkpoints were written with.
      results: of its policies up to SFT, on the same held-out tasks and failure states.
    """

    root: Path
    fingerprint: str
    results: list[EvalResult]


def open_origin(path: str | os.PathLike[str], config: Mapping[str, Any]) -> Origin:
    """
    Args:
      config: of the run that takes over; all but its `rl` and `rollout` must be as in that run.

    Raises:
      WorkdirError: there is no such run, it has not finished, it took over itself, or its config differs.
    """
    work = Workdir(Path(path).absolute())
    theirs = work.read_json("config.json")
    if theirs is None:
        raise WorkdirError(f"config.start_from: {path} is not a run's directory: it holds no config.json")
    if theirs.get("start_from"):
        raise WorkdirError(f"config.start_from: {path} took its SFT over from {theirs['start_from']}; give that one")
    shared = [{key: value for key, value in each.items() if key not in _OWN} for each in (theirs, config)]
    difference = first_difference(shared[0], json.loads(json.dumps(shared[1])), "config")
    if difference:
        raise WorkdirError(
            f"config.start_from: the run in {path} has another config: {difference}. Where SFT and its evaluation are "
            "shared, only config.rl and config.rollout may differ"
        )
    report = work.root / "report.json"
    if work.read_json("phases/sft.json") is None or not report.exists():
        raise WorkdirError(f"config.start_from: the run in {path} has not finished; start it again, and wait for it")
    results = [result for result in RunReport.load(report).results if result.name in UNTRAINED]
    return Origin(work.root, fingerprint(theirs), results)


def fingerprint(config: Mapping[str, Any]) -> str:
    """Of a run's config; its checkpoints carry it."""
    return hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest()[:16]
