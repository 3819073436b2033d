"""Sampler and trainer compute the same policy with other kernels and precisions: how far apart, and what to do.

μ are the sampler's probabilities of the tokens of one attempt, π those of the trainer with the same weights. These
functions are numpy: they see each attempt once a step, before its updates.
"""

from collections.abc import Sequence

import numpy as np

LEVELS = ("none", "token", "sequence")
MODES = ("capped", "masked")
_MAX_LOG_RATIO = 20.0
BAND = (0.9, 1.1)


def correction(
    logprobs_T: np.ndarray, sampler_T: np.ndarray, mask_T: np.ndarray, *, level: str, mode: str, cap: float
) -> np.ndarray:
    """Importance weights w = π/μ of the tokens of one attempt, float32 [T]; 1 off the mask.

    Args:
        level: "token": each token's own ratio. "sequence": the product over the attempt's loss tokens, for all of them.
        mode: "capped": min(w, cap), truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly
            Brings You Off-Policy RL Training", 2025). "masked": w where 1/cap ≤ w ≤ cap, else 0, so that what
            disagrees does not train at all (IcePop, arXiv 2510.18855).
        cap: above 1.

    Raises:
        ValueError: for an unknown level or mode, or a cap of 1 or less.
    """
    if level not in LEVELS[1:] or mode not in MODES or not cap > 1:
        raise ValueError(
            f"level {level!r} must be one of {', '.join(LEVELS[1:])}, mode {mode!r} one of {', '.join(MODES)}, "
            f"and cap {cap} above 1"
        )
    difference_T = np.where(mask_T, np.float64(logprobs_T) - sampler_T, 0.0)
    if level == "sequence":
        difference_T = np.where(mask_T, difference_T.sum(), 0.0)
    weight_T = np.exp(np.clip(difference_T, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    if mode == "capped":
        return np.minimum(weight_T, cap).astype(np.float32)
    # The bounds themselves are inside, whatever exp and division round to.
    return np.where(np.abs(difference_T) <= np.log(cap) + 1e-9, weight_T, 0.0).astype(np.float32)


def mismatch_metrics(differences: Sequence[np.ndarray]) -> dict[str, float]:
    """Metrics over log π − log μ of all loss tokens, given as one vector for each attempt.

    `logprob_diff_{mean,p50,p99,max}` of the magnitude, `kl_sampler` (k3 estimate of KL(μ‖π), as in
    `policy_gradient.sampler_metrics`), `ratio`, and `ratio_outside`, the fraction of tokens whose π/μ is not in
    [0.9, 1.1].
    """
    difference_N = np.concatenate([np.zeros(0), *differences])
    if not len(difference_N):
        return {}
    magnitude_N = np.abs(difference_N)
    ratio_N = np.exp(np.clip(difference_N, -_MAX_LOG_RATIO, _MAX_LOG_RATIO))
    p50, p99 = np.quantile(magnitude_N, [0.5, 0.99])
    return {
        "logprob_diff_mean": float(magnitude_N.mean()),
        "logprob_diff_p50": float(p50),
        "logprob_diff_p99": float(p99),
        "logprob_diff_max": float(magnitude_N.max()),
        "kl_sampler": float((ratio_N - 1 - difference_N).mean()),
        "ratio": float(ratio_N.mean()),
        "ratio_outside": float(((ratio_N < BAND[0]) | (ratio_N > BAND[1])).mean()),
    }
