"""Values that cannot work are refused before anything runs, by the name of their field."""

import importlib.util
from pathlib import Path

import pytest

from reterm_jax.training.settings import SettingsError, read_settings, rollout_identity

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.py"


def quickstart(**overrides):
    spec = importlib.util.spec_from_file_location("quickstart", QUICKSTART)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    config = module.get_config()
    config.update_from_flattened_dict({name.replace("__", "."): value for name, value in overrides.items()})
    return config


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"rl__fork_at": "start"}, "config.rl: fork_at 'start' is unknown; one of end, error, uniform"),
        ({"agent__recovery_budget": "half"}, "config.agent: limit recovery_budget is 'half'; it must be 'fresh' or"),
        ({"rl__choose": "best"}, "config.rl: choose 'best' is unknown; one of balanced, all, target"),
        ({"rl__target_rate": 2.0}, "config.rl: target_rate must be in [0, 1], got 2.0"),
        ({"rl__max_depth": 2}, "config.rl: max_depth is 2, but failed recoveries wait for the step after, and"),
        ({"rl__pool_size": 0}, "config.rl: max_depth 1 and size 0 must be at least 1"),
        ({"rl__baseline": "median"}, "config.rl: baseline 'median' is unknown; one of mean, leave_one_out, length"),
        ({"rl__kl_estimate": "k2"}, "config.rl: kl_estimate 'k2' is unknown; one of k1, k3"),
        ({"rl__kl_weight": -0.1}, "config.rl: kl_weight must not be negative, got -0.1"),
        ({"rl__entropy_weight": -0.1}, "config.rl: entropy_weight must not be negative"),
        ({"rl__clip_dual": 0.5}, "config.rl: clip_dual must be above 1, or 0 to have none, got 0.5"),
        ({"rl__objective_args": "delta"}, "config.rl: objective_args has 'delta'; write name=number"),
        (
            {"rl__objective": "dppo_tv", "rl__objective_args": "eps=1"},
            "config.rl: objective 'dppo_tv' cannot be called",
        ),
        ({"rl__sampler_correction": "turn"}, "config.rl: sampler_correction 'turn' is unknown; one of none, token"),
        ({"rl__correction_mode": "clip"}, "config.rl: correction_mode 'clip' is unknown; one of capped, masked"),
        ({"rl__correction_cap": 1.0}, "config.rl: correction_cap must be above 1, got 1.0"),
        ({"rl__max_mismatch": -1.0}, "config.rl: max_mismatch must not be negative, got -1.0"),
        ({"rl__validate_every": 5}, "config.rl: validate_every is 5 and validation_tasks 0; set both"),
        ({"rl__moments_dtype": "int8"}, "config.rl: moments_dtype 'int8' is unknown; one of float32, bfloat16"),
        ({"rl__failed_credit": 2.0}, "config.rl: failed_credit must be in [0, 1], got 2.0"),
        ({"rollout__max_staleness": 1}, "config.rollout: max_staleness is 1, but a sampler in the trainer's process"),
        ({"rollout__max_staleness": -1}, "config.rollout: max_staleness must not be negative, got -1"),
        ({"rollout__refills": -1}, "config.rollout: refills must not be negative, got -1"),
        ({"rollout__spares": -1}, "config.rollout: spares must not be negative, got -1"),
        ({"rollout__service": "localhost:1"}, "config.rollout: 'localhost:1' is no URL; write http://HOST:PORT"),
        ({"rollout__vllm": ()}, "config.rollout: vllm is (); name each server once, and one at least"),
        ({"rollout__on_failure": "wait"}, "config.rollout: on_failure is 'wait'; it must be 'exclude' or 'stop'"),
        ({"rollout__keep": 0}, "config.rollout: keep 0 must be at least 1"),
        ({"rl__ema_decay": 1.0}, "config.rl: ema_decay must be at least 0 and below 1, got 1.0"),
        (
            {"rl__ema_decay": 0.9, "rl__validate_every": 2, "rl__validation_tasks": 4},
            "config.rl: ema_decay is 0.9 and validate_every 2; the result is either the average or the best by",
        ),
        ({"rl__name": "SFT"}, "config.rl: name is 'SFT'; it must be none of base, SFT, and have no /"),
        ({"rl__name": "a/b"}, "config.rl: name is 'a/b'; it must be none of base, SFT, and have no /"),
        ({"rl__regularise": "none"}, "config.rl: regularise 'none' is unknown; one of all, trained"),
        ({"sft__data": "rows.csv"}, "config.sft.data is rows.csv; give a .jsonl or .parquet file"),
        ({"sft__data": "no/rows.jsonl"}, "config.sft.data: there is no file"),
    ],
)
def test_a_value_that_cannot_work_is_named(fields, said):
    with pytest.raises(SettingsError) as error:
        read_settings(quickstart(**fields))
    assert said in str(error.value)


def test_hyper_parameters_reach_the_objective():
    settings = read_settings(quickstart(rl__objective="dppo_tv", rl__objective_args="delta=0.05"))
    assert settings.rl.step.objective_args == {"delta": 0.05}
    settings = read_settings(quickstart(rl__clip_dual=3.0))
    assert settings.rl.step.objective_args == {"clip_low": 0.2, "clip_high": 0.28, "clip_dual": 3.0}


def test_attempts_without_advantage_are_trained_on_where_a_term_beside_the_objective_has_a_gradient():
    def kept(**fields):
        return read_settings(quickstart(**fields)).rl.loop.zero_advantage

    assert not kept() and kept(rl__kl_weight=0.1) and kept(rl__entropy_weight=0.1)
    assert not kept(rl__kl_weight=0.1, rl__regularise="trained")


def test_the_defaults_need_no_pass_beside_the_updates():
    settings = read_settings(quickstart())
    scoring = settings.rl.scoring
    assert not scoring.own and not scoring.reference and not settings.rl.step.ema_decay
    assert read_settings(quickstart(rl__kl_weight=0.1)).rl.scoring.reference
    assert read_settings(quickstart(rl__sampler_correction="token")).rl.scoring.own


def test_a_service_may_differ_from_its_trainer_in_what_no_group_depends_on():
    ours = rollout_identity(quickstart())
    assert ours == rollout_identity(quickstart(rollout__patience=5.0, rl__learning_rate=1.0, rl__save_every=9))
    theirs = rollout_identity(quickstart(rl__forks=9, agent__max_turns=3, rollout__refills=2))
    differing = {name for name in ours if ours[name] != theirs[name]}
    assert differing == {"rl.forks", "agent.max_turns", "rollout.refills"}
