"""Bytes per device that an update of a config takes, from a compilation in which nothing is allocated.

    python benchmarks/memory_plan.py --config=configs/sft_9b.py --device=h100
    python benchmarks/memory_plan.py --config=configs/sft_9b.py --stage=sft --model=27B --mesh=1,16,4 --device=v5p

The real step of each stage is compiled for abstract arrays on as many simulated CPU devices as the mesh has, and the
compiler says what it would allocate on one of them. Columns, in 10^9 bytes per device:

    params       float32 master parameters
    optimizer    the optimizer's moments
    gradients    float32 accumulators, which are as large as the parameters
    activations  what the loop over layers keeps for its backward pass
    temporaries  everything else that exists at one time, gradients of one micro-batch and gathered weights included
    total        all of it, the batch included
    budget       the device's memory less --reserve, for the runtime, communication buffers and fragmentation

What it is not. The CPU's compiler has no bfloat16 arithmetic and keeps many bfloat16 temporaries in float32, so that
activations and temporaries come out too large for GPUs and TPUs, up to twice; it neither fuses nor orders operations
as theirs do, which may go either way. State and gradients are exact. Nothing but the update is counted: an in-process
sampler on the same devices needs its caches besides.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from absl import app, flags
from jax.sharding import Mesh
from ml_collections import ConfigDict, config_flags

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import abstract_params, param_specs
from reterm_jax.training.model import policy_config
from reterm_jax.training.optimizer import make_optimizer
from reterm_jax.training.settings import Reinforcement, Supervised, read_settings
from reterm_jax.training.state import abstract_state
from reterm_jax.training.steps import make_rl_step, make_sft_step

_COMMON = {
    "model_type": "qwen3_5_text",
    "vocab_size": 248_320,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "tie_word_embeddings": False,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}
# The published sizes, by the fields of config.json.
MODELS = {
    "9B": _COMMON
    | {
        "hidden_size": 4096,
        "intermediate_size": 12_288,
        "num_hidden_layers": 32,
        "num_attention_heads": 16,
        "linear_num_value_heads": 32,
    },
    "27B": _COMMON
    | {
        "hidden_size": 5120,
        "intermediate_size": 17_408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "linear_num_value_heads": 48,
    },
}
# 10^9 bytes of memory.
DEVICES = {"a100": 80, "h100": 80, "h200": 141, "v5e": 16, "v6e": 32, "v5p": 95}

_CPU_OPTIONS = {
    "xla_cpu_enable_concurrency_optimized_scheduler": False,  # which spends memory to run operations side by side
    "xla_backend_optimization_level": 0,  # of machine code, which is not needed
    "xla_llvm_disable_expensive_passes": True,
}
_DTYPES = {"bf16": "bfloat16", "f32": "float32", "s32": "int32", "u32": "uint32", "pred": "bool"}

_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment, e.g. configs/sft_9b.py.", lock_config=True)
_STAGE = flags.DEFINE_multi_enum("stage", ["sft", "rl"], ["sft", "rl"], "Stages whose update is planned.")
_MODEL = flags.DEFINE_enum("model", "9B", list(MODELS), "Sizes, where config.model.path is empty.")
_MESH = flags.DEFINE_multi_string("mesh", [], "data,fsdp,tensor; default: config.mesh.")
_DEVICE = flags.DEFINE_enum("device", "h100", list(DEVICES), "Whose memory must hold it.")
_RESERVE = flags.DEFINE_float("reserve", 0.1, "Fraction of the memory that is left free.", 0.0, 0.9)
_DUMP = flags.DEFINE_string("dump", "", "Write the compiled program of the last line of the table to this file.")
flags.mark_flag_as_required("config")


@dataclasses.dataclass(frozen=True)
class Plan:
    """Bytes on one device."""

    params: int
    optimizer: int
    gradients: int
    activations: int
    temporaries: int
    total: int


def main(_: list[str]) -> None:
    config = _CONFIG.value
    meshes = [tuple(map(int, mesh.split(","))) for mesh in _MESH.value] or [tuple(config.mesh.values())]
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", max(map(math.prod, meshes)))
    policy = policy_config(config.model.path or MODELS[_MODEL.value], config.model)
    memory = DEVICES[_DEVICE.value]
    budget = memory * (1 - _RESERVE.value)
    size = sum(math.prod(spec.shape) for spec in jax.tree.leaves(param_specs(policy)))
    print(
        f"{size / 1e9:.2f} billion parameters, remat {policy.remat}; "
        f"GB per device; {_DEVICE.value}: {memory} GB, {_RESERVE.value:.0%} stay free"
    )
    names = [field.name for field in dataclasses.fields(Plan)]
    print(f"{'stage':6}{'mesh':>9}{'rows':>6}{'length':>8}" + "".join(f"{x:>12}" for x in names) + f"{'budget':>8}")
    worst = 0.0
    for sizes in meshes:
        for stage in _STAGE.value:
            update = _update(config, stage, sizes)
            row = f"{stage:6}{'×'.join(map(str, sizes)):>9}{update.step.micro_rows:6}{update.loop.row_length:8}"
            plan = _plan(policy, stage, update, make_mesh(*sizes))
            values = [getattr(plan, name) / 1e9 for name in names]
            worst = max(worst, plan.total / 1e9 / budget)
            verdict = "fits" if plan.total / 1e9 <= budget else "does not fit"
            print(f"{row}{''.join(f'{value:12.2f}' for value in values)}{budget:8.1f}  {verdict}", flush=True)
    result = {"name": "memory_plan", "value": round(worst, 3), "unit": "of the budget", "bar": 1.0, "ok": worst <= 1}
    print(json.dumps(result))
    sys.exit(0 if result["ok"] else 1)


def _update(config: ConfigDict, stage: str, mesh: tuple[int, ...]) -> Supervised | Reinforcement:
    """The stage's settings on that mesh. A micro-batch that it does not divide gets one row for each cut."""
    config = config.copy_and_resolve_references()
    config.mesh = dict(zip(("data", "fsdp", "tensor"), mesh, strict=True))
    ways = math.prod(mesh[:2])
    for section in ("base", "sft", "rl"):
        if config[section].micro_rows % ways:
            config[section].micro_rows = ways
    return getattr(read_settings(config), stage)


def _plan(policy: QwenConfig, stage: str, update: Supervised | Reinforcement, mesh: Mesh) -> Plan:
    shardings = param_shardings(policy, mesh)
    optimizer = make_optimizer(update.optimizer, param_specs(policy), total_steps=1000)
    state = abstract_state(abstract_params(policy), optimizer, mesh, shardings)
    make_step = make_sft_step if stage == "sft" else make_rl_step
    step = make_step(policy, update.step, optimizer, mesh, shardings)
    forked = stage == "rl" and update.loop.forked
    # More micro-batches only lengthen the batch, which is small: a megabyte or two a row.
    lowered = step.lower(state, rows=8 * update.step.micro_rows, length=update.loop.row_length, forked=forked)
    compiled = lowered.compile(_CPU_OPTIONS)
    program = compiled.as_text()
    if _DUMP.value:
        Path(_DUMP.value).write_text(program, encoding="utf-8")
    memory = compiled.memory_analysis()
    params, moments = _bytes(state.params), _bytes(state.opt_state)
    kept = _kept_for_backward(program, policy, state.params)
    held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    return Plan(
        params=params,
        optimizer=moments,
        gradients=params,
        activations=kept,
        temporaries=memory.temp_size_in_bytes - params - kept,
        total=held + memory.temp_size_in_bytes,
    )


def _shard(x: jax.ShapeDtypeStruct) -> tuple[int, ...]:
    return x.sharding.shard_shape(x.shape)


def _bytes(tree: Any) -> int:
    """Of one device's shards."""
    return sum(math.prod(_shard(x)) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _kept_for_backward(program: str, policy: QwenConfig, params: Any) -> int:
    """Bytes of the stacked arrays, other than parameters and gradients, that a loop over the layers carries.

    Such a loop is known by the stacked weights among what it carries; of all of them the backward one has most.
    """
    stacked = {_shard(x) for x in jax.tree.leaves(params["layers"])}
    largest = 0
    for carried in re.findall(r"= \((.*?)\) while\(", program):
        arrays = [(kind, tuple(map(int, dims.split(",")))) for kind, dims in re.findall(r"(\w+)\[([\d,]+)\]", carried)]
        if _shard(params["layers"]["0"]["mlp"]["gate"]) in {dims for _, dims in arrays}:
            kept = [x for x in arrays if x[1][0] == policy.num_blocks and x[1] not in stacked]
            largest = max(largest, sum(math.prod(dims) * jnp.dtype(_DTYPES[kind]).itemsize for kind, dims in kept))
    return largest


if __name__ == "__main__":
    app.run(main)
