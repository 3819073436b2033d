"""The main job, stage by stage: tasks → base → demonstrations → SFT → ReTerm-GRPO → evaluation → report.

Each stage leaves its result in the workdir and is skipped when it is there; a stage that was cut short continues from
its last checkpoint. The function `run` below reads like the method.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from ml_collections import ConfigDict

from reterm_jax.agent.episode import start_messages
from reterm_jax.agent.protocol import BASH_SCHEMA
from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.checkpoint.publish import Publisher
from reterm_jax.policy.spec import abstract_params, param_specs
from reterm_jax.recovery.dataset import Row, read_rows
from reterm_jax.rollout.client import ServiceClient
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.protocol import Opening, tokenizer_digest
from reterm_jax.rollout.samplers.jax import JaxSampler
from reterm_jax.sandbox import SandboxHost, make_host
from reterm_jax.tasks import families
from reterm_jax.tasks.task import Task, load_tasks
from reterm_jax.tokens.packing import Example
from reterm_jax.training import demonstrations, judging, rl_loop, sft_loop
from reterm_jax.training.metrics import MetricsWriter, format_progress
from reterm_jax.training.model import Model, load_model, write_tiny_model
from reterm_jax.training.optimizer import make_optimizer
from reterm_jax.training.origin import Origin, fingerprint, open_origin
from reterm_jax.training.remote_rollouts import RemoteRollouts
from reterm_jax.training.rollouts import Rollouts, local_rollouts
from reterm_jax.training.scoring import Scorer
from reterm_jax.training.settings import Settings, SettingsError, Supervised, read_settings, rollout_identity
from reterm_jax.training.state import abstract_arrays, abstract_state, state_from_params
from reterm_jax.training.steps import make_rl_step, make_score, make_sft_step
from reterm_jax.training.stopping import GracefulStop
from reterm_jax.training.workdir import Workdir, open_workdir

_PROBE_IDS = 256  # of a task's prompt, by which a sampler's weights are told from others


def run(config: ConfigDict, workdir: str) -> None:
    """Runs every stage that the workdir does not hold yet, and prints the final table.

    Raises errors that name file, field or task: see the callees.
    """
    settings = read_settings(config)
    stop = GracefulStop()
    signal.signal(signal.SIGTERM, stop.handle)
    with open_workdir(workdir, config.to_dict()) as work:
        print(f"workdir {work.root}  seed {config.seed}  devices {jax.device_count()} × {jax.devices()[0].device_kind}")
        host = run_host(config, work)
        asyncio.run(_run(_Stages(config, settings, work, host, stop), host))


async def _run(stages: _Stages, host: SandboxHost) -> None:
    try:
        await stages.run()
    finally:
        await host.close()  # on this loop, where sandboxes that are being closed can be waited for


def run_host(config: ConfigDict, work: Workdir, kind: str = "") -> SandboxHost:
    """What makes the sandboxes of a run, of `config.sandbox.kind` where no other is given."""
    return make_host(
        kind or config.sandbox.kind,
        work.root / "sandboxes",
        max_concurrent=config.sandbox.concurrent,
        snapshot_mb=config.sandbox.snapshot_mb,
        run_id=hashlib.sha256(str(work.root).encode()).hexdigest()[:12],
    )


def run_tasks(config: ConfigDict, workdir: Path, split: str) -> Sequence[Task]:
    """The `train` or `test` tasks of a run, generated below `workdir` where the config names none."""
    tasks = config.tasks
    if tasks.path:
        return load_tasks(f"{tasks.path}/{split}")
    return families.generate(
        workdir / "tasks" / split, split=split, per_family=tasks[f"{split}_per_family"], seed=config.seed
    )


def split_train(tasks: Sequence[Task], share: float, seed: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """The tasks of base and SFT, and those of RL: a random `share` and the rest, or with a share of 1 all for both.

    Raises SettingsError where one of the two would have none.
    """
    if share == 1:
        return tasks, tasks
    shuffled = random.Random(f"{seed}/sft share").sample(tasks, len(tasks))
    first = round(len(tasks) * share)
    if not 0 < first < len(tasks):
        raise SettingsError(f"config.tasks.sft_share {share} of {len(tasks)} train tasks leaves SFT or RL without any")
    return shuffled[:first], shuffled[first:]


def split_validation(tasks: Sequence[Task], count: int, seed: int) -> tuple[Sequence[Task], Sequence[Task]]:
    """RL's tasks without a random `count` of them, and those. Raises SettingsError where RL would have none."""
    if count >= len(tasks):
        raise SettingsError(f"config.rl.validation_tasks is {count}, but RL has only {len(tasks)} tasks in all")
    apart = set(random.Random(f"{seed}/validation").sample(range(len(tasks)), count))
    return [t for i, t in enumerate(tasks) if i not in apart], [tasks[i] for i in sorted(apart)]


class _Stages:
    """The stages of one run, with what they share."""

    def __init__(self, config: ConfigDict, settings: Settings, work: Workdir, host: SandboxHost, stop: GracefulStop):
        self.config, self.settings, self.work, self.host, self.stop = config, settings, work, host, stop
        self.origin = open_origin(config.start_from, config.to_dict()) if config.start_from else None
        self.sft_tasks, self.rl_tasks, self.test_tasks = self._tasks()

    async def run(self) -> None:
        config = self.config
        self.model = await self._model()
        if self.origin is None:
            sampler, base_params, sft_params = await self._cold_start()
            policies, known = {"base": (base_params, -1), "SFT": (sft_params, 0)}, []
        else:
            sft_params, known = self._params_of(self.origin, "sft"), self.origin.results
            sampler, policies = self._sampler(sft_params), {}
        if config.rl.steps:
            policies[self.rl_name] = await self._reinforce(sampler, sft_params), config.rl.steps
        await judging.evaluate(config, self.work, self._roller(sampler), sampler, self.test_tasks, policies, known)

    async def _cold_start(self) -> tuple[JaxSampler, Any, Any]:
        """A sampler, and the parameters of base and SFT."""
        config = self.config
        params = self.model.initial_params(config.seed, pretrained=bool(config.model.path))
        if not config.model.path:
            params = self._supervised("base", self.settings.base, await self._scripted_attempts(), params)
        sampler = self._sampler(params)
        rows = read_rows(config.sft.data) if config.sft.data else await self._demonstrations(sampler)
        examples = demonstrations.recovery_examples(rows, self.model.chat, row_length=config.sft.row_length)
        examples = demonstrations.renamed(examples, self.model.chat, copies=config.sft.renamings, seed=config.seed)
        return sampler, params, self._supervised("sft", self.settings.sft, examples, params)

    async def _scripted_attempts(self) -> list[Example]:
        """Scripted attempts, from which a model without pretraining learns how to act at all."""
        config = self.config
        with self._counted("base data") as progress:
            attempts = await demonstrations.scripted_attempts(
                self.host,
                self.model.chat,
                self.settings.limits,
                self.sft_tasks,
                config.base.examples,
                seed=config.seed,
                concurrent=config.sandbox.concurrent,
                retry_message=config.agent.retry_message,
                path=self.work.root / "data" / "scripted_attempts.jsonl",
                progress=progress,
            )
        examples = demonstrations.warm_up_examples(attempts)
        return demonstrations.renamed(examples, self.model.chat, copies=config.base.renamings, seed=config.seed)

    async def _demonstrations(self, sampler: JaxSampler) -> list[Row]:
        """Recoveries by the expert, from the base model's own failures and from scripted ones."""
        config = self.config
        sampled = round(config.sft.examples * config.sft.sampled_fraction)
        rows: list[Row] = []
        for name, failures, wanted in (
            ("sampled", lambda task, seed: sampler, sampled),
            ("scripted", None, config.sft.examples - sampled),
        ):
            with self._counted(f"sft data, {name}") as progress:
                rows += await demonstrations.recoveries(
                    self.host,
                    self.model.chat,
                    self.settings.limits,
                    self.sft_tasks,
                    failures,
                    seed=config.seed,
                    wanted=wanted,
                    concurrent=config.sandbox.concurrent,
                    retry_message=config.agent.retry_message,
                    path=self.work.root / "data" / f"recoveries_{name}.jsonl",
                    progress=progress,
                )
        return rows

    @contextlib.contextmanager
    def _counted(self, name: str) -> Iterator[Callable[[int, int], None]]:
        """A progress callback that prints every tenth part."""

        def progress(done: int, total: int) -> None:
            if done % max(1, total // 10) == 0 or done == total:
                print(format_progress(name, done, total, {}), flush=True)

        yield progress

    @property
    def rl_name(self) -> str:
        rl = self.config.rl
        if rl.name:
            return rl.name
        return "GRPO" if not rl.states else "ReTerm-GRPO" if rl.fork_at == "end" else f"ReTerm-GRPO ({rl.fork_at})"

    def _roller(self, sampler: JaxSampler) -> Roller:
        config = self.config
        return Roller(
            self.host,
            sampler,
            self.model.chat,
            self.settings.limits,
            config.sandbox.concurrent,
            config.agent.retry_message,
            config.rl.temperature,
            self.settings.live_processes,
            spares=config.rollout.spares,
        )

    def _sampler(self, params: Any) -> JaxSampler:
        return JaxSampler(
            params,
            self.model.config,
            stop_id=self.model.stop_id,
            slots=self.config.sandbox.concurrent,
            max_len=self.config.agent.max_tokens,
        )

    def _tasks(self) -> tuple[Sequence[Task], Sequence[Task], Sequence[Task]]:
        """The tasks of base and SFT, those of RL, and the held-out ones."""
        train, test = (run_tasks(self.config, self.work.root, split) for split in ("train", "test"))
        return *split_train(train, self.config.tasks.sft_share, self.config.seed), test

    async def _model(self) -> Model:
        config, directory = self.config, (self.origin or self.work).root / "model"
        if config.model.path:
            directory = Path(config.model.path)
        elif not (directory / "config.json").exists():
            texts = await demonstrations.corpus(
                self.host, self.sft_tasks, seed=config.seed, retry_message=config.agent.retry_message
            )
            write_tiny_model(directory, config.model, texts)
        return load_model(directory, config.model, config.mesh)

    @property
    def _abstract_params(self) -> Any:
        return abstract_arrays(abstract_params(self.model.config), self.model.shardings)

    def _fingerprint(self) -> str:
        return fingerprint(self.config.to_dict())

    def _params_of(self, origin: Origin, stage: str) -> Any:
        """The parameters that a finished stage of another run left."""
        with Checkpointer(origin.root / stage / "checkpoints", fingerprint=origin.fingerprint) as checkpointer:
            return checkpointer.restore_params(self._abstract_params)

    def _supervised(self, name: str, stage: Supervised, examples: Sequence, params: Any) -> Any:
        """Trains on examples and returns the new parameters; only reads them where the stage is finished."""
        model = self.model
        directory = self.work.root / name
        with Checkpointer(directory / "checkpoints", fingerprint=self._fingerprint()) as checkpointer:
            with self.work.phase(name) as pending:
                if not pending:
                    return checkpointer.restore_params(self._abstract_params)
                data = sft_loop.PackedEpochs(examples, stage.loop)
                optimizer = make_optimizer(stage.optimizer, param_specs(model.config), data.total_steps)
                if checkpointer.latest_step is None:
                    state = state_from_params(params, optimizer, model.mesh, model.shardings)
                else:
                    abstract = abstract_state(abstract_params(model.config), optimizer, model.mesh, model.shardings)
                    state, _ = checkpointer.restore(abstract)
                step = make_sft_step(model.config, stage.step, optimizer, model.mesh, model.shardings)
                with MetricsWriter(directory, resume_step=int(state.step)) as metrics, self.stop.deferred():
                    state = sft_loop.run(
                        data,
                        state,
                        step,
                        stage.loop,
                        checkpointer=checkpointer,
                        metrics=metrics,
                        phase=name,
                        stop=self.stop,
                    )
                return state.params

    async def _reinforce(self, sampler: JaxSampler, params: Any) -> Any:
        model, rl = self.model, self.settings.rl
        directory, run = self.work.root / "rl", self._fingerprint()
        with contextlib.ExitStack() as stack:
            checkpointer = stack.enter_context(Checkpointer(directory / "checkpoints", fingerprint=run))
            best = checkpointer
            if rl.loop.validate_every:
                best = stack.enter_context(Checkpointer(directory / "best", fingerprint=run))
            with self.work.phase("rl") as pending:
                if not pending:
                    return self._best_params(best)
                updates = rl.loop.steps * rl.loop.epochs * rl.loop.updates
                optimizer = make_optimizer(rl.optimizer, param_specs(model.config), updates)
                first, saved = checkpointer.latest_step or 0, None
                tasks, apart, validation = self.rl_tasks, (), None
                if rl.loop.validate_every:
                    best.discard_after(first)
                    tasks, apart = split_validation(tasks, rl.loop.validation_tasks, self.config.seed)
                    validation = rl_loop.Validation(apart, best)
                layout = optimizer, model.mesh, model.shardings
                average = bool(rl.step.ema_decay)
                if first:
                    abstract = abstract_state(abstract_params(model.config), *layout, average=average)
                    state, saved = checkpointer.restore(abstract)
                else:
                    state = state_from_params(params, *layout, average=average)
                step = make_rl_step(model.config, rl.step, optimizer, model.mesh, model.shardings)
                scorer = None
                if rl.scoring.own or rl.scoring.reference:
                    score = make_score(model.config, rl.step, model.mesh, model.shardings)
                    scorer = Scorer(rl.scoring, score, reference_params=params)
                with MetricsWriter(directory, resume_step=first) as metrics, self.stop.deferred():
                    state = await rl_loop.run(
                        rl.loop,
                        self._rollouts(sampler, tasks, apart, first, saved),
                        state,
                        step,
                        first_step=first,
                        checkpointer=checkpointer,
                        metrics=metrics,
                        scorer=scorer,
                        validation=validation,
                        stop=self.stop,
                    )
                return state.result if best is checkpointer else self._best_params(best)

    def _rollouts(
        self,
        sampler: JaxSampler,
        tasks: Sequence[Task],
        apart: Sequence[Task],
        first: int,
        saved: Mapping[str, Any] | None,
    ) -> Rollouts:
        """Root groups are on `tasks`, validation on those `apart`."""
        loop = self.settings.rl.loop
        if self.settings.service.service:
            return self._remote_rollouts(tasks, apart, first)
        return local_rollouts(
            self.settings.schedule,
            loop.pool,
            tasks,
            dataclasses.replace(self._roller(sampler), fork_at=loop.fork_at),
            sampler,
            self.work.root / "rl" / "groups.sqlite",
            first_step=first,
            saved=saved,
            identity={"config": self._fingerprint()},
        )

    def _remote_rollouts(self, tasks: Sequence[Task], apart: Sequence[Task], first: int) -> RemoteRollouts:
        model, settings = self.model, self.settings.service
        prompt = model.chat.prompt_ids(start_messages(tasks[0].instruction), [BASH_SCHEMA])[-_PROBE_IDS:]
        publisher = Publisher(
            settings.published or self.work.root / "published",
            model.config,
            model.directory,
            prompt,
            keep=settings.keep,
        )
        opening = Opening(
            rollout_identity(self.config),
            {task.id: task.fingerprint() for task in tasks},
            {task.id: task.fingerprint() for task in apart},
            tokenizer_digest(model.directory),
            first,
        )
        token = os.environ.get("RETERM_ROLLOUT_TOKEN", "")
        client = ServiceClient(settings.service, token, patience=settings.patience)
        return RemoteRollouts(client, publisher, opening, self.settings.rl.loop.steps)

    def _best_params(self, best: Checkpointer) -> Any:
        if best.latest_step is None:
            raise SettingsError("no validation had a graded attempt, so there is no best policy; see the sandbox's log")
        return best.restore_params(self._abstract_params)
