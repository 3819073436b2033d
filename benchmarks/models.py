"""The policy that the benchmarks of forks run: Qwen3.5 in small, with the proportions of the published sizes."""

from __future__ import annotations

from reterm_jax.policy.config import QwenConfig


def small_qwen(hidden: int, layers: int, **numerics) -> QwenConfig:
    """Every fourth layer is full attention; heads of 64, four query heads to a key/value head, an MLP of 3 x hidden.

    Args:
      numerics: fields of `QwenConfig` such as `remat`; float32 unless they say otherwise.
    """
    return QwenConfig.from_hf(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 1024,
            "hidden_size": hidden,
            "intermediate_size": 3 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": hidden // 64,
            "num_key_value_heads": max(1, hidden // 256),
            "head_dim": 64,
            "linear_num_key_heads": max(1, hidden // 128),
            "linear_num_value_heads": hidden // 64,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "tie_word_embeddings": True,
        },
        **{"compute_dtype": "float32", **numerics},
    )
