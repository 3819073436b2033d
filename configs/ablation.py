"""What ReTerm-GRPO adds: base, SFT, GRPO, ReTerm-GRPO, and ReTerm-GRPO whose recoveries start at the first error.

Command:   bash launch/ablation.sh [--seeds=3] [--workdir=runs/ablation]
           which is `reterm-train --config=configs/ablation.py:ARM` for each seed and arm, then `reterm-compare`.
Hardware:  2 CPU cores, 8 GB, no GPU, no Docker (bubblewrap sandboxes).
Result:    runs/ablation/ablation.md (tables), curves.svg and report.html, in less than two hours for 3 seeds; the
           README has what they said.

Equal budgets. All arms of a seed start from one SFT policy and make as many updates, each after as many sampled
tokens (to within half a round in a whole run, some two per cent): GRPO spends them on root attempts alone, ReTerm-GRPO
on root attempts and recoveries. A number of attempts would be no equal budget, as recoveries differ in length and grow
fewer as the policy gets better. Everything else is the quickstart's, and the same in all arms: model, tasks, SFT,
objective, learning rate. It was tuned for ReTerm-GRPO in the quickstart, not for GRPO.

The paper (arXiv 2610.18484) has such an ablation on Terminal-Bench 2.0 with 9 billion parameters and one run: base
20.2, SFT 25.8, GRPO 28.0, ReTerm-GRPO 34.8. It does not publish budgets or fork points.
"""

import importlib.util
from pathlib import Path

import ml_collections

# By arm: root groups and failure states of a round, and where recoveries start.
ARMS = {
    "cold_start": None,  # base and SFT, which the others share
    "grpo": (16, 0, "end"),
    "reterm_grpo": (8, 8, "end"),
    "reterm_grpo_error": (8, 8, "error"),
}


def get_config(arm: str = "reterm_grpo") -> ml_collections.ConfigDict:
    if arm not in ARMS:
        raise ValueError(f"configs/ablation.py has no arm {arm!r}; one of {', '.join(ARMS)}")
    c = _quickstart()
    c.rl.steps = 8
    # About 400 attempts of a policy that has begun to learn, in three or four rounds of up to 128.
    c.rl.step_tokens = 24_000
    c.eval.attempts = 3
    c.eval.trees = 2
    if ARMS[arm] is None:
        c.rl.steps = 0
    else:
        c.rl.tasks, c.rl.states, c.rl.fork_at = ARMS[arm]
    return c


def _quickstart() -> ml_collections.ConfigDict:
    """All fields, with the quickstart's values. Config files are loaded by path, so their directory is no package."""
    spec = importlib.util.spec_from_file_location("quickstart", Path(__file__).with_name("quickstart.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
