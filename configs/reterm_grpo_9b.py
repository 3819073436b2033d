"""ReTerm-GRPO of Qwen3.5-9B: SFT as in sft_9b.py, then RL from root attempts and from their failed states.

Command:   reterm-train --config=configs/reterm_grpo_9b.py --workdir=runs/reterm_9b --config.model.path=HF_DIR
             --config.sft.data=ROWS
           with HF_DIR a local Hugging Face directory of Qwen3.5-9B, ROWS demonstrations as in sft_9b.py, and
           XLA_PYTHON_CLIENT_MEM_FRACTION=0.9.
Hardware:  one node of 8 GPUs with 80 GB for the updates. The in-process sampler needs 2.2 GB more for
           each of `sandbox.concurrent` attempts (65,536 tokens of keys and values).
Result:    not run; memory plan only, see benchmarks/results/memory_plan.md.
           The paper reports 34.8 % Pass@1 on Terminal-Bench 2.0 (base 20.2, SFT 25.8, GRPO 28.0).

Sources. The paper (arXiv 2610.18484) publishes neither group sizes, clip range, mixing weight, retry message, learning
rate and number of steps, nor where in a failed attempt RL forks (its data does at the end, as here). Tmax, the
strongest open recipe before it, has learning rate 1e-6 constant, clipping at 1, no KL, advantage = reward − group mean,
token-level loss, temperature 1, and 8 × 32 attempts a step, which here are shared out equally between root groups and
recoveries. It masks tokens by DPPO; `--config.rl.objective=dppo_tv` does that.
"""

import importlib.util
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _sft_9b()

    c.rl.steps = 200  # unpublished
    c.rl.tasks = 8
    c.rl.attempts = 16  # G
    c.rl.states = 8
    c.rl.forks = 16  # K
    c.rl.recovery_weight = 1.0
    c.rl.temperature = 1.0
    c.rl.objective = "ppo_clip"
    c.rl.clip_low = 0.2
    c.rl.clip_high = 0.28
    c.rl.aggregation = "token"
    c.rl.standardise = False
    c.rl.optimizer = "adamw"
    c.rl.learning_rate = 1e-6
    c.rl.schedule = "constant"
    c.rl.warmup = 0.0
    c.rl.weight_decay = 0.0
    c.rl.clip_norm = 1.0
    c.rl.epochs = 1
    c.rl.updates = 1
    c.rl.save_every = 5

    c.eval.temperature = 1.0
    c.eval.attempts = 5
    return c


def _sft_9b() -> ml_collections.ConfigDict:
    """All fields, with the values of the SFT before it."""
    spec = importlib.util.spec_from_file_location("sft_9b", Path(__file__).with_name("sft_9b.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
