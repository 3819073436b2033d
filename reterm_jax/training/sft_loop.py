"""Supervised training over packed examples: the base model's warm-up and the cold start on recovery demonstrations.

Which of the two it is, the examples' loss masks decide.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.tokens.packing import Batch, Example, pack
from reterm_jax.training.metrics import MetricsWriter, format_progress, format_seconds
from reterm_jax.training.state import TrainState
from reterm_jax.training.steps import TrainStep
from reterm_jax.training.stopping import GracefulStop


@dataclass(frozen=True)
class SFTConfig:
    """
    Attributes:
        epochs: passes over all examples.
        row_length: tokens in a packed row; the longest example has at most one more.
        rows_per_update: packed rows in an update.
        seed: of the order of rows.
        log_every, checkpoint_every: in updates. The last update is always logged and saved.
    """

    epochs: int = 2
    row_length: int = 2048
    rows_per_update: int = 8
    seed: int = 0
    log_every: int = 10
    checkpoint_every: int = 100

    def __post_init__(self) -> None:
        for field in ("epochs", "row_length", "rows_per_update", "log_every", "checkpoint_every"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")


class PackedEpochs:
    """The batch of every update as a function of (seed, step) alone, so that a resumed run sees the same order."""

    def __init__(self, examples: Sequence[Example], config: SFTConfig) -> None:
        if not examples:
            raise ValueError("there are no examples to train on; collect demonstrations first")
        self._packed, _ = pack(examples, length=config.row_length)
        self._config = config

    @property
    def steps_per_epoch(self) -> int:
        return -(-self._packed.rows // self._config.rows_per_update)

    @property
    def total_steps(self) -> int:
        return self.steps_per_epoch * self._config.epochs

    @property
    def packed(self) -> Batch:
        return self._packed

    def batch(self, step: int) -> Batch:
        """The rows of update `step` (from 0). The last update of an epoch may have fewer rows; it is filled up."""
        epoch, index = divmod(step, self.steps_per_epoch)
        order = np.random.default_rng((self._config.seed, epoch)).permutation(self._packed.rows)
        size = self._config.rows_per_update
        return self._packed.take(order[index * size : (index + 1) * size], count=size)


def run(
    data: PackedEpochs,
    state: TrainState,
    train_step: TrainStep,
    config: SFTConfig,
    *,
    checkpointer: Checkpointer | None,
    metrics: MetricsWriter,
    phase: str = "sft",
    metadata: Mapping[str, Any] | None = None,
    stop: GracefulStop | None = None,
    log: Callable[[str], None] = print,
) -> TrainState:
    """Trains from `state.step` to the last update and returns the final state, which is also saved.

    A state restored at step s continues exactly as a run that was never stopped. `metadata` goes into every
    checkpoint. When `stop` is requested, the state is saved after the update that is running, and KeyboardInterrupt is
    raised. Update n is dispatched before the metrics of n − 1 are read, so that the device does not wait.
    """
    first, total = int(state.step), data.total_steps
    packed = data.packed
    log(
        f"{phase}: {packed.loss_tokens:,} loss tokens in {packed.rows} rows of {packed.length}, "
        f"{packed.padding_fraction:.1%} padding; updates {first} to {total}"
    )
    clock = _Clock(total)
    pending: tuple[int, int, dict[str, Any]] | None = None

    def report(step: int, tokens: int, scalars: dict[str, Any]) -> None:
        scalars = {name: float(value) for name, value in scalars.items()}  # waits for the update
        speed = clock.tick(step, tokens)
        values = metrics.write(
            step, {**scalars, "train/tokens_per_second": speed, "train/epoch": step / data.steps_per_epoch}
        )
        if values["train/skipped"]:
            log(f"{phase}: update {step} was skipped, its gradient is not finite or it has no loss tokens")
        if step % config.log_every == 0 or step == total:
            shown = {"loss": values["train/loss"], "tokens/s": speed, "eta": format_seconds(clock.remaining(step))}
            log(format_progress(phase, step, total, shown))

    for index in range(first, total):
        batch = data.batch(index)
        state, scalars = train_step(state, batch)
        if pending is not None:
            report(*pending)
        pending = (index + 1, batch.used_tokens, scalars)
        stopping = stop is not None and stop.requested
        save = (index + 1) % config.checkpoint_every == 0 or index + 1 == total or stopping
        if save:
            # Written first, so that a checkpoint never lacks the metrics of its own step.
            report(*pending)
            pending = None
            if checkpointer is not None:
                checkpointer.save(index + 1, state, metadata or {})
            if stopping:
                log(f"{phase}: stopped after update {index + 1}; start again to go on from there")
                raise KeyboardInterrupt
    if checkpointer is not None:
        checkpointer.wait()
    return state


class _Clock:
    """Tokens per second and time left, from the time between updates; the first one compiles and is left out."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._last = time.monotonic()
        self._seconds: list[float] = []
        self._compiled = False

    def tick(self, step: int, tokens: int) -> float:
        now = time.monotonic()
        elapsed, self._last = now - self._last, now
        if self._compiled or step == self._total:
            self._seconds = (self._seconds + [elapsed])[-20:]
        self._compiled = True
        return tokens / max(elapsed, 1e-9)

    def remaining(self, step: int) -> float:
        if not self._seconds:
            return 0.0
        return (self._total - step) * sum(self._seconds) / len(self._seconds)
