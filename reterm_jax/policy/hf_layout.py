"""How this package's parameters correspond to the tensors of a Hugging Face checkpoint. Numpy only, no I/O.

One parameter of the tree is stacked over the repeated blocks; one checkpoint tensor belongs to one layer and may fuse
several parameters (queries with their gate, or DeltaNet's queries, keys and values). A `Group` says which.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from reterm_jax.policy.config import LINEAR, QwenConfig

Flat = dict[str, np.ndarray]


@dataclass(frozen=True)
class Group:
    """One checkpoint tensor: its name and shape, the parameters it holds, and the way there and back.

    `block` is the index on the parameters' leading layers axis, or None for the parameters outside the layers.
    """

    tensor: str
    shape: tuple[int, ...]
    params: tuple[str, ...]
    block: int | None
    split: Callable[[np.ndarray], tuple[np.ndarray, ...]]
    join: Callable[..., np.ndarray]


def groups(config: QwenConfig, prefix: str = "model.") -> Iterator[Group]:
    """Every tensor of the checkpoint in layer order. `prefix` leads to the decoder: `model.` in text-only layouts."""
    c = config
    table = (c.vocab_size, c.hidden_size)
    yield Group(f"{prefix}embed_tokens.weight", table, ("embed",), None, *_SAME)
    for layer, kind in enumerate(c.layer_types):
        block, position = divmod(layer, len(c.layer_pattern))
        parts = {**_shared(c), **(_delta_net(c) if kind == LINEAR else _attention(c))}
        for tensor, (shape, params, (split, join)) in parts.items():
            names = tuple(f"layers.{position}.{param}" for param in params)
            yield Group(f"{prefix}layers.{layer}.{tensor}", shape, names, block, split, join)
    yield Group(f"{prefix}norm.weight", (c.hidden_size,), ("final_norm",), None, *_SAME)
    if not c.tie_word_embeddings:
        yield Group("lm_head.weight", table, ("lm_head",), None, *_SAME)


_Ways = tuple[Callable[[np.ndarray], tuple[np.ndarray, ...]], Callable[..., np.ndarray]]
_Part = tuple[tuple[int, ...], tuple[str, ...], _Ways]

_SAME: _Ways = (lambda x: (x,), lambda x: x)


def _matrix(*heads: int) -> _Ways:
    """[out, in] to [in, out], the output split into head axes where `heads` are given."""
    return (
        lambda x: (x.T.reshape(x.shape[1], *heads) if heads else x.T,),
        lambda x: x.reshape(x.shape[0], -1).T,
    )


def _output_matrix(*heads: int) -> _Ways:
    """[out, heads * size] to [heads, size, out]."""
    return lambda x: (x.T.reshape(*heads, x.shape[0]),), lambda x: x.reshape(-1, x.shape[-1]).T


def _shared(c: QwenConfig) -> dict[str, _Part]:
    up, down = (c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)
    return {
        "input_layernorm.weight": ((c.hidden_size,), ("input_norm",), _SAME),
        "post_attention_layernorm.weight": ((c.hidden_size,), ("post_norm",), _SAME),
        "mlp.gate_proj.weight": (up, ("mlp.gate",), _matrix()),
        "mlp.up_proj.weight": (up, ("mlp.up",), _matrix()),
        "mlp.down_proj.weight": (down, ("mlp.down",), _matrix()),
    }


def _attention(c: QwenConfig) -> dict[str, _Part]:
    H, G, K, D = c.num_attention_heads, c.num_key_value_heads, c.head_dim, c.hidden_size
    query: _Part = ((H * K, D), ("mixer.q_proj",), _matrix(H, K))
    if c.gated_attention:
        # Each head's rows are its query, then its gate.
        def split(x: np.ndarray) -> tuple[np.ndarray, ...]:
            both = x.T.reshape(D, H, 2 * K)
            return both[..., :K], both[..., K:]

        def join(q: np.ndarray, gate: np.ndarray) -> np.ndarray:
            return np.concatenate([q, gate], axis=-1).reshape(D, H * 2 * K).T

        query = ((H * 2 * K, D), ("mixer.q_proj", "mixer.gate_proj"), (split, join))
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": ((G * K, D), ("mixer.k_proj",), _matrix(G, K)),
        "self_attn.v_proj.weight": ((G * K, D), ("mixer.v_proj",), _matrix(G, K)),
        "self_attn.o_proj.weight": ((D, H * K), ("mixer.o_proj",), _output_matrix(H, K)),
        "self_attn.q_norm.weight": ((K,), ("mixer.q_norm",), _SAME),
        "self_attn.k_norm.weight": ((K,), ("mixer.k_norm",), _SAME),
    }


def _delta_net(c: QwenConfig) -> dict[str, _Part]:
    G, K = c.linear_num_key_heads, c.linear_key_head_dim
    H, V = c.linear_num_value_heads, c.linear_value_head_dim
    D, W = c.hidden_size, c.linear_conv_kernel_dim
    heads = ((G, K), (G, K), (H, V))
    ends = (G * K, 2 * G * K)
    fused = 2 * G * K + H * V

    def split_rows(x: np.ndarray) -> list[np.ndarray]:
        return np.split(x, ends, axis=0)

    def split_projection(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(part.T.reshape(D, *shape) for part, shape in zip(split_rows(x), heads, strict=True))

    def join_projection(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(D, -1).T for part in parts], axis=0)

    def split_conv(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(part.reshape(*shape, W) for part, shape in zip(split_rows(x), heads, strict=True))

    def join_conv(*parts: np.ndarray) -> np.ndarray:
        return np.concatenate([part.reshape(-1, 1, W) for part in parts], axis=0)

    projections = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")
    convolutions = ("mixer.q_conv", "mixer.k_conv", "mixer.v_conv")
    return {
        "linear_attn.in_proj_qkv.weight": ((fused, D), projections, (split_projection, join_projection)),
        "linear_attn.conv1d.weight": ((fused, 1, W), convolutions, (split_conv, join_conv)),
        "linear_attn.in_proj_z.weight": ((H * V, D), ("mixer.z_proj",), _matrix(H, V)),
        "linear_attn.in_proj_b.weight": ((H, D), ("mixer.b_proj",), _matrix()),
        "linear_attn.in_proj_a.weight": ((H, D), ("mixer.a_proj",), _matrix()),
        "linear_attn.A_log": ((H,), ("mixer.a_log",), _SAME),
        "linear_attn.dt_bias": ((H,), ("mixer.dt_bias",), _SAME),
        "linear_attn.norm.weight": ((V,), ("mixer.norm",), _SAME),
        "linear_attn.out_proj.weight": ((D, H * V), ("mixer.out_proj",), _output_matrix(H, V)),
    }
