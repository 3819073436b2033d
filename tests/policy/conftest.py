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
    return jax.random.key(0)
