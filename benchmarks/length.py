"""Time and memory of a forward and backward pass against the length of one document, 2k to 32k tokens.

    python benchmarks/length.py --plot=length.svg

Memory is what the compiler plans for temporaries: linear in length, as no [T,T] array exists. Time is explained by the
operation count of `policy/flops.py`: one rate for what is linear in tokens and one for attention's pairs, fitted to
all lengths at once. The value is the largest factor between a measured and an explained time. Bar: at most 1.3.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from absl import app, flags
from reporting import finish, in_turns, temporary_bytes

from reterm_jax.losses.token_logprobs import token_logprobs
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.flops import forward_flops
from reterm_jax.policy.forward import head, hidden_states
from reterm_jax.policy.spec import init_params

_LENGTHS = flags.DEFINE_list("lengths", ["2048", "4096", "8192", "16384", "32768"], "Tokens.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed passes of each length; the fastest counts.")
_PLOT = flags.DEFINE_string("plot", None, "Draws time and memory into this SVG or PNG.")

CONFIG = QwenConfig.from_hf(
    {
        "model_type": "qwen3_5_text",
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 768,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 64,
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
    },
    compute_dtype="float32",
    remat="full",
)


def main(_: list[str]) -> None:
    lengths = [int(length) for length in _LENGTHS.value]
    params = jax.jit(init_params, static_argnums=0)(CONFIG, jax.random.key(0))

    def loss(params, tokens_BT):
        positions_BT = jnp.arange(tokens_BT.shape[1])[None]
        hidden_BTD = hidden_states(params, CONFIG, tokens_BT, jnp.ones_like(tokens_BT), positions_BT)
        return -jnp.mean(token_logprobs(hidden_BTD, head(params, CONFIG), tokens_BT)[0])

    gradient = jax.jit(jax.grad(loss))
    rows = {T: jax.random.randint(jax.random.key(T), (1, T), 0, CONFIG.vocab_size) for T in lengths}
    memory = np.array([temporary_bytes(gradient, params, rows[T]) for T in lengths]) / 2**20
    timed = in_turns({str(T): lambda T=T: gradient(params, rows[T]) for T in lengths}, _REPEATS.value)
    seconds = np.array([min(timed[str(T)]) for T in lengths])

    flops = [forward_flops(CONFIG, T) for T in lengths]
    # Forward, forward again (rematerialised), and a backward pass of twice the forward one.
    pairs = 4 * np.array([f.pop("attention_pairs") for f in flops])
    linear = 4 * np.array([sum(f.values()) for f in flops])
    # Relative least squares: every length counts the same.
    design = np.stack([linear, pairs], axis=1) / seconds[:, None]
    seconds_per_flop, *_ = np.linalg.lstsq(design, np.ones(len(lengths)), rcond=None)
    explained = np.stack([linear, pairs], axis=1) @ seconds_per_flop
    factor = float(np.max(np.maximum(seconds / explained, explained / seconds)))

    print(f"{'tokens':>8}{'s':>9}{'explained':>11}{'pairs':>7}{'MiB':>9}{'MiB/1k tokens':>15}")
    for T, second, explain, pair, mib in zip(lengths, seconds, explained, pairs, memory, strict=True):
        share = pair * seconds_per_flop[1] / explain
        print(f"{T:8,}{second:9.2f}{explain:11.2f}{share:7.0%}{mib:9.0f}{mib / T * 1024:15.1f}")
    of_linear, of_pairs = 1e-9 / seconds_per_flop
    print(f"GFLOP/s: {of_linear:.1f} of what is linear in tokens, {of_pairs:.1f} of attention's pairs")
    if _PLOT.value:
        _draw(lengths, seconds, explained, memory)
    if memory[-1] / memory[0] > 1.1 * lengths[-1] / lengths[0]:
        print("memory grows faster than length")
        finish(
            "length", float(memory[-1] / memory[0]), "growth of memory", 1.1 * lengths[-1] / lengths[0], at_least=False
        )
    finish("length", factor, "largest factor between measured and explained time", 1.3, at_least=False)


def _draw(lengths: list[int], seconds: np.ndarray, explained: np.ndarray, memory: np.ndarray) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5))
    left.loglog(lengths, seconds, "o", label="measured")
    left.loglog(lengths, explained, "-", label="operation count")
    left.set(xlabel="tokens", ylabel="seconds", title="forward and backward")
    left.legend()
    right.loglog(lengths, memory, "o-")
    right.set(xlabel="tokens", ylabel="MiB", title="temporaries")
    for axes in (left, right):
        axes.set_xticks(lengths, [f"{T // 1024}k" for T in lengths], minor=False)
        axes.minorticks_off()
    figure.tight_layout()
    figure.savefig(_PLOT.value)


if __name__ == "__main__":
    app.run(main)
