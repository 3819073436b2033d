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
    ],
)
def test_a_value_that_cannot_work_is_named(fields, said):
    with pytest.raises(SettingsError) as error:
        read_settings(quickstart(**fields))
    assert said in str(error.value)
