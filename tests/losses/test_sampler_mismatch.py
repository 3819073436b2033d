import numpy as np
import pytest

from reterm_jax.losses.sampler_mismatch import correction, mismatch_metrics

SAMPLER = np.log([0.9, 0.5, 0.5, 0.1])
TRAINER = np.log([0.1, 1.0, 0.25, 0.8])  # ratios 2, 0.5, 8 on the mask
MASK = np.array([False, True, True, True])


@pytest.mark.parametrize(
    ("level", "mode", "cap", "expected"),
    [
        ("token", "capped", 4.0, [1, 2, 0.5, 4]),
        ("token", "masked", 4.0, [1, 2, 0.5, 0]),
        ("token", "masked", 2.0, [1, 2, 0.5, 0]),
        ("token", "masked", 1.5, [1, 0, 0, 0]),
        ("sequence", "capped", 4.0, [1, 4, 4, 4]),  # the product is 8
        ("sequence", "capped", 9.0, [1, 8, 8, 8]),
        ("sequence", "masked", 4.0, [1, 0, 0, 0]),
        ("sequence", "masked", 9.0, [1, 8, 8, 8]),
    ],
)
def test_hand_worked_weights(level, mode, cap, expected):
    np.testing.assert_allclose(correction(TRAINER, SAMPLER, MASK, level=level, mode=mode, cap=cap), expected, rtol=1e-6)


@pytest.mark.parametrize("options", [("none", "capped", 2.0), ("token", "clip", 2.0), ("token", "capped", 1.0)])
def test_what_cannot_be_is_named(options):
    with pytest.raises(ValueError, match="must be one of token, sequence"):
        correction(TRAINER, SAMPLER, MASK, **dict(zip(("level", "mode", "cap"), options, strict=True)))


def test_metrics_over_the_tokens_of_all_attempts():
    gaps = [np.log([1.0, 1.05, 0.95]), np.log([2.0]), np.array([])]
    found = mismatch_metrics(gaps)
    magnitudes = np.abs(np.log([1.0, 1.05, 0.95, 2.0]))
    assert found["logprob_diff_mean"] == pytest.approx(magnitudes.mean())
    assert found["logprob_diff_max"] == pytest.approx(np.log(2))
    assert found["logprob_diff_p50"] == pytest.approx(np.median(magnitudes))
    assert found["logprob_diff_p99"] == pytest.approx(np.quantile(magnitudes, 0.99))
    assert found["ratio_outside"] == 0.25 and found["ratio"] == pytest.approx(1.25)
    assert found["kl_sampler"] == pytest.approx(0.25 - np.log([1.05, 0.95, 2.0]).sum() / 4)
    assert mismatch_metrics([]) == {}
