"""Small models of both families, with all their features: two blocks, grouped heads, odd sizes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.forward import hidden_states
from reterm_jax.policy.spec import init_params

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.2,
}
TINY_QWEN3 = {**TINY, "model_type": "qwen3", "num_hidden_layers": 2, "rope_parameters": {"rope_theta": 5e4}}
TINY_QWEN3_5 = {
    **TINY,
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}
# Short chunks and blocks: short rows already have several of each.
SMALL_PIECES = {"compute_dtype": "float32", "remat": "none", "chunk_size": 16, "attention_block": 24}


def tiny_config(family: str, **overrides) -> QwenConfig:
    raw = {"qwen3": TINY_QWEN3, "qwen3_5": TINY_QWEN3_5}[family]
    return QwenConfig.from_hf(raw, **{**SMALL_PIECES, **overrides})


# Jitted once for all tests: called eagerly, the scanned block would be compiled anew at every call.
forward = jax.jit(hidden_states, static_argnums=1)
init = jax.jit(init_params, static_argnums=0)


def slow_params(config, key):
    """Parameters whose DeltaNet hardly forgets, so that anything that leaks over a boundary is seen."""
    params = init(config, key)
    for layer in params["layers"].values():
        if "a_log" in layer["mixer"]:
            layer["mixer"]["a_log"] = jnp.full_like(layer["mixer"]["a_log"], -8.0)
    return params
