import numpy as np
import pytest

from reterm_jax.losses.advantages import group_advantages


def test_centred_within_each_group():
    advantages = group_advantages([1, 0, 0, 0, 1, 1], [7, 7, 7, 7, 3, 3])
    np.testing.assert_allclose(advantages, [0.75, -0.25, -0.25, -0.25, 0, 0])
    assert advantages.dtype == np.float32


def test_ungraded_attempts_get_nothing_and_do_not_move_the_baseline():
    with_failure = group_advantages([1, 0, np.nan], ["a", "a", "a"], [True, True, False])
    np.testing.assert_allclose(with_failure, [0.5, -0.5, 0.0])
    # Scored 0, it would have been [2/3, -1/3, -1/3].


@pytest.mark.parametrize("options", [{}, {"standardise": True}, {"baseline": "leave_one_out"}, {"baseline": "length"}])
@pytest.mark.parametrize(
    ("rewards", "graded"), [([1.0], None), ([0.1, 0.1, 0.1], None), ([1.0, 0.0], [True, False]), ([], None)]
)
def test_no_spread_gives_zero_never_nan(options, rewards, graded):
    if "baseline" in options:
        options = {**options, "lengths": np.zeros(len(rewards))}  # no attempt sampled a token
    advantages = group_advantages(rewards, [0] * len(rewards), graded, **options)
    np.testing.assert_array_equal(advantages, np.zeros(len(rewards)))


def test_leave_one_out_uses_the_mean_of_the_others():
    rewards = np.array([1.0, 0.0, 0.5, 0.25])
    expected = [r - np.delete(rewards, i).mean() for i, r in enumerate(rewards)]
    np.testing.assert_allclose(group_advantages(rewards, np.zeros(4), baseline="leave_one_out"), expected, rtol=1e-6)


def test_the_length_aware_baseline_weighs_rewards_by_tokens_in_each_group():
    rewards, lengths = [1, 0, 0, 1, np.nan, 0], [10, 30, 40, 7, 1000, 1]
    graded = [True, True, True, True, False, True]
    advantages = group_advantages(rewards, [0, 0, 0, 1, 1, 1], graded, baseline="length", lengths=lengths)
    np.testing.assert_allclose(advantages, [1 - 1 / 8, -1 / 8, -1 / 8, 1 / 8, 0, -7 / 8], rtol=1e-6)
    weighted = advantages[:3] * lengths[:3]
    assert abs(weighted.sum()) < 1e-4  # what makes it the baseline of least variance


@pytest.mark.parametrize(
    ("options", "said"),
    [({"baseline": "median"}, "'median' is unknown; one of mean"), ({"baseline": "length"}, "needs")],
)
def test_a_baseline_that_cannot_be_is_named(options, said):
    with pytest.raises(ValueError, match=said):
        group_advantages([1, 0], [0, 0], **options)


def test_standardised_advantages_have_unit_deviation():
    advantages = group_advantages([1, 0, 0, 0], np.zeros(4), standardise=True)
    np.testing.assert_allclose([advantages.mean(), advantages.std()], [0, 1], atol=1e-6)


def test_a_graded_reward_must_be_finite():
    with pytest.raises(ValueError, match="index 1 is nan"):
        group_advantages([1, np.nan], [0, 0])


def test_lengths_must_agree():
    with pytest.raises(ValueError, match="one length"):
        group_advantages([1, 0], [0])
