"""`reterm-export` on a run's directory, in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from reterm_jax.checkpoint.checkpointer import Checkpointer
from reterm_jax.policy import hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.spec import param_specs
from reterm_jax.training.state import TrainState

CONFIG = QwenConfig("qwen3", 32, 16, 24, 1, 2, 2, 8, ("full_attention",), compute_dtype="float32", remat="none")


def constant_params(value):
    return jax.tree.map(lambda spec: jnp.full(spec.shape, value), param_specs(CONFIG))


def export(workdir, output, stage="sft"):
    command = [sys.executable, "-m", "reterm_jax.cli.export", f"--workdir={workdir}", f"--output={output}"]
    return subprocess.run([*command, f"--stage={stage}"], capture_output=True, text=True, timeout=300)


def save(directory, params, average=None):
    with Checkpointer(directory) as checkpointer:
        checkpointer.save(1, TrainState(params=params, opt_state=(), step=jnp.int32(1), average=average))


@pytest.mark.parametrize("pretrained", [True, False])
def test_export_keeps_what_the_model_came_with(pretrained, tmp_path):
    workdir = tmp_path / "run"
    model = tmp_path / "pretrained" if pretrained else workdir / "model"
    hf.save_params(model, constant_params(1.0), CONFIG, dtype="float16")
    (model / "tokenizer.json").write_text("{}")
    if not pretrained:
        (model / hf.SINGLE_NAME).unlink()
    workdir.mkdir(exist_ok=True)
    (workdir / "config.json").write_text(json.dumps({"model": {"path": str(model) if pretrained else ""}}))
    save(workdir / "sft" / "checkpoints", constant_params(3.0))
    stage = "sft"
    if not pretrained:
        # Validation chose an earlier step than the last, and an average was kept.
        stage = "rl"
        save(workdir / "rl" / "checkpoints", constant_params(5.0))
        save(workdir / "rl" / "best", constant_params(4.0), average=constant_params(3.0))

    done = export(workdir, tmp_path / "out", stage)
    assert done.returncode == 0, done.stderr
    files = {path.name for path in (tmp_path / "out").iterdir()}
    assert files == {"config.json", "tokenizer.json", hf.SINGLE_NAME}
    assert (tmp_path / "out" / "config.json").read_bytes() == (model / "config.json").read_bytes()
    tensors = load_file(tmp_path / "out" / hf.SINGLE_NAME)
    assert {str(x.dtype) for x in tensors.values()} == {"float16" if pretrained else "bfloat16"}
    assert all((x == 3).all() for x in tensors.values())
    if pretrained:
        again = export(workdir, tmp_path / "out")
        assert again.returncode == 1 and "exists; give a new directory" in again.stderr
