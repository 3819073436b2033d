"""Token logprobs and entropies in chunks against logits of the whole batch: memory and time, forward and backward.

    python benchmarks/token_logprobs.py       # Qwen3.5's vocabulary, 248,320

Memory is what the compiler plans for temporaries of the gradient (with respect to hidden states and head), so it is
exact and does not depend on the machine. Times are taken in turns. A backward pass in chunks has to compute the logits
again: four products of logits' size instead of three. Bar: 0.9 times the speed of the unchunked form.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
from absl import app, flags
from reporting import finish, in_turns, ratio, temporary_bytes

from reterm_jax.losses.token_logprobs import token_logprobs

_VOCABULARY = flags.DEFINE_integer("vocabulary", 248_320, "V.")
_HIDDEN = flags.DEFINE_integer("hidden", 1024, "D.")
_TOKENS = flags.DEFINE_integer(
    "tokens", 1024, "B T of the timed passes; the unchunked form needs about 5 x 4 B T V bytes."
)
_CHUNK = flags.DEFINE_integer("chunk", 256, "Tokens of a chunk in the timed passes.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed passes of each; the median of the ratios counts.")


def main(_: list[str]) -> None:
    V, D = _VOCABULARY.value, _HIDDEN.value

    print(
        f"temporaries of the gradient in MiB, V = {V:,}, D = {D} (the head's gradient alone: {4 * V * D / 2**20:.0f})"
    )
    lengths, chunks = (1024, 4096, 16384), (128, 512, 2048)
    print(f"{'tokens':>8}" + "".join(f"{f'chunk {chunk}':>13}" for chunk in chunks) + f"{'unchunked':>13}")
    for tokens in lengths:
        shapes = _arrays(tokens, V, D, abstract=True)
        row = [temporary_bytes(_gradient(_chunked(chunk)), *shapes) for chunk in chunks]
        row.append(temporary_bytes(_gradient(_unchunked), *shapes))
        print(f"{tokens:8,}" + "".join(f"{x / 2**20:13,.0f}" for x in row))

    arrays = _arrays(_TOKENS.value, V, D)
    calls = {}
    for name, function in (("unchunked", _unchunked), ("chunked", _chunked(_CHUNK.value))):
        compiled = jax.jit(_gradient(function))
        calls[name] = lambda compiled=compiled: compiled(*arrays)
    results = {name: call() for name, call in calls.items()}
    for a, b in zip(*results.values(), strict=True):
        difference = float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(a)))
        assert difference < 1e-4, f"the two forms differ by {difference:.1e}"
    del results
    seconds = in_turns(calls, _REPEATS.value)
    print(
        f"\n{_TOKENS.value} tokens, chunk {_CHUNK.value}: "
        + ", ".join(f"{name} {statistics.median(times):.2f} s" for name, times in seconds.items())
    )
    finish("token_logprobs", ratio(seconds, "unchunked", "chunked"), "times the speed of the unchunked form", 0.9)


def _chunked(chunk: int):
    return lambda hidden, head, targets: token_logprobs(hidden, head, targets, chunk=chunk)


def _unchunked(hidden_BTD, head_VD, targets_BT):
    logits_BTV = jnp.einsum("btd,vd->btv", hidden_BTD, head_VD, precision=jax.lax.Precision.HIGHEST)
    logp_BTV = jax.nn.log_softmax(logits_BTV)
    logprobs_BT = jnp.take_along_axis(logp_BTV, targets_BT[..., None], axis=-1)[..., 0]
    return logprobs_BT, -jnp.sum(jnp.exp(logp_BTV) * logp_BTV, axis=-1)


def _gradient(function):
    """Of a loss that weighs tokens differently, and entropies too."""

    def loss(hidden_BTD, head_VD, targets_BT, weights_BT):
        logprobs_BT, entropy_BT = function(hidden_BTD, head_VD, targets_BT)
        return jnp.vdot(weights_BT, logprobs_BT) + 0.01 * jnp.sum(entropy_BT)

    return jax.grad(loss, argnums=(0, 1))


def _arrays(tokens: int, V: int, D: int, *, abstract: bool = False):
    def make(key):
        keys = jax.random.split(key, 4)
        hidden_BTD = jax.random.normal(keys[0], (1, tokens, D))
        head_VD = jax.random.normal(keys[1], (V, D)) / D**0.5
        targets_BT = jax.random.randint(keys[2], (1, tokens), 0, V)
        return hidden_BTD, head_VD, targets_BT, jax.random.normal(keys[3], (1, tokens))

    key = jax.random.key(0)
    return jax.eval_shape(make, key) if abstract else jax.jit(make)(key)


if __name__ == "__main__":
    app.run(main)
