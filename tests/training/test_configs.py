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


NAMES = sorted(path.stem for path in (REPO / "configs").glob("*.py"))


def load(name):
    spec = importlib.util.spec_from_file_location(name, REPO / "configs" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def config(name):
    return load(name).get_config()


def flat(values, prefix=""):
    """(full name, value) of every field."""
    for name, value in values.items():
        yield from flat(value, f"{prefix}{name}.") if isinstance(value, dict) else [(prefix + name, value)]


@pytest.mark.parametrize("name", NAMES)
def test_every_config_is_accepted_and_has_all_fields_and_no_other(name):
    read_settings(config(name))
    assert dict(flat(config(name).to_dict())).keys() == dict(flat(config("quickstart").to_dict())).keys()


@pytest.mark.parametrize("name", NAMES)
def test_every_config_states_command_hardware_and_result(name):
    text = (REPO / "configs" / f"{name}.py").read_text()
    documented = text.split('"""')[1]
    assert all(f"\n{word}:" in documented for word in ("Command", "Hardware", "Result"))
    assert name == "quickstart" or f"configs/{name}.py" in documented or f"launch/{name}.sh" in documented


def test_the_arms_of_the_ablation_differ_in_nothing_but_their_rollouts():
    module = load("ablation")
    arms = {arm: dict(flat(module.get_config(arm).to_dict())) for arm in module.ARMS}
    for arm, values in arms.items():
        read_settings(module.get_config(arm))
        differing = {key for key in values if values[key] != arms["reterm_grpo"][key]}
        rollouts = {"tasks", "states", "fork_at", "steps", "step_tokens", "name"}
        assert differing <= {f"rl.{field}" for field in rollouts}, arm
        assert (values["rl.step_tokens"] != arms["reterm_grpo"]["rl.step_tokens"]) == (arm == "grpo_half")
        assert (values["rl.steps"] == 0) == (arm == "cold_start")
    rounds = {arm: v["rl.tasks"] * v["rl.attempts"] + v["rl.states"] * v["rl.forks"] for arm, v in arms.items()}
    assert len({rounds[arm] for arm in arms if arm != "cold_start"}) == 1
    with pytest.raises(ValueError, match="has no arm 'ppo'; one of cold_start, grpo"):
        module.get_config("ppo")


def test_tmax_has_its_published_values():
    settings = read_settings(config("tmax_9b"))
    loop, step, optimizer, limits = settings.rl.loop, settings.rl.step, settings.rl.optimizer, settings.limits
    assert (loop.tasks, loop.attempts, loop.states, loop.baseline, loop.standardise) == (8, 32, 0, "mean", False)
    assert settings.schedule.refills > 0
    assert (step.objective, step.objective_args, step.aggregation) == ("dppo_tv", {"delta": 0.1}, "token")
    assert (step.temperature, step.kl_weight, step.entropy_weight) == (1.0, 0.0, 0.0)
    assert (optimizer.name, optimizer.learning_rate, optimizer.schedule, optimizer.warmup) == (
        "adamw",
        1e-6,
        "constant",
        0.0,
    )
    assert optimizer.clip_norm == settings.sft.optimizer.clip_norm == 1.0
    assert (limits.max_turns, limits.max_turn_tokens, limits.max_tokens) == (64, 16_384, 65_536)
    assert (limits.command_timeout, limits.output_limit) == (120.0, 10_000)
    sft = settings.sft.optimizer
    assert (sft.learning_rate, sft.schedule, sft.warmup, settings.sft.loop.epochs) == (2e-5, "linear", 0.03, 2)


def test_grpo_spends_as_many_attempts_as_reterm_grpo():
    settings = [read_settings(config(name)).rl for name in ("grpo_9b", "reterm_grpo_9b")]
    # One program: the memory plan of one holds for the other.
    assert settings[0].step == settings[1].step and settings[0].optimizer == settings[1].optimizer
    plain, forked = (rl.loop for rl in settings)
    attempts = [loop.tasks * loop.attempts + loop.states * loop.forks for loop in (plain, forked)]
    assert attempts == [256, 256] and plain.states == 0
    values = [dict(flat(config(name).to_dict())) for name in ("grpo_9b", "reterm_grpo_9b")]
    assert {key for key in values[0] if values[0][key] != values[1][key]} == {"rl.attempts", "rl.states"}


@pytest.mark.parametrize("name", ["sft_9b", "reterm_grpo_9b", "grpo_9b", "tmax_9b"])
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
