import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.losses.aggregation import segment_sum, token_weights

MASK = jnp.array([[1, 1, 0, 1, 0], [0, 1, 1, 1, 0]], bool)
SEGMENTS = jnp.array([[1, 1, 2, 2, 0], [1, 1, 1, 1, 0]])
LOSS = jnp.arange(10.0).reshape(2, 5)


def aggregated(weights, **options):
    token, denominator = token_weights(MASK, SEGMENTS, weights, **options)
    return float(jnp.sum(token * LOSS) / denominator)


def test_modes_on_documents_of_different_length():
    ones = jnp.ones((2, 5))
    # documents: row 0 has losses {0, 1} and {3}, row 1 has {6, 7, 8}
    assert aggregated(ones, mode="token") == pytest.approx((0 + 1 + 3 + 6 + 7 + 8) / 6)
    assert aggregated(ones, mode="sequence") == pytest.approx((0.5 + 3 + 7) / 3)
    assert aggregated(ones, mode="constant", max_length=10) == pytest.approx(25 / (3 * 10))


@pytest.mark.parametrize("mode", ["token", "sequence", "constant"])
def test_a_weight_common_to_all_documents_changes_nothing(mode):
    one = aggregated(jnp.ones((2, 5)), mode=mode, max_length=10)
    assert aggregated(jnp.full((2, 5), 3.0), mode=mode, max_length=10) == pytest.approx(one)


def test_weights_mix_documents():
    weights = jnp.array([[1.0] * 5, [3.0] * 5])
    assert aggregated(weights, mode="sequence") == pytest.approx((0.5 + 3 + 3 * 7) / 5)


def test_no_loss_tokens_do_not_divide_by_zero():
    _, denominator = token_weights(jnp.zeros((1, 4), bool), jnp.ones((1, 4), int), jnp.ones((1, 4)))
    assert denominator == 1


def test_segment_sum_stays_within_documents():
    np.testing.assert_allclose(segment_sum(LOSS, SEGMENTS), [[1, 1, 5, 5, 4], [26, 26, 26, 26, 9]])


@pytest.mark.parametrize(("options", "message"), [({"mode": "mean"}, "'mean'"), ({"mode": "constant"}, "max_length")])
def test_unknown_or_incomplete_modes_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        aggregated(jnp.ones((2, 5)), **options)
