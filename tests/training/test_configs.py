"""Every experiment in configs/ is accepted, and its fields reach the policy and the steps."""

import importlib.util
from pathlib import Path

import pytest

from reterm_jax.policy.config import ConfigError
from reterm_jax.training.model import policy_config
from reterm_jax.training.settings import read_settings

REPO = Path(__file__).parents[2]
SMALL = {
    "model_type": "qwen3",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
}


def config(name):
    spec = importlib.util.spec_from_file_location(name, REPO / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()


@pytest.mark.parametrize("name", sorted(path.stem for path in (REPO / "configs").glob("*.py")))
def test_settings_are_read(name):
    read_settings(config(name))


@pytest.mark.parametrize("name", ["sft_9b", "reterm_grpo_9b"])
def test_long_rows_of_the_9b_configs(name):
    settings = read_settings(config(name))
    assert settings.sft.loop.row_length == settings.rl.loop.row_length == settings.limits.max_tokens == 65_536
    assert settings.sft.step.micro_rows == settings.rl.step.micro_rows == 2
    assert settings.rl.loop.steps == (0 if name == "sft_9b" else 200)
    assert policy_config(SMALL, config(name).model).remat == "full"


@pytest.mark.parametrize(
    ("dtype", "remat", "expected"),
    [
        ("float32", "auto", "none"),
        ("bfloat16", "auto", "full"),
        ("bfloat16", "dots", "dots"),
        ("float32", "full", "full"),
    ],
)
def test_remat_is_a_field_of_the_config(dtype, remat, expected):
    compute = config("quickstart").model
    compute.dtype, compute.remat = dtype, remat
    assert policy_config(SMALL, compute).remat == expected


def test_unknown_remat_is_named():
    compute = config("quickstart").model
    compute.remat = "some"
    with pytest.raises(ConfigError, match="remat = 'some'"):
        policy_config(SMALL, compute)
