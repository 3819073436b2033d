"""The operation count against the compiler's own, on the parts where the compiler counts the same things."""

import jax
import jax.numpy as jnp
import pytest
from tiny_models import TINY_QWEN3, TINY_QWEN3_5

from reterm_jax.losses.token_logprobs import token_logprobs
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.flops import forward_flops
from reterm_jax.policy.forward import head, hidden_states
from reterm_jax.policy.spec import abstract_params


@pytest.mark.parametrize("raw", [TINY_QWEN3, TINY_QWEN3_5], ids=["qwen3", "qwen3_5"])
def test_count_is_near_the_compilers(raw):
    """Wide enough that products outweigh what only the compiler counts (norms, gates, softmax)."""
    sizes = {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 2048, "head_dim": 64}
    sizes |= {"linear_key_head_dim": 64, "linear_value_head_dim": 64} if raw is TINY_QWEN3_5 else {}
    T = 128
    # One block of attention and one scan step, as the compiler counts the body of a loop once.
    config = QwenConfig.from_hf({**raw, **sizes}, compute_dtype="float32", attention_block=T, chunk_size=64)
    tokens = jax.ShapeDtypeStruct((1, T), jnp.int32)

    def score(params, tokens):
        positions = jnp.arange(T)[None]
        hidden = hidden_states(params, config, tokens, jnp.ones_like(tokens), positions)
        return token_logprobs(hidden, head(params, config), tokens, chunk=T)

    counted = jax.jit(score).lower(abstract_params(config), tokens).compile().cost_analysis()["flops"]
    parts = forward_flops(config, T, pairs=T * T)  # one slab computes all of its pairs
    layers = sum(v for k, v in parts.items() if k != "lm_head") / config.num_blocks
    assert layers + parts["lm_head"] == pytest.approx(counted, rel=0.2)
