"""Pass@k, recovery rates and differences, each with a 95 % interval.

Attempts at one task resemble each other, so the task (or the failure state) is the unit that is resampled, never the
attempt: an interval over attempts would be too narrow. Attempts that were not graded are left out and counted.

Sources
  Wilson interval: E. B. Wilson, "Probable inference, the law of succession, and statistical inference", 1927.
  Unbiased pass@k: Chen et al., "Evaluating large language models trained on code", 2021, equation 1.
  Percentile interval and its expansion for few units (t quantile and n/(n-1) variance): T. Hesterberg, "What teachers
    should know about the bootstrap", 2015, section 3.3.
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from statistics import NormalDist
from typing import Protocol

import numpy as np
from scipy.special import stdtrit

_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(0.975)
_CHUNK = 1000


class Graded(Protocol):
    """What the estimates read of an attempt: a reward of 1 or more is a success, None or NaN is not graded."""

    @property
    def task_id(self) -> str: ...
    @property
    def parent(self) -> str | None: ...
    @property
    def reward(self) -> float | None: ...


@dataclasses.dataclass(frozen=True)
class Estimate:
    """A value with its 95 % interval.

    `units` counts tasks, failure states or runs, `n` graded attempts, `excluded` attempts left out: not graded, or of
    a unit that could not be used. `method` is `wilson`, `bootstrap`, `runs`, or `none` where nothing was graded (value
    is NaN).
    """

    value: float
    low: float
    high: float
    units: int
    n: int
    excluded: int
    method: str

    def __str__(self) -> str:
        return "n/a" if self.units == 0 else f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"

    def signed(self) -> str:
        return "n/a" if self.units == 0 else f"{self.value:+.2f} [{self.low:+.2f}, {self.high:+.2f}]"


def wilson(successes: float, n: int) -> tuple[float, float]:
    """95 % Wilson interval of a proportion; unlike the normal one it is sound at 0 and at 1."""
    if n < 1:
        raise ValueError(f"wilson needs at least one trial, got n={n}")
    p = successes / n
    centre = (p + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z / (1 + _Z**2 / n) * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n**2))
    return max(0.0, min(p, centre - half)), min(1.0, max(p, centre + half))


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the chance that one of k attempts succeeds, from c successes in n attempts."""
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    return 1.0 - math.prod((n - c - i) / (n - i) for i in range(k))


def pass_at_1(attempts: Iterable[Graded], *, seed: int = 0, resamples: int = 10_000) -> Estimate:
    """Mean over tasks of each task's success rate.

    The interval is Wilson's where each task has one graded attempt, else a bootstrap over tasks.
    """
    return mean_pass_at_k(attempts, 1, seed=seed, resamples=resamples)


def mean_pass_at_k(attempts: Iterable[Graded], k: int, *, seed: int = 0, resamples: int = 10_000) -> Estimate:
    """Mean over tasks of the unbiased pass@k; tasks with fewer than k graded attempts are left out and counted."""
    graded, excluded = _group(attempts, lambda attempt: attempt.task_id)
    used = {task: results for task, results in graded.items() if len(results) >= k}
    excluded += sum(len(results) for task, results in graded.items() if task not in used)
    values = [pass_at_k(len(results), sum(results), k) for results in used.values()]
    n = sum(len(results) for results in used.values())
    return _estimate(values, list(used), n, excluded, seed, resamples)


def recovery_rate(
    recoveries: Iterable[Graded], states: Iterable[str] | None = None, *, seed: int = 0, resamples: int = 10_000
) -> Estimate:
    """Mean over failure states of the fraction of their forks that succeed.

    The bootstrap runs over states; states of one task are drawn together, because they fail alike.

    Args:
        recoveries: attempts whose `parent` is the id of the state that they started from.
        states: the fixed set of states that all compared policies were given; None takes those that occur.

    Raises:
        ValueError: a recovery has no parent, or one outside `states`.
    """
    recoveries = list(recoveries)
    known = None if states is None else set(states)
    for attempt in recoveries:
        if attempt.parent is None:
            raise ValueError(f"a recovery of task {attempt.task_id!r} names no failure state in `parent`")
        if known is not None and attempt.parent not in known:
            raise ValueError(f"task {attempt.task_id!r}: state {attempt.parent!r} is not in the fixed set of states")
    graded, excluded = _group(recoveries, lambda attempt: attempt.parent)
    task_of = {attempt.parent: attempt.task_id for attempt in recoveries}
    values = [sum(results) / len(results) for results in graded.values()]
    n = sum(len(results) for results in graded.values())
    return _estimate(values, [task_of[state] for state in graded], n, excluded, seed, resamples)


def paired_difference(
    before: Iterable[Graded],
    after: Iterable[Graded],
    *,
    by: str = "task_id",
    seed: int = 0,
    resamples: int = 10_000,
) -> Estimate:
    """Success rate of `after` minus that of `before` on the units that both have.

    Pairing takes the units' difficulty out of the interval. `by` is `task_id` for Pass@1 and `parent` for recovery
    rates; units of one task are resampled together. Units that one side lacks are left out, and their attempts counted
    in `excluded`.
    """
    before, after = list(before), list(after)
    task_of = {getattr(attempt, by): attempt.task_id for attempt in before}
    sides = [_group(attempts, lambda attempt: getattr(attempt, by)) for attempts in (before, after)]
    (old, old_excluded), (new, new_excluded) = sides
    shared = [unit for unit in old if unit in new]
    unpaired = sum(len(results) for side in (old, new) for unit, results in side.items() if unit not in shared)
    excluded = old_excluded + new_excluded + unpaired
    n = sum(len(old[unit]) + len(new[unit]) for unit in shared)
    if not shared:
        return _nothing(excluded)
    values_U = np.array([np.mean(new[unit]) - np.mean(old[unit]) for unit in shared])
    value = float(values_U.mean())
    tasks = [task_of[unit] for unit in shared]
    if np.ptp(values_U) == 0 or len(set(tasks)) == 1:
        # No spread to resample. How often an unseen unit could still differ is bounded as for zero events.
        slack = wilson(0, len(set(tasks)))[1]
        low, high = max(-1.0, value - slack), min(1.0, value + slack)
    else:
        low, high = _bootstrap(values_U, tasks, seed, resamples)
    return Estimate(value, low, high, len(shared), n, excluded, "bootstrap")


def over_runs(runs: Sequence[Estimate], *, rate: bool = False) -> Estimate:
    """The mean of several training runs' values, with Student's interval over the runs.

    It says what other runs of the same training would give, which an interval over one run's tasks does not. Runs
    without a value are left out; the interval of a single run is the whole range that there is.

    Args:
        rate: whether the values are rates, which lie between 0 and 1, or differences of rates.
    """
    known = [run for run in runs if run.units]
    if not known:
        return _nothing(sum(run.excluded for run in runs))
    values_R = np.array([run.value for run in known])
    value, count = float(values_R.mean()), len(values_R)
    half = _t_quantile(count - 1) * float(values_R.std(ddof=1)) / math.sqrt(count) if count > 1 else math.inf
    low, high = max(0.0 if rate else -1.0, value - half), min(1.0, value + half)
    return Estimate(value, low, high, count, sum(r.n for r in known), sum(r.excluded for r in runs), "runs")


def _group(attempts: Iterable[Graded], unit) -> tuple[dict[str, list[bool]], int]:
    """Verdicts by unit, in order of first appearance, and how many attempts were not graded."""
    groups: dict[str, list[bool]] = {}
    excluded = 0
    for attempt in attempts:
        if attempt.reward is None or not math.isfinite(attempt.reward):
            excluded += 1
        else:
            groups.setdefault(unit(attempt), []).append(attempt.reward >= 1)
    return groups, excluded


def _nothing(excluded: int) -> Estimate:
    return Estimate(math.nan, math.nan, math.nan, 0, 0, excluded, "none")


def _estimate(
    values: Sequence[float], clusters: Sequence[str], n: int, excluded: int, seed: int, resamples: int
) -> Estimate:
    if not values:
        return _nothing(excluded)
    values_U = np.array(values)
    value = float(values_U.mean())
    independent = len(set(clusters))
    binary = n == len(values) == independent
    if binary or np.ptp(values_U) == 0 or independent == 1:
        # Without spread between units a bootstrap would claim certainty; each unit then counts as one trial.
        low, high = wilson(value * independent, independent)
        return Estimate(value, low, high, len(values), n, excluded, "wilson")
    low, high = _bootstrap(values_U, clusters, seed, resamples)
    return Estimate(value, max(0.0, low), min(1.0, high), len(values), n, excluded, "bootstrap")


def _bootstrap(values_U: np.ndarray, clusters: Sequence[str], seed: int, resamples: int) -> tuple[float, float]:
    """Expanded percentile interval of the mean over units, whole clusters (at least two) drawn with replacement."""
    names: Mapping[str, int] = {name: i for i, name in enumerate(dict.fromkeys(clusters))}
    index_U = np.array([names[name] for name in clusters])
    count = len(names)
    sums_C = np.bincount(index_U, weights=values_U, minlength=count)
    sizes_C = np.bincount(index_U, minlength=count)
    rng = np.random.default_rng(seed)
    means = []
    for start in range(0, resamples, _CHUNK):
        drawn_RC = rng.integers(count, size=(min(_CHUNK, resamples - start), count))
        means.append(sums_C[drawn_RC].sum(1) / sizes_C[drawn_RC].sum(1))
    tail = _NORMAL.cdf(-math.sqrt(count / (count - 1)) * _t_quantile(count - 1))
    low, high = np.quantile(np.concatenate(means), [tail, 1 - tail])
    return float(low), float(high)


def _t_quantile(df: int) -> float:
    """The 0.975 quantile of Student's t."""
    return float(stdtrit(df, 0.975))
