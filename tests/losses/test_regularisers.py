"""Estimates of the KL to a reference: values, and gradients against the KL of whole distributions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.losses.regularisers import kl_to_reference

MASK = jnp.array([[True, True, False]])
LOGPROBS = jnp.log(jnp.array([[0.5, 0.2, 0.9]]))
REFERENCE = jnp.log(jnp.array([[0.25, 0.4, 1e-9]]))


def test_hand_worked_values():
    log2 = np.log(2)
    k1 = kl_to_reference(LOGPROBS, REFERENCE, MASK, estimate="k1")
    np.testing.assert_allclose(k1, [[log2, -log2, 0]], rtol=1e-6)
    k3 = kl_to_reference(LOGPROBS, REFERENCE, MASK, estimate="k3")
    np.testing.assert_allclose(k3, [[0.5 + log2 - 1, 2 - log2 - 1, 0]], rtol=1e-6)


def test_the_gradient_of_k3_is_its_finite_difference():
    def total(logprobs):
        return kl_to_reference(logprobs, REFERENCE, MASK, estimate="k3").sum()

    step = 1e-2
    for place in range(3):
        shift = jnp.zeros((1, 3)).at[0, place].set(step)
        slope = (total(LOGPROBS + shift) - total(LOGPROBS - shift)) / (2 * step)
        np.testing.assert_allclose(jax.grad(total)(LOGPROBS)[0, place], slope, rtol=1e-3, atol=1e-4)


def test_the_gradient_of_k1_is_in_expectation_that_of_the_kl():
    """Summed over every outcome with its probability, which is what on-policy sampling does on average."""
    logits, reference = jnp.array([0.3, -1.0, 0.7, 0.1]), jax.nn.log_softmax(jnp.array([1.0, 0.2, -0.5, 0.0]))
    probs = jax.nn.softmax(logits)

    def exact(logits):
        logp = jax.nn.log_softmax(logits)
        return jnp.sum(jnp.exp(logp) * (logp - reference))

    def sampled(logits):
        estimates = kl_to_reference(
            jax.nn.log_softmax(logits)[None], reference[None], jnp.ones((1, 4), bool), estimate="k1"
        )
        return jnp.sum(probs * estimates[0])

    np.testing.assert_allclose(sampled(logits), exact(logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(sampled)(logits), jax.grad(exact)(logits), atol=1e-6)


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_far_apart_it_stays_finite(estimate):
    far = jnp.array([[-1e4, 0.0]])
    value, grad = jax.value_and_grad(
        lambda x: kl_to_reference(x, -far, jnp.array([[True, False]]), estimate=estimate).sum()
    )(far)
    assert np.isfinite(value) and np.isfinite(grad).all() and grad[0, 1] == 0


def test_an_unknown_estimate_is_named():
    with pytest.raises(ValueError, match="'k2' is unknown; one of k1, k3"):
        kl_to_reference(LOGPROBS, REFERENCE, MASK, estimate="k2")
