"""Floating-point operations of the policy, from its shapes: for throughput figures and utilisation.

A multiply and an add count as two. Only matrix products count; the backward pass takes twice the forward pass.
"""

from __future__ import annotations

from reterm_jax.policy.config import LINEAR, QwenConfig


def forward_flops(config: QwenConfig, tokens: int, pairs: float | None = None) -> dict[str, float]:
    """Operations of one forward pass over `tokens` tokens, by part of the model.

    Args:
      tokens: computed positions, all documents together.
      pairs: query-key pairs that attend, summed over documents; one causal document of `tokens` tokens if None.

    Returns {"delta_net", "attention", "attention_pairs", "mlp", "lm_head"}; "attention" holds the projections and
    "attention_pairs" the scores and the weighted sum of values, the only part that is not linear in tokens.
    """
    c = config
    pairs = tokens * (tokens + 1) / 2 if pairs is None else pairs
    linear = sum(kind == LINEAR for kind in c.layer_types)
    full = c.num_hidden_layers - linear
    query = c.num_attention_heads * c.head_dim
    key = c.num_key_value_heads * c.head_dim
    projections = 2 * c.hidden_size * (query * (3 if c.gated_attention else 2) + 2 * key)
    return {
        "delta_net": tokens * linear * _delta_net(c) if linear else 0.0,
        "attention": tokens * full * projections,
        "attention_pairs": pairs * full * 4 * query,
        "mlp": tokens * c.num_hidden_layers * 6 * c.hidden_size * c.intermediate_size,
        "lm_head": tokens * 2 * c.hidden_size * c.vocab_size,
    }


def _delta_net(c: QwenConfig) -> float:
    """Of one layer and token: projections, convolution, and the chunked rule as `delta_net.py` computes it."""
    key_heads, heads, K, V = (
        c.linear_num_key_heads,
        c.linear_num_value_heads,
        c.linear_key_head_dim,
        c.linear_value_head_dim,
    )
    C = c.chunk_size
    keys, values = key_heads * K, heads * V
    projections = 2 * c.hidden_size * (2 * keys + 3 * values + 2 * heads)
    convolution = 2 * c.linear_conv_kernel_dim * (2 * keys + values)
    products = 2 * 2 * C * K * key_heads  # keys with keys, queries with keys
    inverse = 2 * C * C / 3 * heads  # two products of half size at each doubling
    within = 2 * 2 * C * (K + V) * heads  # the inverse, then the queries, times values and keys
    states = (2 * K * K + 2 * K * V + 2 * K * K * V / C + 2 * K * V) * heads  # forget, write, scan, read
    return projections + convolution + products + inverse + within + states
