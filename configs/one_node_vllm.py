"""ReTerm-GRPO with a rollout service on one machine: vLLM samples, Docker runs the attempts, JAX trains.

Command:   bash launch/one_node.sh            # with configs/one_node_vllm.py, or --config=FILE
           Ctrl-C stops everything, and so does `bash launch/one_node.sh stop`.
Hardware:  2 CPU cores, 12 GB, a Docker daemon; `bash third_party/vllm/install.sh cpu` once.
Result:    nothing about the method: it shows that the parts work together. The model is too small and too little
           trained to learn anything in five steps. Each step's weights reach vLLM in place, and
           `train/logprob_diff_mean` (the trainer's logprobs against vLLM's of the same tokens) stays at the noise of
           bfloat16, near 0.01.

The trainer makes its own base model and SFT in-process, as in the quickstart, and publishes the result; then vLLM
starts, and every attempt of RL goes through the service. The final evaluation is in-process again.
"""

import importlib.util
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _quickstart()

    # What vLLM's CPU kernels take: DeltaNet heads of 128.
    c.model.hidden = 128
    c.model.mlp = 256
    c.model.heads = 2
    c.model.kv_heads = 1
    c.model.head_dim = 64
    c.model.linear_heads = 1
    c.model.linear_head_dim = 128

    c.tasks.train_per_family = 20
    c.tasks.test_per_family = 2
    c.sandbox.concurrent = 8  # containers at once

    c.rl.steps = 5
    c.rl.tasks = 4
    c.rl.attempts = 4
    c.rl.states = 4
    c.rl.forks = 4
    c.rl.epochs = 1
    # vLLM computes in bfloat16 with its own kernels: π/μ of single tokens leaves the noise now and then.
    c.rl.sampler_correction = "token"

    c.rollout.service = "http://127.0.0.1:8765"
    c.rollout.vllm = ("http://127.0.0.1:8000",)
    c.rollout.sandbox = "docker"

    c.eval.attempts = 1
    c.eval.states = 10
    c.eval.forks = 2
    return c


def _quickstart() -> ml_collections.ConfigDict:
    spec = importlib.util.spec_from_file_location("quickstart", Path(__file__).with_name("quickstart.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
