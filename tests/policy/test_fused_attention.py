"""The fused kernels, interpreted, against attention with one [T,T] mask; and which form a backend gets."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.policy import fused_attention
from reterm_jax.policy.config import ConfigError, QwenConfig
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.fused_attention import PALLAS_GPU, SPLASH, choose_attention, takes
from reterm_jax.policy.sharding import make_mesh

B, G, R, T = 2, 2, 2, 256
CONFIG = QwenConfig("qwen3", 32, 16, 24, 1, 4, 2, 64, ("full_attention",), compute_dtype="float32")


def documents(trunk_BT=None, time=T) -> Documents:
    index_BT = jnp.stack([jnp.zeros(time, jnp.int32), jnp.searchsorted(jnp.asarray([3, 40, 200]), jnp.arange(time))])
    return Documents(index_BT.astype(jnp.int32), jnp.zeros((B, time), jnp.int32), trunk_BT)


def value_and_gradients(attention, K=64):
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (B, G, R, T, K), (B, G, T, K), (B, G, T, K), (B, G, R, T, K)
    q, k, v, direction = (jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True))

    @jax.jit
    def run(q, k, v):
        out, pull = jax.vjp(attention, q, k, v)
        return out, *pull(direction)

    return run(q, k, v)


def masked_attention(q, k, v):
    index_BT = documents().index_BT
    visible_BTT = (index_BT[:, :, None] == index_BT[:, None]) & jnp.tril(jnp.ones((T, T), bool))
    scores = jnp.einsum("bgrtk,bgsk->bgrts", q, k) / np.sqrt(q.shape[-1])
    weights = jax.nn.softmax(jnp.where(visible_BTT[:, None, None], scores, -jnp.inf))
    return jnp.einsum("bgrts,bgsk->bgrtk", weights, v)


@pytest.mark.parametrize(("kernel", "K"), [(SPLASH, 64), (SPLASH, 128), (PALLAS_GPU, 64)])
def test_values_and_gradients_equal_masked_attention(kernel, K):
    def fused(q, k, v):
        return fused_attention.fused_attention(q, k, v, documents(), kernel=kernel, interpret=True)

    for got, expected in zip(value_and_gradients(fused, K), value_and_gradients(masked_attention, K), strict=True):
        np.testing.assert_allclose(got, expected, atol=2e-5)


def check_on_four_devices() -> None:
    # Two key/value heads: on two devices each, or whole on all four.
    for kernel, sizes in ((SPLASH, (1, 2, 2)), (PALLAS_GPU, (1, 1, 4))):

        def fused(q, k, v, kernel=kernel):
            return fused_attention.fused_attention(q, k, v, documents(), kernel=kernel, interpret=True)

        with jax.set_mesh(make_mesh(*sizes)):
            got = value_and_gradients(fused)
        for a, b in zip(got, value_and_gradients(masked_attention), strict=True):
            np.testing.assert_allclose(a, b, atol=2e-5)


def test_each_device_runs_its_rows_and_heads(simulated):
    done = subprocess.run([sys.executable, __file__], env=simulated(4), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]


def test_rows_with_forks_and_ragged_rows_are_not_for_kernels():
    assert takes(SPLASH, documents())
    assert not takes("blockwise", documents())
    assert not takes(SPLASH, documents(trunk_BT=jnp.zeros((B, T), jnp.int32)))
    assert not takes(PALLAS_GPU, documents(time=200))


def test_cpu_has_no_kernel():
    form, reason = choose_attention("auto", CONFIG)
    assert form == "blockwise" and "cpu" in reason
    with pytest.raises(ConfigError, match=r"model.attention = 'splash': does not run on cpu; use 'auto'"):
        choose_attention(SPLASH, CONFIG)


def interpreted(monkeypatch, change=lambda out: out):
    """Makes this CPU a backend whose kernel is the interpreted one, its output changed."""
    monkeypatch.setitem(fused_attention.KERNEL_OF_BACKEND, "cpu", SPLASH)
    kernel = fused_attention._splash
    monkeypatch.setattr(fused_attention, "_splash", lambda *a: change(kernel(*a[:-1], True)))


def test_a_kernel_that_agrees_is_taken(monkeypatch):
    interpreted(monkeypatch)
    assert choose_attention("auto", CONFIG)[0] == SPLASH


def test_a_kernel_that_gives_other_values_is_refused(monkeypatch):
    interpreted(monkeypatch, lambda out: out * 1.1)
    form, reason = choose_attention("auto", CONFIG)
    assert form == "blockwise" and "gave other values" in reason
    with pytest.raises(ConfigError, match="gave other values"):
        choose_attention(SPLASH, CONFIG)


def test_a_kernel_that_fails_is_named_with_its_error(monkeypatch):
    def fail(out):
        raise RuntimeError("out of shared memory\nmore")

    interpreted(monkeypatch, fail)
    assert choose_attention("auto", CONFIG) == (
        "blockwise",
        "splash was tried and failed (RuntimeError: out of shared memory)",
    )


if __name__ == "__main__":
    check_on_four_devices()
