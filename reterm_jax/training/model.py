"""The policy that a run trains: its architecture, tokenizer and chat format, from a directory or made on the spot."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh
from ml_collections import ConfigDict

from reterm_jax.policy import hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.fused_attention import choose_attention
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import init_params
from reterm_jax.tokens.chat import ChatFormat


@dataclasses.dataclass(frozen=True)
class Model:
    """Everything about the policy but its weights.

    Attributes:
      directory: holds config.json and the tokenizer's files.
      shardings: one NamedSharding per parameter.
    """

    directory: Path
    config: QwenConfig
    tokenizer: Any
    chat: ChatFormat
    mesh: Mesh
    shardings: Any

    @property
    def stop_id(self) -> int:
        """The token that ends a turn."""
        return self.chat.stop_id

    def initial_params(self, seed: int, pretrained: bool) -> Any:
        """Weights on the mesh: those of the directory, or random ones."""
        if pretrained:
            return hf.load_params(self.directory, self.config, shardings=self.shardings)
        with jax.set_mesh(self.mesh):
            init = jax.jit(init_params, static_argnums=0, out_shardings=self.shardings)
            return init(self.config, jax.random.key(seed))


def policy_config(source: Mapping[str, Any] | Path, compute: ConfigDict) -> QwenConfig:
    """The architecture of a Hugging Face `config.json` (or its dict) with the numerics that `config.model` asks for.

    `compute.remat` is a value of `QwenConfig.remat`, or "auto": nothing is recomputed in float32, which is for small
    models, and everything in bfloat16. The form of attention is not set here, as it depends on the devices.
    """
    automatic = "none" if compute.dtype == "float32" else "full"
    return QwenConfig.from_hf(
        source,
        compute_dtype=compute.dtype,
        remat=automatic if compute.remat == "auto" else compute.remat,
        chunk_size=compute.chunk_size,
        attention_block=compute.attention_block,
    )


def load_model(directory: Path, compute: ConfigDict, mesh_sizes: ConfigDict) -> Model:
    """Reads config and tokenizer of a Hugging Face directory and lays the parameters out on a mesh.

    Args:
      compute: `config.model`, see `policy_config`.
    """
    from transformers import AutoTokenizer

    config = policy_config(directory, compute)
    attention, reason = choose_attention(compute.attention, config)
    print(f"attention: {attention} ({reason})", flush=True)
    config = dataclasses.replace(config, attention=attention)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    mesh = make_mesh(**mesh_sizes)
    return Model(directory, config, tokenizer, ChatFormat(tokenizer), mesh, param_shardings(config, mesh))


def write_tiny_model(directory: Path, sizes: ConfigDict, corpus: Iterable[str]) -> None:
    """Writes the config and tokenizer of the quickstart's own small Qwen3.5; config.json comes last.

    Args:
      sizes: `config.model` of the quickstart.
      corpus: texts whose words become tokens.
    """
    from transformers import AutoTokenizer

    from reterm_jax.tokens import tiny_tokenizer

    tiny_tokenizer.build(corpus, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    config = {
        "model_type": "qwen3_5_text",
        "architectures": ["Qwen3_5ForCausalLM"],
        "vocab_size": len(tokenizer),
        # About 1/sqrt(hidden); the 0.02 of published configs is meant for wide models.
        "initializer_range": 0.08,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "linear_num_key_heads": sizes.linear_heads,
        "linear_num_value_heads": sizes.linear_heads,
        "linear_key_head_dim": sizes.linear_head_dim,
        "linear_value_head_dim": sizes.linear_head_dim,
        "linear_conv_kernel_dim": 4,
        "full_attention_interval": sizes.full_attention_interval,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.convert_tokens_to_ids("<|im_end|>"),
    }
    partial = directory / "config.json.partial"
    partial.write_text(json.dumps(config, indent=1), encoding="utf-8")
    partial.rename(directory / "config.json")
