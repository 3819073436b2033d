"""Reading `config.json` in its layouts, and refusing what is not implemented."""

from __future__ import annotations

import json

import pytest
from tiny_models import SMALL_PIECES, TINY_QWEN3, TINY_QWEN3_5, tiny_config

from reterm_jax.policy.config import ConfigError, QwenConfig


def test_round_trip(config):
    assert QwenConfig.from_hf(config.to_hf(), **SMALL_PIECES) == config


def test_multimodal_config_contributes_its_text_part():
    raw = {"model_type": "qwen3_5", "text_config": TINY_QWEN3_5, "vision_config": {}, "tie_word_embeddings": True}
    config = QwenConfig.from_hf(raw)
    assert config.family == "qwen3_5" and config.tie_word_embeddings
    assert config.partial_rotary_factor == 0.25


def test_layer_types_follow_the_interval():
    raw = {key: value for key, value in TINY_QWEN3_5.items() if key != "layer_types"}
    config = QwenConfig.from_hf({**raw, "num_hidden_layers": 8})
    assert config.layer_pattern == ("linear_attention",) * 3 + ("full_attention",)
    assert config.num_blocks == 2


def test_layers_without_a_period_are_one_block():
    layer_types = ("linear_attention", "full_attention", "full_attention")
    config = tiny_config("qwen3_5", num_hidden_layers=3, layer_types=layer_types)
    assert config.layer_pattern == layer_types and config.num_blocks == 1


def test_older_rotary_spelling():
    raw = {key: value for key, value in TINY_QWEN3.items() if key != "rope_parameters"}
    assert QwenConfig.from_hf({**raw, "rope_theta": 1e6, "rope_scaling": None}).rope_theta == 1e6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "llama"}, "model_type 'llama'"),
        ({"attention_bias": True}, "'attention_bias'"),
        ({"use_sliding_window": True}, "'use_sliding_window'"),
        ({"hidden_act": "gelu"}, "'hidden_act'"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type 'yarn'"),
        ({"rope_parameters": None, "rope_scaling": {"type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
        ({"head_dim": None}, "'head_dim' is missing"),
        ({"num_key_value_heads": 3}, "num_key_value_heads = 3"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 2}, "layer_types"),
    ],
)
def test_what_is_not_implemented_is_refused(change, message):
    with pytest.raises(ConfigError, match=message):
        QwenConfig.from_hf({**TINY_QWEN3, **change})


def test_errors_name_the_file(tmp_path):
    with pytest.raises(ConfigError, match="config.json: no such file"):
        QwenConfig.from_hf(tmp_path)
    path = tmp_path / "config.json"
    path.write_text("{")
    with pytest.raises(ConfigError, match="config.json: not JSON"):
        QwenConfig.from_hf(tmp_path)
    path.write_text(json.dumps({**TINY_QWEN3, "vocab_size": None}))
    with pytest.raises(ConfigError, match="config.json: field 'vocab_size'"):
        QwenConfig.from_hf(path)


def test_own_fields_are_checked():
    with pytest.raises(ConfigError, match="compute_dtype = 'float16'"):
        tiny_config("qwen3", compute_dtype="float16")
    with pytest.raises(ConfigError, match="chunk_size = 48"):
        tiny_config("qwen3", chunk_size=48)
