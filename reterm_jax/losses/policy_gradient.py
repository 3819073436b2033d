"""Policy-gradient objectives: pure functions of log-probabilities, chosen by name or by import path.

Every objective has the signature

    objective(logprobs_BT, old_logprobs_BT, advantages_BT, mask_BT, *, segments_BT, **hyper) -> (loss_BT, metrics)

`old_logprobs_BT` are the sampler's (μ), `logprobs_BT` the trained policy's (π), both at the sampling temperature.
`loss_BT` is 0 where the mask is false. `metrics` maps a name to a [B,T] array, which the step averages over the loss
tokens of the update (or takes the largest of, if the name ends in `_max`). Below, ratio = π/μ of a token and A its
advantage. To try another one, write such a function in any file and name it `path/to/file.py:function`.
"""

import functools
import importlib
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from reterm_jax.losses.aggregation import segment_sum

Metrics = dict[str, jax.Array]
Objective = Callable[..., tuple[jax.Array, Metrics]]

# exp(20) still leaves room for the product with an advantage; a larger gap means that the sampler is broken.
_MAX_LOG_RATIO = 20.0


def ppo_clip(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    segments_BT: jax.Array,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    clip_dual: float = 0.0,
) -> tuple[jax.Array, Metrics]:
    """−min(ratio·A, clip(ratio, 1−clip_low, 1+clip_high)·A): PPO (arXiv 1707.06347).

    The upper side is wider, so that rare tokens can become likely (clip-higher of DAPO, arXiv 2503.14476).
    With `clip_dual` = c > 1 the loss of a token with A < 0 is at most −c·A, where its gradient ends: a token that has
    become far likelier than it was, and is bad, cannot dominate an update (dual-clip PPO, arXiv 1912.09729).
    """
    del segments_BT
    if clip_dual and not clip_dual > 1:
        raise ValueError(f"clip_dual must be above 1, or 0 to have none, got {clip_dual}")
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    clipped_BT = jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high)
    loss_BT = -jnp.minimum(ratio_BT * advantages_BT, clipped_BT * advantages_BT)
    outside_BT = clipped_BT * advantages_BT < ratio_BT * advantages_BT
    if clip_dual:
        too_far_BT = (advantages_BT < 0) & (ratio_BT > clip_dual)
        loss_BT = jnp.where(too_far_BT, -clip_dual * advantages_BT, loss_BT)
        outside_BT |= too_far_BT
    return loss_BT * mask_BT, {"clip_fraction": outside_BT.astype(jnp.float32)}


def reinforce(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    segments_BT: jax.Array,
    max_ratio: float = 2.0,
) -> tuple[jax.Array, Metrics]:
    """−sg(min(ratio, max_ratio))·A·log π: REINFORCE (Williams, 1992) with a truncated importance weight.

    The weight corrects for a sampler that is not the trained policy (older weights, other kernels).
    """
    del segments_BT
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    weight_BT = lax.stop_gradient(jnp.minimum(ratio_BT, max_ratio))
    return -weight_BT * advantages_BT * logprobs_BT * mask_BT, {
        "clip_fraction": (ratio_BT > max_ratio).astype(jnp.float32)
    }


def dppo_tv(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    segments_BT: jax.Array,
    delta: float = 0.1,
) -> tuple[jax.Array, Metrics]:
    """−ratio·A, except where |μ−π| > delta and the update would push further away: DPPO-TV (arXiv 2602.04879).

    |μ−π| of the sampled token bounds its share of the total variation; unlike a ratio it does not punish rare tokens.
    """
    del segments_BT
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    gap_BT = lax.stop_gradient(jnp.exp(logprobs_BT) - jnp.exp(old_logprobs_BT))
    masked_BT = (jnp.abs(gap_BT) > delta) & (gap_BT * advantages_BT > 0)
    return -ratio_BT * advantages_BT * ~masked_BT * mask_BT, {"clip_fraction": masked_BT.astype(jnp.float32)}


def cispo(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    segments_BT: jax.Array,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> tuple[jax.Array, Metrics]:
    """−sg(clip(ratio, 1−clip_low, 1+clip_high))·A·log π: CISPO (MiniMax-M1, arXiv 2506.13585).

    Unlike with PPO's clip no token loses its gradient. The paper leaves the lower side open (clip_low 1 does) and
    tunes the upper one.
    """
    del segments_BT
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    weight_BT = lax.stop_gradient(jnp.clip(ratio_BT, 1.0 - clip_low, 1.0 + clip_high))
    return -weight_BT * advantages_BT * logprobs_BT * mask_BT, {
        "clip_fraction": (weight_BT != ratio_BT).astype(jnp.float32)
    }


def gspo(
    logprobs_BT: jax.Array,
    old_logprobs_BT: jax.Array,
    advantages_BT: jax.Array,
    mask_BT: jax.Array,
    *,
    segments_BT: jax.Array,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> tuple[jax.Array, Metrics]:
    """PPO's clip on one ratio per document, s = exp(its mean of log π − log μ): GSPO (arXiv 2507.18071).

    Meant for aggregation "sequence", with which the mean over tokens of the constant s is s itself.
    """
    log_ratio_BT = (logprobs_BT - old_logprobs_BT) * mask_BT
    count_BT = jnp.maximum(segment_sum(mask_BT.astype(jnp.float32), segments_BT), 1.0)
    mean_BT = segment_sum(log_ratio_BT, segments_BT) / count_BT
    return ppo_clip(
        mean_BT,
        jnp.zeros_like(mean_BT),
        advantages_BT,
        mask_BT,
        segments_BT=segments_BT,
        clip_low=clip_low,
        clip_high=clip_high,
    )


OBJECTIVES: Mapping[str, Objective] = {f.__name__: f for f in (ppo_clip, reinforce, dppo_tv, cispo, gspo)}


def sampler_metrics(logprobs_BT: jax.Array, old_logprobs_BT: jax.Array, mask_BT: jax.Array) -> Metrics:
    """How far the trained policy is from the sampler, per token: k3 estimate of KL(μ‖π), ratio, whether the
    ratio is outside [0.9, 1.1], and |Δ logprob|.

    k3 = ratio − 1 − log ratio (Schulman, "Approximating KL Divergence", 2020): unbiased and never negative.
    """
    difference_BT = (logprobs_BT - old_logprobs_BT) * mask_BT
    ratio_BT = _ratio(logprobs_BT, old_logprobs_BT, mask_BT)
    magnitude_BT = jnp.abs(difference_BT)
    return {
        "kl_sampler": ratio_BT - 1.0 - difference_BT,
        "ratio": ratio_BT,
        "ratio_outside": ((ratio_BT < 0.9) | (ratio_BT > 1.1)).astype(jnp.float32),
        "logprob_diff_mean": magnitude_BT,
        "logprob_diff_max": magnitude_BT,
    }


def load_objective(name: str, hyper: Mapping[str, Any] | None = None) -> Objective:
    """The objective called `name`, with `hyper` bound to it.

    Args:
        name: a key of `OBJECTIVES`, `package.module:function`, or `path/to/file.py:function`.
        hyper: keyword arguments such as {"clip_low": 0.2}.

    Raises:
        ValueError: if there is no such objective, or it does not take one of the hyper-parameters.
    """
    function = OBJECTIVES.get(name) or _import_objective(name)
    hyper = dict(hyper or {})
    try:
        inspect.signature(function).bind(None, None, None, None, segments_BT=None, **hyper)
        one = jnp.zeros((1, 1))
        jax.eval_shape(lambda: function(one, one, one, one > 0, segments_BT=jnp.ones((1, 1), int), **hyper))
    except TypeError as error:
        raise ValueError(
            f"objective {name!r} cannot be called as objective(logprobs, old_logprobs, advantages, mask, "
            f"segments_BT=..., **{hyper}): {error}"
        ) from None
    return functools.partial(function, **hyper)


def _import_objective(name: str) -> Objective:
    module_name, separator, attribute = name.rpartition(":")
    if not separator:
        raise ValueError(
            f"objective {name!r} is unknown; one of {', '.join(sorted(OBJECTIVES))}, or 'path/to/file.py:function'"
        )
    if module_name.endswith(".py"):
        path = Path(module_name)
        if not path.is_file():
            raise ValueError(f"objective {name!r}: there is no file {path.resolve()}")
        spec = importlib.util.spec_from_file_location(f"reterm_objective_{path.stem}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    else:
        try:
            module = importlib.import_module(module_name)
        except ModuleNotFoundError as error:
            raise ValueError(
                f"objective {name!r}: {error}; give a module that can be imported, or a .py file"
            ) from None
    function = getattr(module, attribute, None)
    if not callable(function):
        raise ValueError(f"objective {name!r}: {module_name} has no function {attribute!r}")
    return function


def _ratio(logprobs_BT: jax.Array, old_logprobs_BT: jax.Array, mask_BT: jax.Array) -> jax.Array:
    """π/μ, and 1 off the mask, where μ is not known and an overflow would turn a zero gradient into NaN."""
    log_ratio_BT = jnp.where(mask_BT, logprobs_BT - old_logprobs_BT, 0.0)
    return jnp.exp(jnp.clip(log_ratio_BT, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
