import itertools
import math

import numpy as np
import pytest
from evaluation_demo import attempt

from reterm_jax.evaluation import statistics


def attempts(rewards_by_task):
    return [attempt(task, reward) for task, rewards in rewards_by_task.items() for reward in rewards]


def test_pass_at_k_is_the_mean_over_all_draws_of_k():
    verdicts = [1, 0, 0, 1, 0, 0]
    for k in range(1, 7):
        draws = list(itertools.combinations(verdicts, k))
        expected = sum(any(draw) for draw in draws) / len(draws)
        assert statistics.pass_at_k(6, 2, k) == pytest.approx(expected)


@pytest.mark.parametrize(("n", "c", "k"), [(2, 0, 3), (2, 3, 1), (2, 1, 0), (0, 0, 1)])
def test_pass_at_k_rejects_impossible_counts(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}, k={k}"):
        statistics.pass_at_k(n, c, k)


def test_wilson_solves_its_defining_equation():
    low, high = statistics.wilson(18, 89)
    z = 1.959964
    for p in (low, high):
        assert (18 / 89 - p) ** 2 == pytest.approx(z**2 * p * (1 - p) / 89, rel=1e-5)
    assert statistics.wilson(0, 20)[0] == 0 and 0.1 < statistics.wilson(0, 20)[1] < 0.2
    assert statistics.wilson(20, 20)[1] == 1


def test_one_attempt_per_task_gives_wilson_on_the_tasks():
    estimate = statistics.pass_at_1(attempts({f"t{i}": [float(i < 3)] for i in range(10)}))
    assert (estimate.value, estimate.method, estimate.units, estimate.n) == (0.3, "wilson", 10, 10)
    assert (estimate.low, estimate.high) == statistics.wilson(3, 10)


def test_ungraded_attempts_are_left_out_and_counted():
    estimate = statistics.pass_at_1(attempts({"a": [1.0, None, math.nan], "b": [0.0, 0.0, 0.5], "c": [None]}))
    assert (estimate.value, estimate.units, estimate.n, estimate.excluded) == (0.5, 2, 4, 3)


def test_nothing_graded_is_not_a_zero():
    estimate = statistics.pass_at_1(attempts({"a": [None, None]}))
    assert (estimate.units, estimate.excluded, str(estimate)) == (0, 2, "n/a") and math.isnan(estimate.value)


def test_tasks_weigh_alike_whatever_their_number_of_attempts():
    assert statistics.pass_at_1(attempts({"a": [1.0], "b": [0.0] * 9})).value == 0.5


def test_interval_is_deterministic_and_wider_than_over_independent_attempts():
    grouped = attempts({f"t{i}": [float(i < 5)] * 8 for i in range(10)})
    estimate = statistics.pass_at_1(grouped, seed=3)
    assert estimate == statistics.pass_at_1(grouped, seed=3)
    naive_low, naive_high = statistics.wilson(40, 80)
    assert estimate.low < naive_low and estimate.high > naive_high


def test_no_spread_does_not_claim_certainty():
    estimate = statistics.pass_at_1(attempts({f"t{i}": [0.0] * 5 for i in range(10)}))
    assert (estimate.value, estimate.low) == (0, 0) and estimate.high > 0.2


def test_interval_covers_the_truth():
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(150):
        rates = rng.beta(0.6, 0.9, size=12)
        sample = attempts({f"t{i}": list((rng.random(3) < p).astype(float)) for i, p in enumerate(rates)})
        estimate = statistics.pass_at_1(sample, resamples=500)
        hits += estimate.low <= 0.4 <= estimate.high
    assert hits / 150 > 0.89


def test_mean_pass_at_k_leaves_out_tasks_with_too_few_attempts():
    estimate = statistics.mean_pass_at_k(attempts({"a": [1.0, 0.0, 0.0], "b": [0.0, 0.0], "c": [1.0]}), 2)
    assert estimate.value == pytest.approx((2 / 3 + 0) / 2)
    assert (estimate.units, estimate.excluded) == (2, 1)


def test_recovery_rate_averages_over_states_and_clusters_by_task():
    def fork(task, state, reward):
        return attempt(task, reward, parent=state)

    one_each = [fork(f"t{i}", f"s{i}", r) for i in range(8) for r in (float(i < 4), float(i < 4))]
    two_tasks = [fork(f"t{i // 4}", f"s{i}", r) for i in range(8) for r in (float(i < 4), float(i < 4))]
    spread, clustered = statistics.recovery_rate(one_each), statistics.recovery_rate(two_tasks)
    assert spread.value == clustered.value == 0.5 and spread.units == clustered.units == 8
    assert clustered.high - clustered.low > spread.high - spread.low


def test_recovery_rate_holds_to_the_fixed_set_of_states():
    forks = [attempt("t", 1.0, parent="s0"), attempt("t", None, parent="s1")]
    estimate = statistics.recovery_rate(forks, ["s0", "s1", "s2"])
    assert (estimate.value, estimate.units, estimate.excluded) == (1.0, 1, 1)
    with pytest.raises(ValueError, match="'s1' is not in the fixed set"):
        statistics.recovery_rate(forks, ["s0"])
    with pytest.raises(ValueError, match="'t' names no failure state"):
        statistics.recovery_rate([attempt("t", 1.0)])


def test_paired_difference_uses_shared_units_only():
    before = attempts({"a": [0.0, 1.0], "b": [0.0, 0.0], "c": [1.0]})
    after = attempts({"a": [1.0, 1.0], "b": [0.0, 0.0], "d": [1.0, None]})
    estimate = statistics.paired_difference(before, after)
    assert (estimate.value, estimate.units, estimate.n, estimate.excluded) == (0.25, 2, 8, 3)
    assert estimate.low < 0.25 < estimate.high and estimate.signed().startswith("+0.25 [")


def test_pairing_narrows_the_interval_and_no_spread_keeps_a_margin():
    before = attempts({f"t{i}": [float(i % 2)] * 2 for i in range(20)})
    same = statistics.paired_difference(before, before)
    assert same.value == 0 and -0.3 < same.low < 0 < same.high < 0.3
    assert statistics.paired_difference([], before).units == 0


def test_paired_recoveries_of_one_task_are_resampled_together():
    def side(task_of, gained):
        return [attempt(task_of(i), float(gained and i < 6), parent=f"s{i}") for i in range(12)]

    apart, together = (lambda i: f"t{i}"), (lambda i: f"t{i // 3}")
    widths = []
    for task_of in (apart, together):
        estimate = statistics.paired_difference(side(task_of, False), side(task_of, True), by="parent")
        assert (estimate.value, estimate.units) == (0.5, 12)
        widths.append(estimate.high - estimate.low)
    assert widths[1] > 1.2 * widths[0]
