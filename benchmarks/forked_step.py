"""What computing the shared history of a group once saves: a ReTerm-GRPO update on plain rows against forked rows.

    python benchmarks/forked_step.py                # P = 2,048, S = 512, K = 8
    python benchmarks/forked_step.py --groups=16 --prefix=180 --branch=80   # as in the quickstart
    python benchmarks/forked_step.py --plot=out.svg # also a sweep over K and P/S

Both updates see the same groups (random tokens, one trunk of `--prefix` tokens and K branches of `--branch` tokens on
average) and make the same parameters up to rounding. They are timed in turns in one process. Prints seconds, positions
and planned temporaries of each, the ratios, and the largest difference between the two gradients. Ideal is the ratio of
positions, K (P + S) / (P + K S). Bar: 0.8 of it.
"""

from __future__ import annotations

import statistics
import time

import jax
import numpy as np
import optax
from absl import app, flags
from models import small_qwen
from reporting import finish

from reterm_jax.policy.config import REMAT, QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import abstract_params, init_params
from reterm_jax.tokens.forking import pack_forked
from reterm_jax.tokens.packing import Batch, Example, PackingError, pack
from reterm_jax.training.state import abstract_state, init_state
from reterm_jax.training.steps import StepConfig, make_rl_step

_GROUPS = flags.DEFINE_integer("groups", 1, "Groups in the update.")
_FORKS = flags.DEFINE_integer("forks", 8, "K, branches of a group.")
_PREFIX = flags.DEFINE_integer("prefix", 2048, "Tokens that the branches of a group share.")
_BRANCH = flags.DEFINE_integer("branch", 512, "Mean tokens of a branch; they vary from a half to one and a half of it.")
_HIDDEN = flags.DEFINE_integer("hidden", 512, "Hidden size; the MLP has three times as many.")
_LAYERS = flags.DEFINE_integer("layers", 4, "Layers; every fourth is full attention.")
_REMAT = flags.DEFINE_enum("remat", "dots", REMAT, "What a layer keeps for its backward pass.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed updates of each kind; the median of the ratios counts.")
_PLOT = flags.DEFINE_string("plot", None, "Sweeps K and P/S too and draws the ratios into this SVG or PNG.")


def main(_: list[str]) -> None:
    config = small_qwen(_HIDDEN.value, _LAYERS.value, remat=_REMAT.value)
    achieved, ideal = _compare(config, _GROUPS.value, _PREFIX.value, _BRANCH.value, _FORKS.value, show=True)
    if _PLOT.value:
        _draw(config)
    finish("forked_step", achieved / ideal, "of the ideal ratio", 0.8)


def _compare(config: QwenConfig, groups: int, P: int, S: int, K: int, *, show: bool = False) -> tuple[float, float]:
    """(time of the plain update by that of the forked one, ratio of positions)."""
    examples = _examples(np.random.default_rng(0), config.vocab_size, groups, P, S, K)
    batches = {
        "plain": _tightest(pack, examples, max(len(example.ids) for example in examples)),
        "forked": _tightest(pack_forked, examples, P + sum(len(e.ids) - P for e in examples[:K]) + 1),
    }
    mesh = make_mesh()
    shardings = param_shardings(config, mesh)
    optimizer = optax.sgd(1.0)  # parameters before minus after are the gradient
    step = make_rl_step(config, StepConfig(micro_rows=1), optimizer, mesh, shardings)

    def initial():
        return init_state(lambda key: init_params(config, key), jax.random.key(0), optimizer, mesh, shardings)

    def update(batch: Batch):
        state = jax.block_until_ready(initial())
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        return time.perf_counter() - start, jax.tree.map(np.asarray, state.params)

    results = {name: update(batch)[1] for name, batch in batches.items()}  # compiles
    seconds = {name: [] for name in batches}
    for _ in range(_REPEATS.value):
        for name, batch in batches.items():
            seconds[name].append(update(batch)[0])
    plain, forked = (batches[name].used_tokens for name in ("plain", "forked"))
    achieved = statistics.median(a / b for a, b in zip(seconds["plain"], seconds["forked"], strict=True))
    if show:
        start = initial().params
        gradients = {
            name: jax.tree.map(lambda a, b: np.asarray(a) - b, start, after) for name, after in results.items()
        }
        scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(gradients["plain"]))
        worst = max(float(np.abs(x).max()) for x in jax.tree.leaves(jax.tree.map(np.subtract, *gradients.values())))
        print(f"{groups} groups, prefix {P}, {K} branches of about {S} tokens")
        print(f"{'':8}{'s/update':>10}{'positions':>11}{'rows':>6}{'padding':>9}{'temporaries':>13}")
        for name, batch in batches.items():
            state = abstract_state(abstract_params(config), optimizer, mesh, shardings)
            lowered = step.lower(state, rows=batch.rows, length=batch.length, forked=name == "forked")
            memory = lowered.compile().memory_analysis().temp_size_in_bytes
            print(
                f"{name:8}{np.median(seconds[name]):10.3f}{batch.used_tokens:11,}{batch.rows:6}"
                f"{batch.padding_fraction:9.1%}{memory / 2**20:9.0f} MiB"
            )
        print(f"plain / forked: {achieved:.2f} in time, {plain / forked:.2f} in positions")
        print(f"largest difference of a gradient entry: {worst / scale:.1e} of the largest entry")
    return achieved, plain / forked


def _draw(config: QwenConfig) -> None:
    import matplotlib.pyplot as plt

    forks, ratios, S = (2, 4, 8, 16), (1, 4, 16), 128
    figure, axes = plt.subplots(figsize=(6, 4))
    for index, over in enumerate(ratios):
        pairs = [_compare(config, 1, over * S, S, K) for K in forks]
        for K, (achieved, ideal) in zip(forks, pairs, strict=True):
            print(f"K = {K:2}  P/S = {over:2}  {achieved:.2f} of {ideal:.2f}", flush=True)
        axes.plot(forks, [a for a, _ in pairs], "o-", color=f"C{index}", label=f"P/S = {over}")
        axes.plot(forks, [i for _, i in pairs], "--", color=f"C{index}")
    axes.set(xlabel="K, branches", ylabel="plain update / forked, time", title=f"S = {S}; dashed: positions")
    axes.legend()
    figure.savefig(_PLOT.value, bbox_inches="tight")


def _tightest(packer, examples: list[Example], least: int) -> Batch:
    """The batch with the fewest positions, padding included, over rows from about `least` tokens to four times that."""
    lengths = [-(-int(least * factor) // 64) * 64 for factor in (1.0, 1.05, 1.1, 1.2, 1.4, 2.0, 3.0, 4.0)]
    batches = []
    for length in lengths:
        try:
            batches.append(packer(examples, length=length)[0])
        except PackingError:  # a row too short for the longest example
            continue
    return min(batches, key=lambda batch: batch.rows * batch.length)


def _examples(rng: np.random.Generator, vocabulary: int, groups: int, P: int, S: int, K: int) -> list[Example]:
    examples = []
    for group in range(groups):
        shared = rng.integers(0, vocabulary, P)
        for _ in range(K):
            own = int(rng.uniform(0.5, 1.5) * S) + 1
            ids = np.concatenate([shared, rng.integers(0, vocabulary, own)])
            mask = np.arange(len(ids)) >= P
            examples.append(Example(ids, mask, float(rng.normal()), np.full(len(ids), -6.0), group=group))
    return examples


if __name__ == "__main__":
    app.run(main)
