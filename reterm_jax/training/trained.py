"""`reterm-evaluate --policy`: a trained policy on a task set, with the sandboxes, limits and sizes of a config."""

import asyncio
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ml_collections import ConfigDict

from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.evaluation.console import pass_at_k_table
from reterm_jax.policy.spec import abstract_params
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.samplers.jax import JaxSampler
from reterm_jax.tasks.task import Task
from reterm_jax.training import judging
from reterm_jax.training.model import Model, load_model
from reterm_jax.training.pipeline import run_host, run_tasks
from reterm_jax.training.settings import read_settings
from reterm_jax.training.state import abstract_arrays
from reterm_jax.training.workdir import WorkdirError, find_policy, open_workdir


@dataclasses.dataclass(frozen=True)
class Policy:
    """
    Attributes:
      name: in tables.
      model: a Hugging Face directory; its weights are the policy's if there are no `checkpoints`.
      checkpoints: of a training stage.
      step: which of them; the last if None.
    """

    name: str
    model: Path
    checkpoints: Path | None = None
    step: int | None = None

    def params(self, model: Model) -> Any:
        """The weights, on the model's mesh."""
        if self.checkpoints is None:
            return model.initial_params(0, pretrained=True)
        abstract = abstract_arrays(abstract_params(model.config), model.shardings)
        with Checkpointer(self.checkpoints) as checkpointer:
            return checkpointer.restore_params(abstract, self.step)


def find(path: Path, stage: str) -> Policy:
    """
    Args:
      path: a Hugging Face directory, a run's workdir, the `checkpoints` (or `best`) of one of its stages, or one of
        those.
      stage: of a workdir.

    Raises:
      WorkdirError: it is none of these, or has no checkpoint.
    """
    path = path.absolute()
    record = path / "config.json"
    if record.exists():
        if "model_type" in json.loads(record.read_text(encoding="utf-8")):
            return Policy(path.name, path)
        model, checkpoints = find_policy(path, stage)
        return Policy(stage, model, checkpoints)
    step = int(path.name) if path.name.isdecimal() else None
    checkpoints = path if step is None else path.parent
    run, stage = checkpoints.parent.parent, checkpoints.parent.name
    if not checkpoints.is_dir() or not (run / "config.json").exists():
        raise WorkdirError(
            f"--policy={path}: neither a Hugging Face directory, nor a run's workdir, nor its STAGE/checkpoints[/STEP]"
        )
    model, _ = find_policy(run, stage)
    return Policy(stage if step is None else f"{stage} {step}", model, checkpoints, step)


def evaluate(config: ConfigDict, policy: Policy, tasks: Sequence[Task] | None, workdir: str) -> None:
    """Pass@k and recovery rates of `policy`; prints tables and writes report.json and report.html to `workdir`.

    Started again with the same arguments it goes on where it was.

    Args:
      tasks: None: the held-out ones of `config.tasks`.
    """
    settings = read_settings(config)
    content = "".join(task.id + task.fingerprint() for task in tasks or ())
    identity = {
        "config": config.to_dict(),
        "policy": {name: None if value is None else str(value) for name, value in vars(policy).items()},
        "tasks": hashlib.sha256(content.encode()).hexdigest()[:16],
    }
    with open_workdir(workdir, identity) as work:
        tasks = run_tasks(config, work.root, "test") if tasks is None else tasks
        model = load_model(policy.model, config.model, config.mesh)
        params = policy.params(model)
        sampler = JaxSampler(
            params,
            model.config,
            stop_id=model.stop_id,
            slots=config.sandbox.concurrent,
            max_len=config.agent.max_tokens,
        )
        host = run_host(config, work)
        roller = Roller(
            host,
            sampler,
            model.chat,
            settings.limits,
            config.sandbox.concurrent,
            config.agent.retry_message,
            config.eval.temperature,
            settings.live_processes,
        )
        policies = {policy.name: (params, policy.step or 0)}

        async def run() -> None:
            try:
                results = await judging.evaluate(
                    config, work, roller, sampler, tasks, policies, model=str(policy.model)
                )
                print(f"\n{pass_at_k_table(results)}")
            finally:
                await host.close()

        asyncio.run(run())
