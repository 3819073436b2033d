"""Forward and backward pass of a Qwen3.5 policy against `transformers` (torch) on the CPU: same weights, float32.

    python benchmarks/policy_step.py          # needs the `dev` extra

Loss (mean negative log-likelihood of the next token) and gradient norm of both are compared first, then both are timed
in turns. Prints tokens/s, the share of the machine's measured float32 matrix peak, the ratio at which nothing would be
left to gain, and how our time divides over the parts of the model. Bar: 1.6 times the reference's tokens/s.
"""

from __future__ import annotations

import statistics
import tempfile

import jax
import jax.numpy as jnp
import numpy as np
import torch
import transformers
from absl import app, flags
from reporting import finish, in_turns, ratio

from reterm_jax.losses.token_logprobs import token_logprobs
from reterm_jax.policy import forward, hf
from reterm_jax.policy.attention import self_attention
from reterm_jax.policy.config import LINEAR, REMAT, QwenConfig
from reterm_jax.policy.delta_net import delta_net, initial_state
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.flops import forward_flops
from reterm_jax.policy.layers import mlp

_LENGTH = flags.DEFINE_integer("length", 2048, "Tokens of the one row.")
_LAYERS = flags.DEFINE_integer("layers", 8, "Layers; every fourth is full attention.")
_CHUNK = flags.DEFINE_integer("chunk_size", 64, "Tokens of a DeltaNet chunk.")
_BLOCK = flags.DEFINE_integer("attention_block", 256, "Queries attended at once.")
# New memory is what costs most next to the products: "none" keeps 3.0 GB for the backward pass, "dots" 0.9 GB.
_REMAT = flags.DEFINE_enum("remat", "dots", REMAT, "What a layer keeps for its backward pass.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed passes of each; the median of the ratios counts.")

SIZES = {
    "vocab_size": 32_000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "tie_word_embeddings": True,
}


def main(_: list[str]) -> None:
    torch.manual_seed(0)
    reference = transformers.Qwen3_5ForCausalLM(
        transformers.Qwen3_5TextConfig(**SIZES, num_hidden_layers=_LAYERS.value, attn_implementation="sdpa")
    ).train()
    with tempfile.TemporaryDirectory() as directory:
        reference.save_pretrained(directory)
        config = QwenConfig.from_hf(
            directory,
            compute_dtype="float32",
            remat=_REMAT.value,
            chunk_size=_CHUNK.value,
            attention_block=_BLOCK.value,
        )
        params = hf.load_params(directory, config)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, (1, _LENGTH.value + 1))
    inputs, targets = jnp.asarray(tokens[:, :-1]), jnp.asarray(tokens[:, 1:])
    torch_inputs, torch_targets = torch.from_numpy(tokens[:, :-1]), torch.from_numpy(tokens[:, 1:])

    def torch_step() -> tuple[float, float]:
        reference.zero_grad(set_to_none=True)
        logits = reference(torch_inputs, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits[0], torch_targets[0])
        loss.backward()
        return loss.item(), sum(float(p.grad.square().sum()) for p in reference.parameters()) ** 0.5

    def nll(params):
        positions_BT = jnp.arange(inputs.shape[1])[None]
        hidden_BTD = forward.hidden_states(params, config, inputs, jnp.ones_like(inputs), positions_BT)
        return -jnp.mean(token_logprobs(hidden_BTD, forward.head(params, config), targets)[0])

    gradient = jax.jit(jax.value_and_grad(nll))
    loss, grads = gradient(params)
    norm = float(jnp.sqrt(sum(jnp.vdot(g, g) for g in jax.tree.leaves(grads))))
    print(f"loss and gradient norm: reterm_jax {float(loss):.5f} {norm:.5f}  transformers %.5f %.5f" % torch_step())

    seconds = in_turns({"transformers": torch_step, "reterm_jax": lambda: gradient(params)}, _REPEATS.value)
    parts = _parts(params, config, inputs)
    peak = _matrix_peak()
    flops = forward_flops(config, _LENGTH.value)
    total = 3 * sum(flops.values())
    print(f"{'':14}{'s/step':>8}{'tokens/s':>10}{'GFLOP/s':>9}{'of peak':>9}   (peak {peak / 1e9:.0f} GFLOP/s)")
    for name, times in seconds.items():
        median = statistics.median(times)
        rate = total / median
        print(f"{name:14}{median:8.2f}{_LENGTH.value / median:10.0f}{rate / 1e9:9.1f}{rate / peak:9.0%}")
    ceiling = statistics.median(seconds["transformers"]) * peak / total
    print(f"every product at the measured peak, and nothing but products, would be {ceiling:.2f} times transformers")
    whole = statistics.median(seconds["reterm_jax"])
    print(f"{'part':14}{'s/step':>8}{'share':>10}{'GFLOP/s':>9}   (timed by itself)")
    flops["attention"] += flops.pop("attention_pairs")
    for name, time in parts.items():
        print(f"{name:14}{time:8.2f}{time / whole:10.0%}{3 * flops[name] / time / 1e9:9.1f}")
    finish("policy_step", ratio(seconds, "transformers", "reterm_jax"), "times the tokens/s of transformers", 1.6)


def _parts(params, config: QwenConfig, inputs) -> dict[str, float]:
    """Seconds of forward and backward of each kind of layer, over all the layers of the kind."""
    T = inputs.shape[1]
    documents = Documents.of(jnp.ones_like(inputs), jnp.arange(T)[None], None)
    x_BTD = jax.random.normal(jax.random.key(0), (1, T, config.hidden_size))
    block = jax.tree.map(lambda x: x[0], params["layers"])
    kinds = dict(enumerate(config.layer_pattern))
    linear = block[str(next(i for i, kind in kinds.items() if kind == LINEAR))]
    full = block[str(next(i for i, kind in kinds.items() if kind != LINEAR))]
    head_VD = forward.head(params, config)

    def timed(function, p, count: int) -> float:
        step = jax.jit(jax.grad(lambda p, x: jnp.sum(function(p, x)), argnums=(0, 1)))
        return count * statistics.median(in_turns({"": lambda: step(p, x_BTD)}, _REPEATS.value)[""])

    start = initial_state(config, 1)
    linears = sum(kind == LINEAR for kind in config.layer_types)
    return {
        "delta_net": timed(lambda p, x: delta_net(p, config, x, documents, start)[0], linear["mixer"], linears),
        "attention": timed(
            lambda p, x: self_attention(p, config, x, documents)[0], full["mixer"], config.num_hidden_layers - linears
        ),
        "mlp": timed(mlp, linear["mlp"], config.num_hidden_layers),
        "lm_head": timed(lambda p, x: token_logprobs(x, p, inputs)[0], head_VD, 1),
    }


def _matrix_peak(size: int = 3072) -> float:
    """FLOP/s of the best of several large float32 products."""
    a = jax.random.normal(jax.random.key(0), (size, size))
    product = jax.jit(jnp.matmul)
    return 2 * size**3 / min(in_turns({"": lambda: product(a, a)}, 5)[""])


if __name__ == "__main__":
    app.run(main)
