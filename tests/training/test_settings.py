"""Values that cannot work are refused before anything runs, by the name of their field."""

import importlib.util
from pathlib import Path

import pytest

from reterm_jax.training.settings import SettingsError, read_settings

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
        ({"rl__failed_credit": 2.0}, "config.rl: failed_credit must be in [0, 1], got 2.0"),
    ],
)
def test_a_value_that_cannot_work_is_named(fields, said):
    with pytest.raises(SettingsError) as error:
        read_settings(quickstart(**fields))
    assert said in str(error.value)
