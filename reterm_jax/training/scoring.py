"""What the trainer computes once a step, before its updates: its own logprobs of the sampled tokens, and a reference's.

Each is one forward pass over the examples of the step, and neither is made unless a setting needs it. The reference is
the policy that RL started from. Its parameters are kept for the whole run, 4 bytes each in float32, sharded like those
that are trained (a run from `training.pipeline` holds them anyway, to evaluate them at the end); nothing else is kept.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from reterm_jax.losses import sampler_mismatch
from reterm_jax.tokens.forking import pack_forked
from reterm_jax.tokens.packing import Batch, Example, pack

# (params, batch) -> (logprobs [B,T], entropy [B,T]), from `steps.make_score`.
Score = Callable[[Any, Batch], tuple[np.ndarray, np.ndarray]]


@dataclasses.dataclass(frozen=True)
class ScoringConfig:
    """
    Attributes:
        reference: whether a KL to the reference is in the loss.
        correction, correction_mode, correction_cap: see `sampler_mismatch.correction`. With a correction the
            objective's ratio is against the trainer's own logprobs at the start of the step, and the weight π/μ goes
            on the advantages; with "none" the ratio is against the sampler's μ, which corrects for both at once.
        max_mismatch: an attempt whose mean |log π − log μ| is above it is dropped, and counted; 0 drops none.
    """

    reference: bool = False
    correction: str = "none"
    correction_mode: str = "capped"
    correction_cap: float = 2.0
    max_mismatch: float = 0.0

    def __post_init__(self) -> None:
        if self.correction not in sampler_mismatch.LEVELS:
            levels = ", ".join(sampler_mismatch.LEVELS)
            raise ValueError(f"sampler_correction {self.correction!r} is unknown; one of {levels}")
        if self.correction_mode not in sampler_mismatch.MODES:
            modes = ", ".join(sampler_mismatch.MODES)
            raise ValueError(f"correction_mode {self.correction_mode!r} is unknown; one of {modes}")
        if not self.correction_cap > 1:
            raise ValueError(f"correction_cap must be above 1, got {self.correction_cap}")
        if self.max_mismatch < 0:
            raise ValueError(f"max_mismatch must not be negative, got {self.max_mismatch}")

    @property
    def own(self) -> bool:
        """Whether the trainer's own logprobs are needed before the updates."""
        return self.correction != "none" or self.max_mismatch > 0


@dataclasses.dataclass(frozen=True)
class Scorer:
    """Gives the examples of a step what `config` asks for."""

    config: ScoringConfig
    score: Score
    reference_params: Any

    def __call__(
        self, params: Any, examples: Sequence[Example], *, length: int, forked: bool
    ) -> tuple[list[Example], dict[str, float]]:
        """The examples to train on, and metrics of the mismatch where the trainer's own logprobs were computed."""
        config, examples, metrics = self.config, list(examples), {}
        if config.own and examples:
            own = score_examples(self.score, params, examples, length=length, forked=forked)
            gaps = [(own_T - e.old_logprobs)[e.loss_mask] for e, own_T in zip(examples, own, strict=True)]
            metrics = sampler_mismatch.mismatch_metrics(gaps)
            far = [bool(config.max_mismatch) and np.abs(gap).mean() > config.max_mismatch for gap in gaps]
            metrics["mismatch_dropped"] = float(sum(far))
            examples = [
                self._corrected(example, own_T)
                for example, own_T, is_far in zip(examples, own, far, strict=True)
                if not is_far
            ]
        if config.reference and examples:
            reference = score_examples(self.score, self.reference_params, examples, length=length, forked=forked)
            examples = [
                dataclasses.replace(example, ref_logprobs=reference_T)
                for example, reference_T in zip(examples, reference, strict=True)
            ]
        return examples, {f"train/{name}": value for name, value in metrics.items()}

    def _corrected(self, example: Example, own_T: np.ndarray) -> Example:
        config = self.config
        if config.correction == "none":
            return example
        weight_T = sampler_mismatch.correction(
            own_T,
            example.old_logprobs,
            example.loss_mask,
            level=config.correction,
            mode=config.correction_mode,
            cap=config.correction_cap,
        )
        # Every objective is linear in a positive factor on the advantage; on the document's weight it would change
        # the denominator too.
        advantage_T = np.asarray(example.advantage * weight_T, np.float32)
        return dataclasses.replace(example, advantage=advantage_T, old_logprobs=own_T)


def score_examples(
    score: Score, params: Any, examples: Sequence[Example], *, length: int, forked: bool
) -> list[np.ndarray]:
    """Logprobs of each example's tokens, [n] float32; 0 where no example is trained on them (a shared beginning)."""
    batch, placements = (pack_forked if forked else pack)(examples, length=length)
    logprobs_BT, _ = score(params, batch)
    scored = []
    for example, place in zip(examples, placements, strict=True):
        logprobs_T = np.zeros(len(example.ids), np.float32)
        logprobs_T[len(logprobs_T) - place.size :] = logprobs_BT[place.row, place.start : place.start + place.size]
        scored.append(logprobs_T)
    return scored
