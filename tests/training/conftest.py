"""The smallest policies on a mesh of one device, and one compiled SFT step that several tests share.

Compiling is what takes time here. Steps are therefore tested on a dense policy of one layer; that packing does not
change the hybrid's values is tested in tests/policy.
"""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import abstract_params, param_specs
from reterm_jax.tokens.packing import Example
from reterm_jax.training.optimizer import OptimizerConfig, make_optimizer
from reterm_jax.training.state import abstract_state, state_from_params
from reterm_jax.training.steps import StepConfig, make_sft_step

VOCAB = 32
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "tie_word_embeddings": True,
    "compute_dtype": "float32",
    "remat": "none",
}


def make_policy(config):
    mesh = make_mesh()
    shardings = param_shardings(config, mesh)
    rng = np.random.default_rng(0)
    # Drawn by numpy: compiling the initialisers would take longer than most tests.
    params = jax.tree.map(lambda spec: rng.normal(0, 0.3, spec.shape).astype(np.float32), param_specs(config))
    return SimpleNamespace(
        config=config,
        mesh=mesh,
        shardings=shardings,
        specs=param_specs(config),
        new_state=lambda optimizer: state_from_params(params, optimizer, mesh, shardings),
        abstract_state=lambda optimizer: abstract_state(abstract_params(config), optimizer, mesh, shardings),
    )


@pytest.fixture(scope="session")
def policy():
    return make_policy(QwenConfig("qwen3", num_hidden_layers=1, layer_types=("full_attention",), **SIZES))


@pytest.fixture(scope="session")
def hybrid():
    """One DeltaNet layer and one of attention: every kind of parameter that an optimizer meets."""
    linear = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8}
    layers = ("linear_attention", "full_attention")
    return make_policy(
        QwenConfig("qwen3_5", num_hidden_layers=2, layer_types=layers, linear_value_head_dim=8, **linear, **SIZES)
    )


@pytest.fixture(scope="session")
def sft(policy):
    """Adam and an SFT step on micro-batches of two rows."""
    optimizer = make_optimizer(OptimizerConfig(learning_rate=0.02), policy.specs, 100)
    step = make_sft_step(policy.config, StepConfig(micro_rows=2), optimizer, policy.mesh, policy.shardings)
    return SimpleNamespace(optimizer=optimizer, step=step)


@pytest.fixture(scope="session")
def examples():
    """Eight documents of different lengths, with every field that a step reads."""
    rng = np.random.default_rng(0)
    made = []
    for index, n in enumerate([17, 5, 9, 12, 3, 16, 8, 11]):
        mask = rng.random(n) < 0.6
        mask[0], mask[-1] = False, True
        made.append(
            Example(
                rng.integers(0, VOCAB, n),
                mask,
                advantage=float(rng.normal()),
                old_logprobs=np.log(rng.uniform(0.01, 0.1, n)),
                weight=1.0 + index % 2,
                name=str(index),
            )
        )
    return made
