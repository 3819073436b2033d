"""One declaration per parameter, from which shapes, initial values and shardings all follow."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from reterm_jax.policy.config import LINEAR, QwenConfig

Params = dict[str, Any]


@dataclass(frozen=True)
class ArraySpec:
    """A parameter: its shape, dtype, one logical axis name per dimension, and the name of its initialiser."""

    shape: tuple[int, ...]
    logical_axes: tuple[str, ...]
    init: str = "normal"
    dtype: str = "float32"

    def __post_init__(self) -> None:
        if len(self.shape) != len(self.logical_axes):
            raise ValueError(f"ArraySpec: {len(self.logical_axes)} axes {self.logical_axes} for shape {self.shape}")


def param_specs(config: QwenConfig) -> Params:
    """The parameter tree. Layers of one position in the repeated block are stacked on a leading `layers` axis.

    Layout: `embed` [V,D], `layers` {position in block: {input_norm, mixer, post_norm, mlp}}, `final_norm` [D] and,
    for untied models, `lm_head` [V,D]. Projections are stored input-first with heads as their own axes.
    """
    c = config
    norm = "zeros" if c.norm_offset else "ones"
    layers = {}
    for position, kind in enumerate(c.layer_pattern):
        layer = {
            "input_norm": ArraySpec((c.hidden_size,), ("norm",), norm),
            "mixer": _delta_net_specs(c) if kind == LINEAR else _attention_specs(c, norm),
            "post_norm": ArraySpec((c.hidden_size,), ("norm",), norm),
            "mlp": {
                "gate": ArraySpec((c.hidden_size, c.intermediate_size), ("embed", "mlp")),
                "up": ArraySpec((c.hidden_size, c.intermediate_size), ("embed", "mlp")),
                "down": ArraySpec((c.intermediate_size, c.hidden_size), ("mlp", "embed")),
            },
        }
        layers[str(position)] = jax.tree.map(lambda spec: _stacked(spec, c.num_blocks), layer)
    specs: Params = {
        "embed": ArraySpec((c.vocab_size, c.hidden_size), ("vocab", "embed")),
        "layers": layers,
        "final_norm": ArraySpec((c.hidden_size,), ("norm",), norm),
    }
    if not c.tie_word_embeddings:
        specs["lm_head"] = ArraySpec((c.vocab_size, c.hidden_size), ("vocab", "embed"))
    return specs


def abstract_params(config: QwenConfig) -> Params:
    """`jax.ShapeDtypeStruct` for every parameter: what a checkpoint is restored into."""
    return jax.tree.map(lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype), param_specs(config))


def init_params(config: QwenConfig, key: jax.Array) -> Params:
    """Random float32 parameters. Under `jax.jit` with `out_shardings` they are created in place on their devices.

    Each parameter's key comes from its path, so that adding a parameter leaves the values of the others as they were.
    """

    def init(path: jax.tree_util.KeyPath, spec: ArraySpec) -> jax.Array:
        leaf_key = jax.random.fold_in(key, zlib.crc32(param_name(path).encode()))
        return _INITIALISERS[spec.init](leaf_key, spec, config).astype(spec.dtype)

    return jax.tree_util.tree_map_with_path(init, param_specs(config))


def param_name(path: jax.tree_util.KeyPath) -> str:
    """The dotted name of a leaf, as messages and checkpoints show it: `layers.0.mixer.q_proj`."""
    return ".".join(str(getattr(entry, "key", entry)) for entry in path)


def _stacked(spec: ArraySpec, blocks: int) -> ArraySpec:
    return ArraySpec((blocks, *spec.shape), ("layers", *spec.logical_axes), spec.init, spec.dtype)


def _attention_specs(c: QwenConfig, norm: str) -> dict[str, ArraySpec]:
    query = ArraySpec((c.hidden_size, c.num_attention_heads, c.head_dim), ("embed", "heads", "head_dim"))
    key = ArraySpec((c.hidden_size, c.num_key_value_heads, c.head_dim), ("embed", "kv_heads", "head_dim"))
    specs = {
        "q_proj": query,
        "k_proj": key,
        "v_proj": key,
        "o_proj": ArraySpec((c.num_attention_heads, c.head_dim, c.hidden_size), ("heads", "head_dim", "embed")),
        "q_norm": ArraySpec((c.head_dim,), ("norm",), norm),
        "k_norm": ArraySpec((c.head_dim,), ("norm",), norm),
    }
    if c.gated_attention:
        specs["gate_proj"] = query
    return specs


def _delta_net_specs(c: QwenConfig) -> dict[str, ArraySpec]:
    hidden, width = c.hidden_size, c.linear_conv_kernel_dim
    key_heads, key_dim = c.linear_num_key_heads, c.linear_key_head_dim
    value_heads, value_dim = c.linear_num_value_heads, c.linear_value_head_dim
    # Queries, keys and values are one fused matrix in published checkpoints. They are separate here, because a fused
    # axis cannot be sharded by heads: its thirds have different widths.
    key = ArraySpec((hidden, key_heads, key_dim), ("embed", "key_heads", "head_dim"))
    value = ArraySpec((hidden, value_heads, value_dim), ("embed", "value_heads", "head_dim"))
    per_head = ArraySpec((hidden, value_heads), ("embed", "value_heads"))
    conv_key = ArraySpec((key_heads, key_dim, width), ("key_heads", "head_dim", "conv"), "conv")
    return {
        "q_proj": key,
        "k_proj": key,
        "v_proj": value,
        "z_proj": value,
        "b_proj": per_head,
        "a_proj": per_head,
        "q_conv": conv_key,
        "k_conv": conv_key,
        "v_conv": ArraySpec((value_heads, value_dim, width), ("value_heads", "head_dim", "conv"), "conv"),
        "a_log": ArraySpec((value_heads,), ("value_heads",), "a_log"),
        "dt_bias": ArraySpec((value_heads,), ("value_heads",), "dt_bias"),
        "norm": ArraySpec((value_dim,), ("norm",), "ones"),
        "out_proj": ArraySpec((value_heads, value_dim, hidden), ("value_heads", "head_dim", "embed")),
    }


def _uniform_conv(key: jax.Array, spec: ArraySpec, config: QwenConfig) -> jax.Array:
    bound = 1.0 / math.sqrt(spec.shape[-1])
    return jax.random.uniform(key, spec.shape, minval=-bound, maxval=bound)


def _log_decay_rate(key: jax.Array, spec: ArraySpec, config: QwenConfig) -> jax.Array:
    return jnp.log(jax.random.uniform(key, spec.shape, minval=0.01, maxval=16.0))


def _decay_step_bias(key: jax.Array, spec: ArraySpec, config: QwenConfig) -> jax.Array:
    """softplus^-1 of a step drawn log-uniformly from [1e-3, 1e-1] (the Mamba-2 choice, arXiv 2405.21060).

    A constant bias of one, as some implementations have it, forgets within a few tokens in most heads: harmless for
    weights that will be loaded, but slow to train from scratch.
    """
    step = jnp.exp(jax.random.uniform(key, spec.shape, minval=math.log(1e-3), maxval=math.log(1e-1)))
    return step + jnp.log(-jnp.expm1(-step))


_INITIALISERS: dict[str, Callable[[jax.Array, ArraySpec, QwenConfig], jax.Array]] = {
    "normal": lambda key, spec, config: config.initializer_range * jax.random.normal(key, spec.shape),
    "zeros": lambda key, spec, config: jnp.zeros(spec.shape),
    "ones": lambda key, spec, config: jnp.ones(spec.shape),
    "conv": _uniform_conv,
    "a_log": _log_decay_rate,
    "dt_bias": _decay_step_bias,
}
