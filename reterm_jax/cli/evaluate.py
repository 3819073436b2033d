"""`reterm-evaluate --policy=POLICY --config=CONFIG [TASKS]`: Pass@k and recovery rates of a trained policy.

POLICY is a run's workdir, its STAGE/checkpoints or one of those, or a Hugging Face directory. CONFIG gives sandboxes,
limits and sizes (`eval`), and the held-out tasks where no TASKS are named.

`reterm-evaluate TASKS`: checks a task set with reference agents. The oracle must be judged 1, doing nothing 0.
"""

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from ml_collections import config_flags

from reterm_jax.cli import common

_POLICY = flags.DEFINE_string("policy", None, "The policy to evaluate; without it reference agents are run.")
_STAGE = flags.DEFINE_enum("stage", "rl", ["base", "sft", "rl"], "Whose weights, where --policy is a run's workdir.")
_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment, with --policy.", lock_config=True)
_AGENTS = flags.DEFINE_list("agent", ["oracle", "nop"], "Reference agents: oracle (solution/solve.sh), nop (nothing).")
_SANDBOX = flags.DEFINE_enum(
    "sandbox", "auto", ["auto", "bubblewrap", "docker"], "Where commands run; with --policy the config says it."
)
_WORKDIR = flags.DEFINE_string(
    "workdir", "runs/evaluate", "Holds each attempt with its verdict; killed and started again it goes on."
)
_CONCURRENT = flags.DEFINE_integer("concurrent", 4, "Sandboxes alive at once (not with --policy).", lower_bound=1)
_TIMEOUT = flags.DEFINE_float("timeout", 900.0, "Seconds for a solution whose task sets no agent.timeout_sec.")
_IDS = flags.DEFINE_list("task", [], "Only the tasks of these ids; * and ? stand for any characters.")
_EXCLUDE = flags.DEFINE_list("exclude", [], "Not the tasks of these ids or patterns.")
_SHUFFLE = flags.DEFINE_integer("shuffle", None, "Seed of a random order.")
_LIMIT = flags.DEFINE_integer("limit", None, "How many tasks at most, in that order.", lower_bound=1)
_SHARD = flags.DEFINE_string("shard", "0/1", "I/N: every N-th task from the I-th on; a workdir for each process.")


def main(argv: Sequence[str]) -> None:
    if _POLICY.value is not None:
        return _evaluate_policy(argv[1:])
    if len(argv) != 2:
        raise app.UsageError("give one path: a directory of Harbor tasks, one task's directory, or a registry file")
    from reterm_jax.evaluation.reference import AGENTS, unsound, unsound_table

    for agent in _AGENTS.value:
        if agent not in AGENTS:
            raise common.UserError(f"--agent: {agent!r} is not one of {', '.join(AGENTS)}")
    records = asyncio.run(_run(Path(argv[1])))
    found = [x for agent, done in records.items() for x in unsound(agent, done)]
    for agent, done in records.items():
        solved = sum(record.solved for record in done)
        print(f"{agent}: {solved} of {len(done)} solved, {sum(not record.graded for record in done)} not graded")
    if found:
        print(unsound_table(found))
        raise common.UserError(f"{len({x.record.task_id for x in found})} tasks are not sound; the table names them")
    print("every task is sound")


def _evaluate_policy(paths: Sequence[str]) -> None:
    if _CONFIG.value is None:
        raise common.UserError("--policy needs --config, such as the config that the policy was trained with")
    common.quiet_environment()
    common.end_on_signals()
    from reterm_jax.training import trained

    policy = trained.find(Path(_POLICY.value), _STAGE.value)
    trained.evaluate(_CONFIG.value, policy, _tasks(Path(paths[0])) if paths else None, _WORKDIR.value)


async def _run(path: Path) -> dict:
    from reterm_jax.evaluation.console import progress_printer
    from reterm_jax.evaluation.evaluate import evaluate_pass
    from reterm_jax.evaluation.journal import Journal
    from reterm_jax.evaluation.reference import run_reference
    from reterm_jax.sandbox import make_host
    from reterm_jax.sandbox.base import SandboxError

    common.end_on_signals()
    tasks = _tasks(path)
    workdir = Path(_WORKDIR.value)
    workdir.mkdir(parents=True, exist_ok=True)
    host = make_host(_SANDBOX.value, workdir / "sandboxes", max_concurrent=_CONCURRENT.value, run_id="evaluate")
    # A verdict holds for a task as it was: a journal of other contents is refused.
    content = hashlib.sha256("".join(task.id + task.fingerprint() for task in tasks).encode()).hexdigest()
    records = {}
    try:
        for agent in _AGENTS.value:
            identity = {"agent": agent, "tasks": content}
            unfinished = workdir / f"{agent}.unfinished.jsonl"
            with Journal(unfinished, identity) as journal:
                records[agent] = await evaluate_pass(
                    tasks,
                    lambda task, seed, agent=agent: run_reference(agent, task, host, timeout=_TIMEOUT.value, seed=seed),
                    concurrency=_CONCURRENT.value,
                    journal=journal,
                    faults=(SandboxError,),
                    progress=progress_printer(agent),
                )
            unfinished.replace(workdir / f"{agent}.jsonl")
    finally:
        await host.close()
    return records


def _tasks(path: Path) -> list:
    from reterm_jax.tasks.dataset import Selection, load_dataset

    try:
        shard, shards = (int(word) for word in _SHARD.value.split("/"))
        selection = Selection(tuple(_IDS.value), tuple(_EXCLUDE.value), _SHUFFLE.value, _LIMIT.value, shard, shards)
    except ValueError as error:
        raise common.UserError(f"--shard={_SHARD.value}: {error}; give I/N such as 0/4") from None
    chosen = load_dataset(path, selection)
    for task in chosen:
        if _POLICY.value is None and "oracle" in _AGENTS.value and task.solution is None:
            raise common.UserError(f"{task.path / 'solution' / 'solve.sh'}: missing; add it, or give --agent=nop")
    return chosen


def run() -> None:
    """Console entry point."""
    common.run_main(main, positional=1)


if __name__ == "__main__":
    run()
