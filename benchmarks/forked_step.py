"""What computing the shared history of a group once saves: a ReTerm-GRPO update on plain rows against forked rows.

    python benchmarks/forked_step.py                # P = 2,048, S = 512, K = 8
    python benchmarks/forked_step.py --groups=16 --prefix=180 --branch=80   # as in the quickstart

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
from reporting import finish

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import init_params
from reterm_jax.tokens.forking import pack_forked
from reterm_jax.tokens.packing import Batch, Example, PackingError, pack
from reterm_jax.training.state import init_state
from reterm_jax.training.steps import StepConfig, make_rl_step

_GROUPS = flags.DEFINE_integer("groups", 1, "Groups in the update.")
_FORKS = flags.DEFINE_integer("forks", 8, "K, branches of a group.")
_PREFIX = flags.DEFINE_integer("prefix", 2048, "Tokens that the branches of a group share.")
_BRANCH = flags.DEFINE_integer("branch", 512, "Mean tokens of a branch; they vary from a half to one and a half of it.")
_HIDDEN = flags.DEFINE_integer("hidden", 128, "Hidden size; the MLP has three times as many.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed updates of each kind; the median of the ratios counts.")


def main(_: list[str]) -> None:
    hidden = _HIDDEN.value
    config = QwenConfig(
        family="qwen3_5",
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        layer_types=("linear_attention", "full_attention"),
        partial_rotary_factor=0.25,
        tie_word_embeddings=True,
        initializer_range=0.08,
        linear_num_key_heads=4,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        compute_dtype="float32",
        remat="none",
        chunk_size=32,
        attention_block=128,
    )
    examples = _examples(np.random.default_rng(0), config.vocab_size)
    batches = {
        "plain": _tightest(pack, examples, max(len(example.ids) for example in examples)),
        "forked": _tightest(pack_forked, examples, _PREFIX.value + _FORKS.value * _BRANCH.value),
    }
    mesh = make_mesh()
    shardings = param_shardings(config, mesh)
    optimizer = optax.sgd(1.0)  # parameters before minus after are the gradient
    step = make_rl_step(config, StepConfig(micro_rows=1), optimizer, mesh, shardings)

    def update(batch: Batch):
        state = init_state(lambda key: init_params(config, key), jax.random.key(0), optimizer, mesh, shardings)
        jax.block_until_ready(state)
        start = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, batch))
        return time.perf_counter() - start, jax.tree.map(np.asarray, state.params)

    results = {name: update(batch)[1] for name, batch in batches.items()}  # compiles
    seconds = {name: [] for name in batches}
    for _ in range(_REPEATS.value):
        for name, batch in batches.items():
            seconds[name].append(update(batch)[0])
    start = init_state(lambda key: init_params(config, key), jax.random.key(0), optimizer, mesh, shardings).params
    gradients = {name: jax.tree.map(lambda a, b: np.asarray(a) - b, start, after) for name, after in results.items()}
    scale = max(float(np.abs(x).max()) for x in jax.tree.leaves(gradients["plain"]))
    worst = max(float(np.abs(x).max()) for x in jax.tree.leaves(jax.tree.map(np.subtract, *gradients.values())))

    print(f"{_GROUPS.value} groups, prefix {_PREFIX.value}, {_FORKS.value} branches of about {_BRANCH.value} tokens")
    print(f"{'':8}{'s/update':>10}{'positions':>11}{'rows':>6}{'padding':>9}")
    for name, batch in batches.items():
        print(
            f"{name:8}{np.median(seconds[name]):10.3f}{batch.used_tokens:11,}{batch.rows:6}"
            f"{batch.padding_fraction:9.1%}"
        )
    plain, forked = (batches[name].used_tokens for name in ("plain", "forked"))
    achieved = statistics.median(a / b for a, b in zip(seconds["plain"], seconds["forked"], strict=True))
    print(f"plain / forked: {achieved:.2f} in time, {plain / forked:.2f} in positions")
    print(f"largest difference of a gradient entry: {worst / scale:.1e} of the largest entry")
    finish("forked_step", achieved / (plain / forked), "of the ideal ratio", 0.8)


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


def _examples(rng: np.random.Generator, vocabulary: int) -> list[Example]:
    examples = []
    for group in range(_GROUPS.value):
        shared = rng.integers(0, vocabulary, _PREFIX.value)
        for _ in range(_FORKS.value):
            own = int(rng.uniform(0.5, 1.5) * _BRANCH.value) + 1
            ids = np.concatenate([shared, rng.integers(0, vocabulary, own)])
            mask = np.arange(len(ids)) >= _PREFIX.value
            examples.append(Example(ids, mask, float(rng.normal()), np.full(len(ids), -6.0), group=group))
    return examples


if __name__ == "__main__":
    app.run(main)
