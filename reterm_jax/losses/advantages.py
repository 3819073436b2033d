"""Advantages within a group of attempts that share one start state."""

import numpy as np

BASELINES = ("mean", "leave_one_out", "length")


def group_advantages(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    graded: np.ndarray | None = None,
    *,
    baseline: str = "mean",
    lengths: np.ndarray | None = None,
    standardise: bool = False,
) -> np.ndarray:
    """A_i = r_i − b(i's group), the group-relative advantage of GRPO (arXiv 2402.03300).

    An attempt that was not graded (the environment or the verifier failed) gets 0 and does not enter the baseline of
    its group. A group with fewer than two graded attempts, or with no spread of rewards, gets 0 everywhere.

    Args:
        rewards: [N]; values where `graded` is false are ignored and may be NaN.
        group_ids: [N] of anything hashable by `np.unique`.
        graded: [N] bool; all graded if None.
        standardise: divide by the group's standard deviation, as GRPO does. Off by default: it weighs groups that are
            nearly always solved or failed more than balanced ones (Dr. GRPO, arXiv 2503.20783).
        baseline: b. "mean" of the group's rewards; "leave_one_out": the mean of the others (RLOO, arXiv 2402.14740),
            which makes A_i · n/(n−1); "length": Σ l·r / Σ l over the group with the attempts' lengths l, the baseline
            of least variance where the squared norm of an attempt's gradient grows like l (OPO, arXiv 2505.23585).
        lengths: [N] trained tokens, for "length".

    Returns:
        float32 [N], finite.

    Raises:
        ValueError: if shapes differ, a graded reward is not finite, or the baseline is unknown or lacks its lengths.
    """
    if baseline not in BASELINES:
        raise ValueError(f"baseline {baseline!r} is unknown; one of {', '.join(BASELINES)}")
    if baseline == "length" and (lengths is None or np.shape(lengths) != np.shape(rewards)):
        raise ValueError("baseline 'length' needs the length of every attempt")
    rewards = np.asarray(rewards, np.float64)
    group_ids = np.asarray(group_ids)
    graded = np.ones(rewards.shape, bool) if graded is None else np.asarray(graded, bool)
    if not rewards.shape == group_ids.shape == graded.shape or rewards.ndim != 1:
        raise ValueError(
            f"rewards {rewards.shape}, group_ids {group_ids.shape} and graded {graded.shape} must be vectors "
            "of one length"
        )
    if not np.isfinite(rewards[graded]).all():
        where = int(np.flatnonzero(graded & ~np.isfinite(rewards))[0])
        raise ValueError(f"the graded reward at index {where} is {rewards[where]}; mark it as not graded instead")

    advantages = np.zeros(rewards.shape)
    for group in np.unique(group_ids):
        members = graded & (group_ids == group)
        values = rewards[members]
        # The equality test, not the deviation: a mean of equal floats may differ from them in the last bit.
        if len(values) < 2 or (values == values[0]).all():
            continue
        if baseline == "length" and (weights := np.asarray(lengths, np.float64)[members]).sum() > 0:
            centred = values - np.average(values, weights=weights)
        else:
            centred = values - values.mean()
        if baseline == "leave_one_out":
            centred *= len(values) / (len(values) - 1)
        if standardise:
            centred /= values.std()
        advantages[members] = centred
    return advantages.astype(np.float32)
