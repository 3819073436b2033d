"""ReTerm-GRPO: take the groups of a step, score them, update, and hand the new weights to the sampler.

With `states` = 0 this is plain GRPO. Where groups come from is behind `Rollouts`. A step is a function of (seed, step,
parameters, groups), and groups are kept until a checkpoint has what they taught: a run that was killed continues from
its last checkpoint and does the lost steps again, with the same attempts.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reterm_jax.agent.fork_points import FORK_AT, ForkAt
from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.losses.advantages import BASELINES
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.pool import PoolConfig
from reterm_jax.rollout.seeds import seed_of
from reterm_jax.tasks.task import Task
from reterm_jax.tokens.forking import pack_forked
from reterm_jax.tokens.packing import Example, pack
from reterm_jax.training.examples import group_examples
from reterm_jax.training.metrics import MetricsWriter, format_progress, format_seconds
from reterm_jax.training.rollouts import Rollouts
from reterm_jax.training.scoring import Scorer
from reterm_jax.training.state import TrainState
from reterm_jax.training.steps import TrainStep
from reterm_jax.training.stopping import GracefulStop


@dataclass(frozen=True)
class RLConfig:
    """
    Attributes:
        steps: rollouts, each followed by `epochs` passes over its attempts, cut into `updates` optimizer updates each;
            with 0 the run ends after SFT.
        tasks, attempts: root groups a step (a round, with `step_tokens`), and attempts in each (G).
        states, forks: failure states chosen a step or round, and recoveries from each (K); 0 states is plain GRPO.
        step_tokens: tokens sampled in a step, on average, in as many rounds as it takes; 0: one round. See `Rounds`.
        fork_at: which state of a failed attempt its recoveries start from, see `agent.fork_points`.
        pool: which failure states are chosen, and which wait for a later step.
        recovery_weight: factor on the loss of recovery tokens.
        baseline, standardise, failed_credit: of the advantages, see `group_examples`.
        zero_advantage: also train on attempts whose advantage is 0, for the sake of terms beside the objective.
        row_length: tokens of a packed row.
        forked: compute what the attempts of a group share once; False computes it for each, to the same effect.
        save_every: steps between checkpoints; the last step is always saved.
        validate_every: steps between validations; 0 for none. The last step is always validated.
        validation_tasks, validation_attempts: how many of the tasks are kept apart for that, and attempts on each.
    """

    steps: int
    tasks: int
    attempts: int
    states: int
    forks: int
    step_tokens: int
    fork_at: ForkAt
    recovery_weight: float
    baseline: str
    standardise: bool
    failed_credit: float
    zero_advantage: bool
    epochs: int
    updates: int
    row_length: int
    forked: bool
    save_every: int
    validate_every: int
    validation_tasks: int
    validation_attempts: int
    seed: int
    pool: PoolConfig = dataclasses.field(default_factory=PoolConfig)

    def __post_init__(self) -> None:
        for field in ("tasks", "attempts", "epochs", "updates", "row_length", "save_every", "validation_attempts"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        for field in (
            "steps",
            "states",
            "forks",
            "step_tokens",
            "recovery_weight",
            "validate_every",
            "validation_tasks",
        ):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")
        if bool(self.validate_every) != bool(self.validation_tasks):
            raise ValueError(
                f"validate_every is {self.validate_every} and validation_tasks {self.validation_tasks}; set both to "
                "keep the best checkpoint by validation, or neither"
            )
        if self.baseline not in BASELINES:
            raise ValueError(f"baseline {self.baseline!r} is unknown; one of {', '.join(BASELINES)}")
        if not 0 <= self.failed_credit <= 1:
            raise ValueError(f"failed_credit must be in [0, 1], got {self.failed_credit}")
        if self.fork_at not in FORK_AT:
            raise ValueError(f"fork_at {self.fork_at!r} is unknown; one of {', '.join(FORK_AT)}")
        if self.states and not self.forks:
            raise ValueError("forks is 0 while states is not; set states=0 for plain GRPO")


@dataclass(frozen=True)
class Validation:
    """Keeps the state that earns most on tasks that RL does not train on.

    Attributes:
        tasks: always attempted with the same seeds, so that steps are compared on equal terms.
        best: holds the best state so far (on a tie the earlier one), with its reward as metadata.
    """

    tasks: Sequence[Task]
    best: Checkpointer

    async def __call__(self, rollouts: Rollouts, config: RLConfig, step: int, state: TrainState) -> float:
        """The mean reward of the policy that was published last; NaN where nothing was graded."""
        groups = await rollouts.validate(self.tasks, config.validation_attempts, f"{config.seed}/validation")
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        reward = float(np.mean(rewards)) if rewards else float("nan")
        known = self.best.metadata()["reward"] if self.best.latest_step is not None else -float("inf")
        if reward > known:
            self.best.save(step, state, {"reward": reward})
        return reward


async def run(
    config: RLConfig,
    rollouts: Rollouts,
    state: TrainState,
    train_step: TrainStep,
    *,
    first_step: int,
    checkpointer: Checkpointer,
    metrics: MetricsWriter,
    scorer: Scorer | None = None,
    validation: Validation | None = None,
    stop: GracefulStop | None = None,
    log: Callable[[str], None] = print,
) -> TrainState:
    """Trains from `first_step` to `config.steps` and returns the final state, which is also saved.

    Args:
        rollouts: gives the groups of each step, and samples with `state.params` from here on; the version of a policy
            is the number of finished steps.
        state: donated to the first update.
        scorer: computes what updates need beside the sampler's logprobs; None where they need nothing else.
        validation: keeps the best state.
        stop: when it is requested, an update that runs is finished and a rollout that is waited for is given up (it
            would be done again alike); the last whole step is saved, and KeyboardInterrupt raised.
    """
    stop = stop or GracefulStop()
    record: dict[str, Any] = {}
    saved: int | None = None  # the checkpoint that is being written, in the background
    async with rollouts:
        await rollouts.publish(first_step, state.params)
        durations: list[float] = []
        for step in range(first_step, config.steps):
            start = time.monotonic()
            batch = await stop.unless_requested(rollouts.batch(step))
            if batch is None:
                if record and saved != step:
                    checkpointer.save(step, state, record)
                    saved = step
                checkpointer.wait()
                if saved is not None:
                    rollouts.acknowledge(saved)
                log(f"rl: stopped after step {step}; start again to go on from there")
                raise KeyboardInterrupt
            groups, rolled = batch.groups, time.monotonic()
            selection = group_examples(
                groups,
                recovery_weight=config.recovery_weight,
                baseline=config.baseline,
                standardise=config.standardise,
                failed_credit=config.failed_credit,
                zero_advantage=config.zero_advantage,
            )
            values = rollout_metrics(groups, step) | batch.facts
            examples, scored = selection.examples, {}
            if scorer is not None:
                examples, scored = scorer(state.params, examples, length=config.row_length, forked=config.forked)
            state, trained = _train(config, step, examples, state, train_step)
            values |= trained | scored
            values |= {
                "rollout/no_spread_groups": selection.no_spread,
                "rollout/ungraded_attempts": selection.ungraded,
                "rollout/seconds": rolled - start,
                "train/seconds": time.monotonic() - rolled,
            }
            durations = (durations + [time.monotonic() - start])[-10:]
            last = step + 1 == config.steps
            await rollouts.publish(step + 1, state.params)
            if validation is not None and ((step + 1) % config.validate_every == 0 or last):
                values["validation/reward"] = await validation(rollouts, config, step + 1, state)
            values = metrics.write(step + 1, values)
            log(_progress_line(config, step, values, durations))
            if values.get("train/skipped") and examples:
                log(
                    f"rl: step {step + 1}: {values['train/skipped']:.0%} of its updates were skipped, because their "
                    "gradient is not finite; they changed no parameter"
                )
            record = {"rl_step": step + 1, **rollouts.record()}
            if (step + 1) % config.save_every == 0 or last:
                checkpointer.wait()
                if saved is not None:
                    rollouts.acknowledge(saved)
                checkpointer.save(step + 1, state, record)
                saved = step + 1
        checkpointer.wait()
        if saved is not None:
            rollouts.acknowledge(saved)
    return state


def rollout_metrics(groups: Sequence[Group], step: int) -> dict[str, float]:
    """Means over the graded attempts of one step, counts by outcome, and how many versions old the oldest is."""
    values: dict[str, float] = {}
    for kind, prefix in (("root", "rollout/root_"), ("recovery", "recovery/")):
        attempts = [attempt for group in groups if group.kind == kind for attempt in group.attempts]
        graded = [a for a in attempts if a.outcome is not None and a.outcome.graded]
        if graded:
            values[f"{prefix}reward"] = float(np.mean([a.outcome.reward for a in graded]))
            values[f"{prefix}turns"] = float(np.mean([len(a.turns) for a in graded]))
        values[f"{prefix}attempts"] = len(attempts)
    attempts = [attempt for group in groups for attempt in group.attempts]
    for status in sorted({a.outcome.status for a in attempts if a.outcome is not None}):
        values[f"rollout/status_{status}"] = sum(a.outcome is not None and a.outcome.status == status for a in attempts)
    versions = [a.version for a in attempts if a.version >= 0]
    values["rollout/staleness"] = step - min(versions, default=step)
    values["rollout/tokens_per_attempt"] = float(np.mean([a.own_tokens for a in attempts])) if attempts else 0.0
    return values


def _train(
    config: RLConfig, step: int, examples: list[Example], state: TrainState, train_step: TrainStep
) -> tuple[TrainState, dict[str, float]]:
    """`epochs` times one update on each of `updates` disjoint parts of the examples. Returns means over the updates.

    The distance to the sampler is the first update's: later ones have moved away from it on purpose.
    """
    if not examples:
        # Every group was all solved or all failed: there is nothing to learn from in this step.
        return state, {"train/skipped": 1.0}
    rng = np.random.default_rng(seed_of(f"{config.seed}/order/{step}"))
    collected: list[dict[str, float]] = []
    parts = [p for _ in range(config.epochs) for p in np.array_split(rng.permutation(len(examples)), config.updates)]
    for part in parts:
        if not len(part):
            continue
        chosen = [examples[i] for i in part]
        packed = pack_forked if config.forked else pack
        batch, _ = packed(chosen, length=config.row_length)
        state, scalars = train_step(state, batch)
        collected.append(
            {
                **{k: float(v) for k, v in scalars.items()},
                "train/padding_fraction": batch.padding_fraction,
                "train/shared_fraction": 1 - batch.used_tokens / sum(len(example.ids) - 1 for example in chosen),
            }
        )
    means = {key: float(np.mean([c[key] for c in collected])) for key in collected[0]}
    distances = {k: v for k, v in collected[0].items() if k.startswith(("train/logprob_diff", "train/ratio_outside"))}
    return state, means | distances


def _progress_line(config: RLConfig, step: int, values: Mapping[str, float], durations: Sequence[float]) -> str:
    shown: dict[str, float | str] = {"reward": values.get("rollout/root_reward", float("nan"))}
    if "recovery/reward" in values:
        shown["recovery"] = values["recovery/reward"]
    if values.get("train/skipped"):
        shown["update"] = "skipped"
    shown |= {
        name: values[key]
        for name, key in (
            ("entropy", "train/entropy"),
            ("tokens/attempt", "rollout/tokens_per_attempt"),
            ("Δlogprob", "train/logprob_diff_mean"),
        )
        if key in values
    }
    shown |= {
        "s/step": float(np.mean(durations)),
        "eta": format_seconds((config.steps - step - 1) * float(np.mean(durations))),
    }
    return format_progress("rl", step + 1, config.steps, shown)
