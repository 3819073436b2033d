"""Meshes and rules; equality of one and of eight devices runs in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from jax.sharding import PartitionSpec
from tiny_models import tiny_config

from reterm_jax.policy import sharding
from reterm_jax.policy.sharding import DEFAULT_RULES, ShardingError, make_mesh, param_shardings
from reterm_jax.policy.spec import param_specs


def wide_mesh(**sizes):
    """What the rules need of a mesh, for more devices than this process has."""
    return SimpleNamespace(shape={"data": 1, "fsdp": 1, "tensor": 1, **sizes})


def test_rules_give_the_partition():
    specs = param_specs(tiny_config("qwen3_5"))
    partition = sharding._partition("embed", specs["embed"], wide_mesh(), DEFAULT_RULES)
    assert partition == PartitionSpec("tensor", "fsdp")
    mixer = specs["layers"]["1"]["mixer"]
    assert sharding._partition("o", mixer["o_proj"], wide_mesh(), DEFAULT_RULES) == PartitionSpec(
        None, "tensor", None, "fsdp"
    )


def test_one_device_accepts_every_model(config):
    assert param_shardings(config, make_mesh())["final_norm"].spec == PartitionSpec(None)


def test_indivisible_axis_names_parameter_and_axis():
    spec = param_specs(tiny_config("qwen3_5"))["layers"]["1"]["mixer"]["k_proj"]
    message = r"layers\.1\.mixer\.k_proj: axis 'kv_heads' of size 2 is not divisible by mesh axis 'tensor' of size 4"
    with pytest.raises(ShardingError, match=message):
        sharding._partition("layers.1.mixer.k_proj", spec, wide_mesh(tensor=4), DEFAULT_RULES)
    replicated = {**DEFAULT_RULES, "kv_heads": None}
    assert sharding._partition("k", spec, wide_mesh(tensor=4), replicated) == PartitionSpec(None, "fsdp", None, None)


def test_missing_rule_is_named():
    spec = param_specs(tiny_config("qwen3"))["embed"]
    with pytest.raises(ShardingError, match="embed: logical axis 'vocab' has no sharding rule"):
        sharding._partition("embed", spec, wide_mesh(), {"embed": None})


def test_too_few_devices():
    with pytest.raises(ShardingError, match="needs 4096 devices"):
        make_mesh(data=64, tensor=64)


EIGHT_DEVICES = textwrap.dedent(
    """
    import jax, jax.numpy as jnp, numpy as np
    jax.config.update("jax_disable_most_optimizations", True)
    from reterm_jax.policy.forward import head, hidden_states
    from reterm_jax.policy.sharding import ShardingError, batch_sharding, make_mesh, param_shardings
    from reterm_jax.policy.spec import init_params
    from tiny_models import tiny_config

    assert len(jax.devices()) == 8
    rows = np.random.default_rng(0)
    tokens = rows.integers(0, 96, (8, 36))
    segments = np.sort(rows.integers(1, 4, (8, 36)), axis=1)
    positions = np.broadcast_to(np.arange(36), (8, 36))

    def loss(params, config, *batch):
        hidden = hidden_states(params, config, *batch)
        return jnp.mean(jax.nn.log_softmax(hidden @ head(params, config).T)[..., 5])

    for family in ("qwen3", "qwen3_5"):
        config = tiny_config(family, vocab_size=96, attention_block=32, chunk_size=32)
        params = init_params(config, jax.random.key(0, impl="unsafe_rbg"))
        value, gradients = jax.jit(jax.value_and_grad(loss), static_argnums=1)(
            params, config, tokens, segments, positions)
        for sizes in ((2, 2, 2),) if family == "qwen3_5" else ((1, 8, 1), (8, 1, 1)):
            mesh = make_mesh(*sizes)
            shardings = param_shardings(config, mesh)
            with jax.set_mesh(mesh):
                placed = jax.device_put(params, shardings)
                batch = jax.device_put((tokens, segments, positions), batch_sharding(mesh))
                step = jax.jit(jax.value_and_grad(loss), static_argnums=1, out_shardings=(None, shardings))
                sharded_value, sharded_gradients = step(placed, config, *batch)
            assert sharded_gradients["embed"].sharding == shardings["embed"]
            np.testing.assert_allclose(sharded_value, value, rtol=1e-5)
            for a, b in zip(jax.tree.leaves(sharded_gradients), jax.tree.leaves(gradients), strict=True):
                np.testing.assert_allclose(a, b, atol=2e-4 * np.abs(b).max() + 1e-8)

    with jax.set_mesh(make_mesh(data=8)):
        try:
            jax.jit(hidden_states, static_argnums=1)(params, config, tokens[:3], segments[:3], positions[:3])
        except ShardingError as error:
            assert "batch of 3 rows" in str(error)
        else:
            raise AssertionError("an indivisible batch was accepted")
    print("equal")
    """
)


def test_eight_devices_give_the_values_of_one(simulated):
    env = simulated(8)
    env["PYTHONPATH"] += os.pathsep + str(Path(__file__).parent)
    done = subprocess.run([sys.executable, "-c", EIGHT_DEVICES], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and done.stdout.strip().endswith("equal"), done.stderr[-4000:]
