"""How this package's parameters correspond to the tensors of a Hugging Face checkpoint. Numpy only, no I/O.

One parameter of the tree is stacked over the repeated blocks; one checkpoint tensor belongs to one layer and may fuse
several parameters (queries with their gate, or DeltaNet's queries, keys and values). A `Group` says which.

The way from a tensor to its parameters is a numpy view: axes are moved, split and cut, and nothing is copied. So a part
of a parameter read from a mapped file reads just that part of the file, and a value assigned to a parameter's view of
an empty tensor fills the tensor in. Only methods that JAX arrays have as well are used, so that `split` can be traced.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from reterm_jax.policy.config import LINEAR, QwenConfig

_Split = Callable[[np.ndarray], tuple[np.ndarray, ...]]
_Part = tuple[tuple[int, ...], tuple[str, ...], _Split]


@dataclass(frozen=True)
class Group:
    """One checkpoint tensor: its name and shape, and the parameters it holds.

    `block` is the index on the parameters' leading layers axis, or None for the parameters outside the layers.
    `split` gives the parameters (of that layer) as views of the tensor, in the order of `params`.
    """

    tensor: str
    shape: tuple[int, ...]
    params: tuple[str, ...]
    block: int | None
    split: _Split

    def join(self, parts: Iterable[np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The tensor whose `split` gives `parts`, rounded to `dtype`."""
        tensor = np.empty(self.shape, dtype)
        for view, part in zip(self.split(tensor), parts, strict=True):
            view[...] = part
        return tensor


def groups(config: QwenConfig, prefix: str = "model.", *, tied_head: bool = False) -> Iterator[Group]:
    """Every tensor of the checkpoint in layer order.

    Args:
      prefix: leads to the decoder: `model.` in text-only layouts.
      tied_head: whether a checkpoint with tied embeddings holds them a second time, as `lm_head.weight`.
    """
    c = config
    table = (c.vocab_size, c.hidden_size)
    yield Group(f"{prefix}embed_tokens.weight", table, ("embed",), None, _same)
    for layer, kind in enumerate(c.layer_types):
        block, position = divmod(layer, len(c.layer_pattern))
        parts = {**_shared(c), **(_delta_net(c) if kind == LINEAR else _attention(c))}
        for tensor, (shape, params, split) in parts.items():
            names = tuple(f"layers.{position}.{param}" for param in params)
            yield Group(f"{prefix}layers.{layer}.{tensor}", shape, names, block, split)
    yield Group(f"{prefix}norm.weight", (c.hidden_size,), ("final_norm",), None, _same)
    if not c.tie_word_embeddings or tied_head:
        yield Group("lm_head.weight", table, ("embed" if c.tie_word_embeddings else "lm_head",), None, _same)


def _same(x: np.ndarray) -> tuple[np.ndarray, ...]:
    return (x,)


def _matrix(*heads: int) -> _Split:
    """[out, in] to [in, out], the output split into head axes where `heads` are given."""
    return lambda x: (x.T.reshape(x.shape[1], *heads) if heads else x.T,)


def _output_matrix(*heads: int) -> _Split:
    """[out, heads * size] to [heads, size, out]."""
    return lambda x: (x.T.reshape(*heads, x.shape[0]),)


def _shared(c: QwenConfig) -> dict[str, _Part]:
    up, down = (c.intermediate_size, c.hidden_size), (c.hidden_size, c.intermediate_size)
    return {
        "input_layernorm.weight": ((c.hidden_size,), ("input_norm",), _same),
        "post_attention_layernorm.weight": ((c.hidden_size,), ("post_norm",), _same),
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

        query = ((H * 2 * K, D), ("mixer.q_proj", "mixer.gate_proj"), split)
    return {
        "self_attn.q_proj.weight": query,
        "self_attn.k_proj.weight": ((G * K, D), ("mixer.k_proj",), _matrix(G, K)),
        "self_attn.v_proj.weight": ((G * K, D), ("mixer.v_proj",), _matrix(G, K)),
        "self_attn.o_proj.weight": ((D, H * K), ("mixer.o_proj",), _output_matrix(H, K)),
        "self_attn.q_norm.weight": ((K,), ("mixer.q_norm",), _same),
        "self_attn.k_norm.weight": ((K,), ("mixer.k_norm",), _same),
    }


def _delta_net(c: QwenConfig) -> dict[str, _Part]:
    G, K = c.linear_num_key_heads, c.linear_key_head_dim
    H, V = c.linear_num_value_heads, c.linear_value_head_dim
    D, W = c.hidden_size, c.linear_conv_kernel_dim
    heads = ((G, K), (G, K), (H, V))
    parts = (slice(0, G * K), slice(G * K, 2 * G * K), slice(2 * G * K, None))
    fused = 2 * G * K + H * V

    def split_projection(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x[part].T.reshape(D, *shape) for part, shape in zip(parts, heads, strict=True))

    def split_conv(x: np.ndarray) -> tuple[np.ndarray, ...]:
        return tuple(x[part].reshape(*shape, W) for part, shape in zip(parts, heads, strict=True))

    projections = ("mixer.q_proj", "mixer.k_proj", "mixer.v_proj")
    convolutions = ("mixer.q_conv", "mixer.k_conv", "mixer.v_conv")
    return {
        "linear_attn.in_proj_qkv.weight": ((fused, D), projections, split_projection),
        "linear_attn.conv1d.weight": ((fused, 1, W), convolutions, split_conv),
        "linear_attn.in_proj_z.weight": ((H * V, D), ("mixer.z_proj",), _matrix(H, V)),
        "linear_attn.in_proj_b.weight": ((H, D), ("mixer.b_proj",), _matrix()),
        "linear_attn.in_proj_a.weight": ((H, D), ("mixer.a_proj",), _matrix()),
        "linear_attn.A_log": ((H,), ("mixer.a_log",), _same),
        "linear_attn.dt_bias": ((H,), ("mixer.dt_bias",), _same),
        "linear_attn.norm.weight": ((V,), ("mixer.norm",), _same),
        "linear_attn.out_proj.weight": ((D, H * V), ("mixer.out_proj",), _output_matrix(H, V)),
    }
