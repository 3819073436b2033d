from __future__ import annotations

import jax
import pytest
from tiny_models import tiny_config

from reterm_jax.policy.config import QwenConfig


@pytest.fixture(params=["qwen3", "qwen3_5"])
def config(request) -> QwenConfig:
    return tiny_config(request.param)


@pytest.fixture
def key() -> jax.Array:
    # This generator compiles several times faster than the default one.
    return jax.random.key(0, impl="unsafe_rbg")


@pytest.fixture(autouse=True)
def light_compilation():
    """These models run for microseconds and compile for seconds."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
