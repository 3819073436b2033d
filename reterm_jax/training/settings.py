"""From the experiment's config to the settings of each stage, all checked before anything runs."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ml_collections import ConfigDict

from reterm_jax.agent.attempt import AgentLimits
from reterm_jax.losses.policy_gradient import load_objective
from reterm_jax.rollout.live_processes import LiveProcesses
from reterm_jax.rollout.pool import PoolConfig
from reterm_jax.rollout.scheduler import Schedule
from reterm_jax.training.optimizer import OptimizerConfig
from reterm_jax.training.rl_loop import RLConfig
from reterm_jax.training.scoring import ScoringConfig
from reterm_jax.training.sft_loop import SFTConfig
from reterm_jax.training.steps import StepConfig

# What evaluations call the policies that RL starts from.
UNTRAINED = ("base", "SFT")
# Which attempts the KL and the entropy bonus are taken over.
REGULARISE = ("all", "trained")


class SettingsError(ValueError):
    """A value of the config that cannot work; the message names its field."""


@dataclass(frozen=True)
class Supervised:
    """A stage of supervised training."""

    loop: SFTConfig
    step: StepConfig
    optimizer: OptimizerConfig


@dataclass(frozen=True)
class Reinforcement:
    """The stage of ReTerm-GRPO."""

    loop: RLConfig
    step: StepConfig
    optimizer: OptimizerConfig
    scoring: ScoringConfig


@dataclass(frozen=True)
class ServiceSettings:
    """How trainer, rollout service and vLLM find and treat each other; see configs/quickstart.py for the fields."""

    service: str
    vllm: tuple[str, ...]
    sandbox: str
    published: str
    keep: int
    on_failure: Literal["exclude", "stop"]
    restart: str
    probe_tolerance: float
    patience: float

    def __post_init__(self) -> None:
        for url in (self.service, *self.vllm):
            if url and not url.startswith(("http://", "https://")):
                raise ValueError(f"{url!r} is no URL; write http://HOST:PORT")
        if not self.vllm or len(set(self.vllm)) != len(self.vllm):
            raise ValueError(f"vllm is {self.vllm}; name each server once, and one at least")
        if self.on_failure not in ("exclude", "stop"):
            raise ValueError(f"on_failure is {self.on_failure!r}; it must be 'exclude' or 'stop'")
        if self.keep < 1 or not self.probe_tolerance > 0 or not self.patience > 0:
            raise ValueError(
                f"keep {self.keep} must be at least 1, probe_tolerance {self.probe_tolerance} and patience "
                f"{self.patience} positive"
            )


@dataclass(frozen=True)
class Settings:
    """What the stages of one run are made from."""

    limits: AgentLimits
    live_processes: LiveProcesses
    base: Supervised
    sft: Supervised
    rl: Reinforcement
    schedule: Schedule
    service: ServiceSettings


def read_settings(config: ConfigDict) -> Settings:
    """The settings that `config` (the layout of configs/quickstart.py) asks for; raises SettingsError."""
    with _named("agent"):
        limits = AgentLimits(**{k: v for k, v in config.agent.items() if k != "retry_message"})
    with _named("sandbox"):
        live_processes = LiveProcesses(config.sandbox.live_processes, tuple(config.sandbox.restart))
    _check_counts(config)
    stages = {name: _supervised(name, config[name], config.seed) for name in ("base", "sft")}
    if not config.model.path:
        # Scripted attempts may be as long as any. (Demonstrations that are too long are left out, and counted.)
        with _named("base"):
            _check_row(config.base.row_length, limits)
    rl = _reinforcement(config, limits)
    schedule = _schedule(config, rl.loop)
    with _named("rollout"):
        fields = {name: config.rollout[name] for name in ServiceSettings.__dataclass_fields__}
        service = ServiceSettings(**{**fields, "vllm": tuple(config.rollout.vllm)})
    return Settings(limits, live_processes, stages["base"], stages["sft"], rl, schedule, service)


def rollout_identity(config: ConfigDict) -> dict[str, Any]:
    """What groups depend on beside weights and tasks, flat, as JSON values: alike in a trainer and its service."""
    chosen = {
        "rl": (
            *("steps", "tasks", "attempts", "states", "forks", "fork_at", "choose", "target_rate", "max_depth"),
            *("pool_staleness", "pool_size", "temperature", "step_tokens"),
        ),
        "rollout": ("max_staleness", "refills", "spares"),
        "sandbox": ("live_processes", "restart"),
        "agent": tuple(config.agent.keys()),
    }
    flat = {f"{section}.{name}": config[section][name] for section, names in chosen.items() for name in names}
    return json.loads(json.dumps({"seed": config.seed, **flat}))


def _supervised(name: str, stage: ConfigDict, seed: int) -> Supervised:
    with _named(name):
        loop = SFTConfig(epochs=stage.epochs, row_length=stage.row_length, rows_per_update=stage.batch_rows, seed=seed)
        return Supervised(loop, StepConfig(micro_rows=stage.micro_rows), _optimizer(stage))


def _reinforcement(config: ConfigDict, limits: AgentLimits) -> Reinforcement:
    rl = config.rl
    with _named("rl"):
        pool = PoolConfig(
            choose=rl.choose,
            target_rate=rl.target_rate,
            max_depth=rl.max_depth,
            max_staleness=rl.pool_staleness,
            size=rl.pool_size,
        )
        if rl.name in UNTRAINED or "/" in rl.name:
            raise ValueError(f"name is {rl.name!r}; it must be none of {', '.join(UNTRAINED)}, and have no /")
        if rl.regularise not in REGULARISE:
            raise ValueError(f"regularise {rl.regularise!r} is unknown; one of {', '.join(REGULARISE)}")
        others = {
            "seed": config.seed,
            "pool": pool,
            "zero_advantage": rl.regularise == "all" and (rl.kl_weight > 0 or rl.entropy_weight > 0),
        }
        fields = {name: rl[name] for name in RLConfig.__dataclass_fields__ if name not in others}
        loop = RLConfig(**fields, **others)
        _check_row(rl.row_length, limits)
        if not rl.temperature > 0:
            raise ValueError(f"temperature must be positive, got {rl.temperature}")
        clips = ("clip_low", "clip_high", "clip_dual") if rl.objective == "ppo_clip" else ()
        step = StepConfig(
            micro_rows=rl.micro_rows,
            aggregation=rl.aggregation,
            max_length=limits.max_tokens,
            temperature=rl.temperature,
            objective=rl.objective,
            objective_args={**{name: rl[name] for name in clips}, **_hyper(rl.objective_args)},
            kl_weight=rl.kl_weight,
            kl_estimate=rl.kl_estimate,
            entropy_weight=rl.entropy_weight,
            ema_decay=rl.ema_decay,
        )
        scoring = ScoringConfig(
            reference=rl.kl_weight > 0,
            correction=rl.sampler_correction,
            correction_mode=rl.correction_mode,
            correction_cap=rl.correction_cap,
            max_mismatch=rl.max_mismatch,
        )
        load_objective(step.objective, step.objective_args)
        if rl.ema_decay and rl.validate_every:
            raise ValueError(
                f"ema_decay is {rl.ema_decay} and validate_every {rl.validate_every}; the result is either the average "
                "or the best by validation: set one of them to 0"
            )
        return Reinforcement(loop, step, _optimizer(rl), scoring)


def _schedule(config: ConfigDict, loop: RLConfig) -> Schedule:
    with _named("rollout"):
        rollout = config.rollout
        if rollout.spares < 0:
            raise ValueError(f"spares must not be negative, got {rollout.spares}")
        if rollout.max_staleness > 0 and not rollout.service:
            raise ValueError(
                f"max_staleness is {rollout.max_staleness}, but a sampler in the trainer's process samples between "
                "updates only; set it to 0, or rollout.service to the URL of a service"
            )
        names = ("seed", "steps", "tasks", "attempts", "states", "forks", "step_tokens")
        shared = {name: getattr(loop, name) for name in names}
        return Schedule(**shared, max_staleness=rollout.max_staleness, refills=rollout.refills)


def _hyper(text: str) -> dict[str, float]:
    """The numbers in `name=value,name=value`."""
    hyper = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.partition("=")
        try:
            hyper[name.strip()] = float(value)
        except ValueError:
            raise ValueError(f"objective_args has {part!r}; write name=number, name=number") from None
    return hyper


def _check_row(row_length: int, limits: AgentLimits) -> None:
    if row_length < limits.max_tokens:
        raise ValueError(
            f"row_length is {row_length}, but an attempt may have agent.max_tokens = {limits.max_tokens}; "
            "a row must hold one"
        )


def _optimizer(stage: ConfigDict) -> OptimizerConfig:
    return OptimizerConfig(
        name=stage.optimizer,
        learning_rate=stage.learning_rate,
        schedule=stage.schedule,
        warmup=stage.warmup,
        clip_norm=stage.clip_norm,
        moments_dtype=stage.moments_dtype,
        weight_decay=stage.weight_decay,
    )


def _check_counts(config: ConfigDict) -> None:
    fields = {
        "tasks": ("train_per_family", "test_per_family"),
        "sandbox": ("concurrent", "snapshot_mb"),
        "base": ("examples", "renamings", "micro_rows"),
        "sft": ("examples", "renamings", "micro_rows"),
        "rl": ("micro_rows",),
        "mesh": ("data", "fsdp", "tensor"),
        "eval": ("attempts", "states", "forks", "temperature"),
    }
    for section, names in fields.items():
        for name in names:
            if not config[section][name] > 0:
                raise SettingsError(f"config.{section}.{name} must be positive, got {config[section][name]}")
    ways = config.mesh.data * config.mesh.fsdp
    for section in ("base", "sft", "rl"):
        if config[section].micro_rows % ways:
            raise SettingsError(
                f"config.{section}.micro_rows is {config[section].micro_rows}; it must be a multiple of "
                f"mesh.data · mesh.fsdp = {ways}"
            )
    data = config.sft.data
    if data and Path(data).suffix not in (".jsonl", ".parquet"):
        raise SettingsError(f"config.sft.data is {data}; give a .jsonl or .parquet file")
    if data and not Path(data).is_file():
        raise SettingsError(f"config.sft.data: there is no file {Path(data).absolute()}")
    if config.eval.own_forks < 0:
        raise SettingsError(f"config.eval.own_forks must not be negative, got {config.eval.own_forks}")
    if config.start_from and not config.rl.steps:
        raise SettingsError(f"config.start_from is {config.start_from} and config.rl.steps 0: nothing is left to run")
    if not 0 <= config.sft.sampled_fraction <= 1:
        raise SettingsError(f"config.sft.sampled_fraction must be in [0, 1], got {config.sft.sampled_fraction}")
    if config.model.path and config.sft.renamings != 1:
        raise SettingsError(
            f"config.sft.renamings is {config.sft.renamings}, but names are exchanged only for the model made from "
            "scratch, whose tokenizer has a token for each; set it to 1 with config.model.path"
        )
    if not 0 < config.tasks.sft_share <= 1:
        raise SettingsError(f"config.tasks.sft_share must be above 0 and at most 1, got {config.tasks.sft_share}")


@contextlib.contextmanager
def _named(section: str) -> Iterator[None]:
    """Says of which part of the config an error is."""
    try:
        yield
    except ValueError as error:
        raise SettingsError(f"config.{section}: {error}") from None
