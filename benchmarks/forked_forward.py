"""Forward and backward pass over a group's shared prefix and K branches, against the K full sequences.

    python benchmarks/forked_forward.py                 # P = 2,048, S = 512, K = 8
    python benchmarks/forked_forward.py --plot=out.svg  # also a sweep over K and P/S

The full sequences are rows of their own, one at a time, as the trainer runs them; the forked form is one row of
P + K S positions. Both keep the same for the backward pass (`--remat`). Ideal is the ratio of positions,
K (P + S) / (P + K S): what a model without any attention gains.
Bar: 0.85 of it.
"""

from __future__ import annotations

import statistics

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from models import small_qwen
from reporting import finish, in_turns, ratio, temporary_bytes

from reterm_jax.policy.config import REMAT, QwenConfig
from reterm_jax.policy.forward import hidden_states
from reterm_jax.policy.spec import init_params

_PREFIX = flags.DEFINE_integer("prefix", 2048, "P, tokens that the branches share.")
_BRANCH = flags.DEFINE_integer("branch", 512, "S, tokens of a branch.")
_FORKS = flags.DEFINE_integer("forks", 8, "K, branches.")
_HIDDEN = flags.DEFINE_integer("hidden", 512, "Hidden size; the MLP has three times as many.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers; every fourth is full attention.")
_REMAT = flags.DEFINE_enum("remat", "dots", REMAT, "What a layer keeps for its backward pass.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed passes of each; the median of the ratios counts.")
_PLOT = flags.DEFINE_string("plot", None, "Sweeps K and P/S too and draws the ratios into this SVG or PNG.")


def main(_: list[str]) -> None:
    config = small_qwen(_HIDDEN.value, _LAYERS.value, remat=_REMAT.value)
    params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(0))
    achieved, ideal = _compare(params, config, _PREFIX.value, _BRANCH.value, _FORKS.value, show=True)
    if _PLOT.value:
        _draw(params, config)
    finish("forked_forward", achieved / ideal, "of the ideal ratio", 0.85)


def _compare(params, config: QwenConfig, P: int, S: int, K: int, show: bool = False) -> tuple[float, float]:
    """(time of the full sequences by that of the forked row, ideal ratio)."""
    rng = np.random.default_rng(0)
    prefix, branches = rng.integers(0, config.vocab_size, P), rng.integers(0, config.vocab_size, (K, S))
    full_KT = np.stack([np.concatenate([prefix, branch]) for branch in branches])
    positions_T = np.arange(P + S)
    # The forked row: trunk 1, branches 2 … K+1.
    row = {
        "tokens": np.concatenate([prefix, *branches]),
        "segments": np.concatenate([np.full(P, 1), np.repeat(np.arange(K) + 2, S)]),
        "positions": np.concatenate([positions_T[:P], *[positions_T[P:]] * K]),
        "trunks": np.full(P + K * S, 1),
    }
    row = {name: jnp.asarray(x)[None] for name, x in row.items()}
    direction_KSD = jnp.asarray(rng.normal(size=(K, S, config.hidden_size)), jnp.float32)

    def forked_loss(params):
        hidden = hidden_states(params, config, row["tokens"], row["segments"], row["positions"], row["trunks"])
        return jnp.vdot(hidden[0, P:].reshape(K, S, -1), direction_KSD) / (K * S)

    def full_loss(params, tokens_T, direction_SD):
        tokens_BT = tokens_T[None]
        hidden = hidden_states(params, config, tokens_BT, jnp.ones_like(tokens_BT), positions_T[None])
        return jnp.vdot(hidden[0, P:], direction_SD) / (K * S)

    @jax.jit
    def full(params):
        def add(grads, sequence):
            return jax.tree.map(jnp.add, grads, jax.grad(full_loss)(params, *sequence)), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        return jax.lax.scan(add, zeros, (jnp.asarray(full_KT), direction_KSD))[0]

    forked = jax.jit(jax.grad(forked_loss))
    seconds = in_turns({"full": lambda: full(params), "forked": lambda: forked(params)}, _REPEATS.value)
    ideal = K * (P + S) / (P + K * S)
    achieved = ratio(seconds, "full", "forked")
    if show:
        a, b = (jax.tree.leaves(f(params)) for f in (full, forked))
        scale = max(float(jnp.abs(x).max()) for x in a)
        worst = max(float(jnp.abs(x - y).max()) for x, y in zip(a, b, strict=True))
        sizes = f"hidden {config.hidden_size}, {config.num_hidden_layers} layers"
        print(f"P = {P}, S = {S}, K = {K}, {sizes}, remat {config.remat}")
        print(f"{'':8}{'s':>8}{'positions':>11}{'temporaries':>13}")
        for name, count, function in (("full", K * (P + S), full), ("forked", P + K * S, forked)):
            memory = temporary_bytes(function, params)
            print(f"{name:8}{statistics.median(seconds[name]):8.2f}{count:11,}{memory / 2**20:9.0f} MiB")
        print(f"largest difference of a gradient entry: {worst / scale:.1e} of the largest entry")
        print(f"full / forked: {achieved:.2f} in time, {ideal:.2f} in positions")
    return achieved, ideal


def _draw(params, config: QwenConfig) -> None:
    import matplotlib.pyplot as plt

    forks, ratios, S = (2, 4, 8, 16), (1, 4, 16), 128
    figure, axes = plt.subplots(figsize=(6, 4))
    for index, over in enumerate(ratios):
        pairs = [_compare(params, config, over * S, S, K) for K in forks]
        for K, (achieved, ideal) in zip(forks, pairs, strict=True):
            print(f"K = {K:2}  P/S = {over:2}  {achieved:.2f} of {ideal:.2f}")
        axes.plot(forks, [a for a, _ in pairs], "o-", color=f"C{index}", label=f"P/S = {over}")
        axes.plot(forks, [i for _, i in pairs], "--", color=f"C{index}")
    axes.set(xlabel="K, branches", ylabel="full sequences / forked, time", title=f"S = {S}; dashed: positions")
    axes.legend()
    figure.savefig(_PLOT.value, bbox_inches="tight")


if __name__ == "__main__":
    app.run(main)
