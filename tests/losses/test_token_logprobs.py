import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from reterm_jax.losses.token_logprobs import token_logprobs

B, T, D, V = 2, 7, 5, 11


def direct(hidden_BTD, head_VD, targets_BT, temperature):
    logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD, head_VD).astype(jnp.float32) / temperature
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    chosen_BT = jnp.take_along_axis(logp_BTV, targets_BT[..., None], -1)[..., 0]
    return chosen_BT, -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, -1)


@pytest.fixture
def inputs():
    keys = jax.random.split(jax.random.key(0), 5)
    hidden_BTD = jax.random.normal(keys[0], (B, T, D))
    head_VD = jax.random.normal(keys[1], (V, D))
    targets_BT = jax.random.randint(keys[2], (B, T), 0, V)
    cotangents = jax.random.normal(keys[3], (B, T)), jax.random.normal(keys[4], (B, T))
    return hidden_BTD, head_VD, targets_BT, cotangents


@pytest.mark.parametrize("chunk", [1, 2, 6, 8, 1000])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients_equal_the_direct_computation(inputs, chunk, temperature):
    hidden, head, targets, cotangents = inputs
    ours, pull = jax.vjp(lambda h, w: token_logprobs(h, w, targets, temperature=temperature, chunk=chunk), hidden, head)
    theirs, pull_direct = jax.vjp(lambda h, w: direct(h, w, targets, temperature), hidden, head)
    np.testing.assert_allclose(ours, theirs, atol=1e-5)
    for a, b in zip(pull(cotangents), pull_direct(cotangents), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=5e-5)


def test_gradient_equals_finite_differences(inputs):
    hidden, head, targets, (dlogprob, dentropy) = inputs

    def loss(h, w):
        logprobs, entropy = token_logprobs(h, w, targets, temperature=0.8, chunk=4)
        return jnp.sum(logprobs * dlogprob + entropy * dentropy)

    check_grads(loss, (hidden, head), order=1, modes=["rev"], atol=2e-2, rtol=2e-2)


def test_bfloat16_inputs_are_scored_in_float32(inputs):
    hidden, head, targets, _ = inputs
    hidden16, head16 = hidden.astype(jnp.bfloat16), head.astype(jnp.bfloat16)
    logprobs, entropy = token_logprobs(hidden16, head16, targets)
    expected = direct(hidden16.astype(jnp.float32), head16.astype(jnp.float32), targets, 1.0)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    np.testing.assert_allclose(logprobs, expected[0], atol=1e-5)
    grads = jax.grad(lambda h, w: token_logprobs(h, w, targets)[0].sum(), (0, 1))(hidden16, head16)
    assert [g.dtype for g in grads] == [jnp.bfloat16, jnp.bfloat16]


def test_extreme_logits_stay_finite():
    hidden = jnp.full((1, 2, D), 300.0)
    head = jnp.eye(V, D)
    targets = jnp.array([[0, 10]])
    logprobs, entropy = token_logprobs(hidden, head, targets)
    grads = jax.grad(lambda h: sum(x.sum() for x in token_logprobs(h, head, targets)))(hidden)
    for x in (logprobs, entropy, grads):
        assert np.isfinite(x).all()
    np.testing.assert_allclose(logprobs[0, 1], -300.0 - np.log(5), rtol=1e-6)


def test_no_array_with_the_logits_of_the_whole_batch_exists():
    """Every intermediate of the compiled forward and backward pass is far below [B,T,V]."""
    batch, time, vocab, chunk = 2, 512, 499, 16
    hidden, head = jnp.zeros((batch, time, D)), jnp.zeros((vocab, D))
    targets = jnp.zeros((batch, time), jnp.int32)
    grad = jax.grad(lambda h, w: token_logprobs(h, w, targets, chunk=chunk)[0].sum(), (0, 1))
    largest = max(_sizes(jax.make_jaxpr(grad)(hidden, head).jaxpr))
    assert largest <= max(chunk * vocab, batch * time * D, vocab * D)


def _sizes(jaxpr):
    for equation in jaxpr.eqns:
        yield from (v.aval.size for v in equation.outvars)
        for value in equation.params.values():
            for item in value if isinstance(value, (tuple, list)) else (value,):
                inner = getattr(item, "jaxpr", item)
                if hasattr(inner, "eqns"):
                    yield from _sizes(inner)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"chunk": 0}, "chunk"),
        ({"targets_BT": jnp.zeros((B, T + 1), int)}, "fit"),
    ],
)
def test_bad_arguments_are_refused(inputs, change, message):
    hidden, head, targets, _ = inputs
    arguments = {"targets_BT": targets, **change}
    with pytest.raises(ValueError, match=message):
        functools.partial(token_logprobs, hidden, head)(**arguments)
