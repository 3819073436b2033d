"""RL after the recipe of Tmax (June 2026) on Qwen3.5-9B: the strongest open one before ReTerm, without recoveries.

Command:   reterm-train --config=configs/tmax_9b.py --workdir=runs/tmax_9b --config.model.path=HF_DIR
             --config.sft.data=ROWS
           as in sft_9b.py, which has Tmax's SFT too (learning rate 2e-5 linear, warm-up 0.03, 2 epochs, batch 128).
Hardware:  one node of 8 GPUs with 80 GB for the updates; for sampling see reterm_grpo_9b.py.
Result:    not run; memory plan only, see benchmarks/results/memory_plan.md.
           Tmax reports 27.2 % Pass@1 on Terminal-Bench 2.0 with 9B; that is its data as much as its recipe.

Tmax's values: outcome reward only; DPPO (a token is masked when |μ−π| > 0.1 and the update pushes further away);
advantage = reward − group mean, not standardised; no KL; token-level loss; AdamW, learning rate 1e-6 constant, clipping
at 1; 8 prompts × 32 attempts; 64 turns, 16,384 tokens a turn, 65,536 in all; 120 s a command; output of more than
10,000 characters keeps half from each end; float32 LM head (always so here); temperature 1.

What differs here
- Groups without spread are dropped and made up for, as in Tmax, but by 16 others at most (`rollout.refills`).
- Tmax's groups are up to 4 versions old. In-process sampling is never stale; with a rollout service
  `--config.rollout.max_staleness=4` is Tmax's value.
- Tmax scored failures of its infrastructure 0 inside the group. Here they are left out, also of the baseline.
- Number of steps, weight decay and Adam's β are not among the published values that this file rests on.
"""

import importlib.util
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _grpo_9b()
    c.rl.tasks = 8
    c.rl.attempts = 32
    c.rl.states = 0
    c.rollout.refills = 16
    c.rl.objective = "dppo_tv"
    c.rl.objective_args = "delta=0.1"
    c.rl.aggregation = "token"
    c.rl.baseline = "mean"
    c.rl.standardise = False
    c.rl.kl_weight = 0.0
    c.rl.optimizer = "adamw"
    c.rl.learning_rate = 1e-6
    c.rl.schedule = "constant"
    c.rl.warmup = 0.0
    c.rl.clip_norm = 1.0
    c.rl.temperature = 1.0
    return c


def _grpo_9b() -> ml_collections.ConfigDict:
    """All fields, with GRPO's values."""
    spec = importlib.util.spec_from_file_location("grpo_9b", Path(__file__).with_name("grpo_9b.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
