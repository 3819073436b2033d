import jax.numpy as jnp
import numpy as np

from reterm_jax.losses.sft import nll


def test_only_masked_tokens_have_a_loss():
    loss, metrics = nll(jnp.array([[-1.0, -2.0, -3.0]]), jnp.array([[True, False, True]]))
    np.testing.assert_allclose(loss, [[1, 0, 3]])
    assert metrics == {}
