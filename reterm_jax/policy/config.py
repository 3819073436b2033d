"""The architecture of a Qwen policy, read from and written to a Hugging Face `config.json`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

LINEAR = "linear_attention"
FULL = "full_attention"
BLOCKWISE = "blockwise"

_FAMILY_OF_MODEL_TYPE = {"qwen3": "qwen3", "qwen3_5": "qwen3_5", "qwen3_5_text": "qwen3_5"}
_ARCHITECTURE = {"qwen3": ("qwen3", "Qwen3ForCausalLM"), "qwen3_5": ("qwen3_5_text", "Qwen3_5ForCausalLM")}
REMAT = ("none", "dots", "mixers", "full")
_DTYPES = ("float32", "bfloat16")
_ATTENTION = (BLOCKWISE, "splash", "pallas_gpu")


class ConfigError(ValueError):
    """A model configuration that this package does not implement; the message names file and field."""


@dataclasses.dataclass(frozen=True)
class QwenConfig:
    """Sizes and numerics of one policy; hashable, so it can be a static argument of `jax.jit`.

    Field names follow `config.json`. The `linear_*` fields are only used by `qwen3_5`. The last group is ours:
      compute_dtype: dtype of matmuls and activations ("float32" or "bfloat16"); master parameters stay float32.
      remat: what a layer keeps for its backward pass: "full" (full recomputation: its input), "mixers" (also results of
        attention and DeltaNet, [T,D] arrays that cost the most time), "dots" (also those of matmuls), "none" (all).
      chunk_size: tokens per DeltaNet chunk, a power of two.
      attention_block: queries and keys that meet at once in training; bounds the scores to [block, block] a head.
      attention: "blockwise", or the fused kernel for rows that it takes: "splash" (TPU), "pallas_gpu".
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    layer_types: tuple[str, ...]
    rope_theta: float = 10_000.0
    partial_rotary_factor: float = 1.0
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    initializer_range: float = 0.02
    max_position_embeddings: int = 32_768
    eos_token_id: int | tuple[int, ...] | None = None
    linear_num_key_heads: int = 0
    linear_num_value_heads: int = 0
    linear_key_head_dim: int = 0
    linear_value_head_dim: int = 0
    linear_conv_kernel_dim: int = 4
    compute_dtype: str = "bfloat16"
    remat: str = "full"
    chunk_size: int = 64
    attention_block: int = 256
    attention: str = BLOCKWISE

    def __post_init__(self) -> None:
        def require(ok: bool, field: str, remedy: str) -> None:
            if not ok:
                raise ConfigError(f"QwenConfig.{field} = {getattr(self, field)!r}: {remedy}")

        require(self.family in _ARCHITECTURE, "family", f"use one of {sorted(_ARCHITECTURE)}")
        require(self.compute_dtype in _DTYPES, "compute_dtype", f"use one of {_DTYPES}")
        require(self.remat in REMAT, "remat", f"use one of {REMAT}")
        require(self.attention in _ATTENTION, "attention", f"use one of {_ATTENTION}")
        require(len(self.layer_types) == self.num_hidden_layers, "layer_types", "one entry per hidden layer")
        known = (FULL, LINEAR) if self.family == "qwen3_5" else (FULL,)
        require(set(self.layer_types) <= set(known), "layer_types", f"only {known} are implemented for {self.family}")
        require(
            self.num_attention_heads % self.num_key_value_heads == 0,
            "num_key_value_heads",
            f"must divide num_attention_heads = {self.num_attention_heads}",
        )
        require(
            self.rotary_dim > 0 and self.rotary_dim % 2 == 0,
            "partial_rotary_factor",
            f"head_dim {self.head_dim} times the factor must be even and positive",
        )
        power_of_two = self.chunk_size > 0 and self.chunk_size & (self.chunk_size - 1) == 0
        require(power_of_two, "chunk_size", "must be a power of two")
        if LINEAR in self.layer_types:
            for field in ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim"):
                require(getattr(self, field) > 0, field, "must be positive where linear_attention layers exist")
            require(
                self.linear_num_value_heads > 0 and self.linear_num_value_heads % self.linear_num_key_heads == 0,
                "linear_num_value_heads",
                f"must be a positive multiple of linear_num_key_heads = {self.linear_num_key_heads}",
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def gated_attention(self) -> bool:
        """Whether full attention multiplies its output by a learned sigmoid gate."""
        return self.family == "qwen3_5"

    @property
    def norm_offset(self) -> float:
        """What is added to a stored RMSNorm weight before it multiplies: qwen3_5 stores w and applies 1 + w."""
        return 1.0 if self.family == "qwen3_5" else 0.0

    @property
    def layer_pattern(self) -> tuple[str, ...]:
        """The shortest sequence of layer types that repeats to give `layer_types`: one scanned block."""
        for period in range(1, self.num_hidden_layers + 1):
            repeats, rest = divmod(self.num_hidden_layers, period)
            if rest == 0 and self.layer_types[:period] * repeats == self.layer_types:
                return self.layer_types[:period]
        raise ConfigError("QwenConfig.num_hidden_layers = 0: a model needs at least one layer")

    @property
    def num_blocks(self) -> int:
        return self.num_hidden_layers // len(self.layer_pattern)

    def replace(self, **changes: Any) -> QwenConfig:
        return dataclasses.replace(self, **changes)

    @classmethod
    def from_hf(cls, source: Mapping[str, Any] | str | Path, **overrides: Any) -> QwenConfig:
        """Reads a `config.json` (its dict, its path or its directory); `overrides` set our own fields.

        A multimodal configuration contributes its `text_config`. Raises ConfigError, naming file and field, for a
        missing field or for a feature that would change the computation (biases, sliding windows, scaled rotary).
        """
        raw, where = _read(source)
        outer = raw
        if "text_config" in raw:
            raw = {**raw["text_config"]}
            raw.setdefault("tie_word_embeddings", outer.get("tie_word_embeddings", False))
        family = _FAMILY_OF_MODEL_TYPE.get(raw.get("model_type", ""))
        if family is None:
            raise ConfigError(
                f"{where}: model_type {raw.get('model_type')!r} is not one of {sorted(_FAMILY_OF_MODEL_TYPE)}"
            )
        _reject_unimplemented(raw, where)
        values: dict[str, Any] = {"family": family, **_common_fields(raw, where)}
        values |= _rotary_fields(raw, family)
        values["layer_types"] = _layer_types(raw, family)
        if family == "qwen3_5":
            for field in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim"):
                values[f"linear_{field}"] = _field(raw, f"linear_{field}", where)
        return cls(**{**values, **overrides})

    def to_hf(self) -> dict[str, Any]:
        """The text-only `config.json` of this architecture, as `transformers` reads it."""
        model_type, architecture = _ARCHITECTURE[self.family]
        same = (
            "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
            "head_dim rms_norm_eps tie_word_embeddings initializer_range max_position_embeddings"
        ).split()
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": self.rope_theta}
        if self.family == "qwen3_5":
            same += [f.name for f in dataclasses.fields(self) if f.name.startswith("linear_")]
            rope["partial_rotary_factor"] = self.partial_rotary_factor
        out: dict[str, Any] = {"model_type": model_type, "architectures": [architecture]}
        out |= {name: getattr(self, name) for name in same}
        # The older spelling of the rotary base is written too: some serving stacks read only that one.
        out |= {"rope_parameters": rope, "rope_theta": self.rope_theta, "layer_types": list(self.layer_types)}
        out |= {"hidden_act": "silu", "attention_bias": False, "use_cache": True}
        if self.eos_token_id is not None:
            out["eos_token_id"] = list(self.eos_token_id) if isinstance(self.eos_token_id, tuple) else self.eos_token_id
        return out


def _read(source: Mapping[str, Any] | str | Path) -> tuple[Mapping[str, Any], str]:
    if isinstance(source, Mapping):
        return source, "config dict"
    path = Path(source)
    path = path / "config.json" if path.is_dir() else path
    try:
        return json.loads(path.read_text(encoding="utf-8")), str(path)
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; a model directory holds config.json beside its weights") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{path}: not JSON ({error}); download the file again") from None


def _field(raw: Mapping[str, Any], name: str, where: str) -> Any:
    if raw.get(name) is None:
        raise ConfigError(f"{where}: field {name!r} is missing; add it as the model's authors published it")
    return raw[name]


def _common_fields(raw: Mapping[str, Any], where: str) -> dict[str, Any]:
    required = (
        "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim"
    ).split()
    values = {name: _field(raw, name, where) for name in required}
    for name in ("rms_norm_eps", "tie_word_embeddings", "initializer_range", "max_position_embeddings"):
        if raw.get(name) is not None:
            values[name] = raw[name]
    eos = raw.get("eos_token_id")
    values["eos_token_id"] = tuple(eos) if isinstance(eos, list) else eos
    return values


def _rotary_fields(raw: Mapping[str, Any], family: str) -> dict[str, Any]:
    rope = raw.get("rope_parameters") or {}
    partial = rope.get("partial_rotary_factor", raw.get("partial_rotary_factor"))
    if partial is None:
        partial = 0.25 if family == "qwen3_5" else 1.0
    return {
        "rope_theta": float(rope.get("rope_theta", raw.get("rope_theta", 10_000.0))),
        "partial_rotary_factor": float(partial),
    }


def _layer_types(raw: Mapping[str, Any], family: str) -> tuple[str, ...]:
    if raw.get("layer_types"):
        return tuple(raw["layer_types"])
    layers = raw["num_hidden_layers"]
    if family == "qwen3":
        return (FULL,) * layers
    interval = raw.get("full_attention_interval", 4)
    return tuple(LINEAR if (i + 1) % interval else FULL for i in range(layers))


def _reject_unimplemented(raw: Mapping[str, Any], where: str) -> None:
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    checks = {
        "attention_bias": (bool(raw.get("attention_bias", False)), "biases are not implemented"),
        "use_sliding_window": (bool(raw.get("use_sliding_window", False)), "sliding windows are not implemented"),
        "hidden_act": (raw.get("hidden_act", "silu") != "silu", "only 'silu' is implemented"),
        "attn_output_gate": (raw.get("attn_output_gate") is False, "qwen3_5 attention is always gated here"),
        "rope_parameters": (rope_type != "default", f"rope_type {rope_type!r} is not implemented, only 'default'"),
    }
    for field, (bad, reason) in checks.items():
        if bad:
            raise ConfigError(f"{where}: field {field!r} = {raw.get(field)!r}: {reason}")
