"""What ReTerm-GRPO adds: base, SFT, GRPO, ReTerm-GRPO, and ReTerm-GRPO whose recoveries start at the first error.

Command:   bash launch/ablation.sh [--seeds=3] [--arms=grpo,reterm_grpo,reterm_grpo_error] [--workdir=runs/ablation]
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

# By arm, what it changes in `rl`. A round has 16 groups, roots and recoveries together.
ARMS = {
    "cold_start": {"steps": 0},  # base and SFT, which the others share
    "grpo": {"tasks": 16, "states": 0},
    "reterm_grpo": {"tasks": 8, "states": 8},
    "reterm_grpo_error": {"tasks": 8, "states": 8, "fork_at": "error"},
    # Not run by default: what ReTerm-GRPO's root attempts, half of its tokens, teach without its recoveries.
    "grpo_half": {"tasks": 16, "states": 0, "step_tokens": 12_000, "name": "GRPO (half the tokens)"},
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
    c.rl.update(ARMS[arm])
    return c


def _quickstart() -> ml_collections.ConfigDict:
    """All fields, with the quickstart's values. Config files are loaded by path, so their directory is no package."""
    spec = importlib.util.spec_from_file_location("quickstart", Path(__file__).with_name("quickstart.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
