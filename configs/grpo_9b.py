"""Plain GRPO of Qwen3.5-9B: what reterm_grpo_9b.py is to be measured against.

Command:   reterm-train --config=configs/grpo_9b.py --workdir=runs/grpo_9b --config.model.path=HF_DIR
             --config.sft.data=ROWS
           as in reterm_grpo_9b.py. With `--config.start_from=runs/sft_9b` it goes on from that run's SFT, if all but
           its `rl` is the same.
Hardware:  one node of 8 GPUs with 80 GB for the updates; for sampling see reterm_grpo_9b.py.
Result:    not run; memory plan only, see benchmarks/results/memory_plan.md.
           The paper reports 28.0 % Pass@1 on Terminal-Bench 2.0 (base 20.2, SFT 25.8, ReTerm-GRPO 34.8).

Sources. All values are those of reterm_grpo_9b.py but for where the attempts of a step start: 8 × 32 from tasks, as
Tmax has them, and none from failed states. The paper (arXiv 2610.18484) does not publish the budget of its own GRPO
baseline, nor whether it equals that of ReTerm-GRPO; for equal sampled tokens set `rl.step_tokens` in both.
"""

import importlib.util
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _reterm_grpo_9b()
    c.rl.tasks = 8
    c.rl.attempts = 32  # G
    c.rl.states = 0
    return c


def _reterm_grpo_9b() -> ml_collections.ConfigDict:
    """All fields, with ReTerm-GRPO's values."""
    spec = importlib.util.spec_from_file_location("reterm_grpo_9b", Path(__file__).with_name("reterm_grpo_9b.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
