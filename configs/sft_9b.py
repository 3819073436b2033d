"""SFT of Qwen3.5-9B on recovery demonstrations of up to 65,536 tokens: the cold start before ReTerm-GRPO.

Command:   reterm-train --config=configs/sft_9b.py --workdir=runs/sft_9b --config.model.path=HF_DIR
             --config.sft.data=ROWS
           with HF_DIR a local Hugging Face directory of Qwen3.5-9B, ROWS a .parquet or .jsonl file in the schema of
           ReTerm-10K, and XLA_PYTHON_CLIENT_MEM_FRACTION=0.9.
Hardware:  one node of 8 GPUs with 80 GB.
Result:    not run; memory plan only, see benchmarks/results/memory_plan.md. With ReTerm-10K the paper reports 25.8 %
           Pass@1 on Terminal-Bench 2.0 (base 20.2).

Mesh, micro-batch and remat policy are what `benchmarks/memory_plan.py` says fits: a row of 65,536 tokens on four
devices, which share its heads, MLP columns and vocabulary, and the parameters over all eight.

Sources. Of the method, 64 turns are published (as the cap of ReTerm-10K); the paper (arXiv 2610.18484) gives no token
limit, learning rate, schedule, batch or weight decay. Those are Tmax's, the strongest open recipe before it: 65,536
tokens, learning rate 2e-5 linear, warm-up 0.03, 2 epochs, batch 128, clipping at 1, 120 s a command, 16,384 tokens a
turn, output of 10,000 characters.

Without `sft.data` the demonstrations are those that the run collects itself, on the generated task families.
"""

import importlib.util
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = _quickstart()

    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.model.chunk_size = 64
    c.model.attention_block = 512

    c.mesh.update(data=1, fsdp=2, tensor=4)  # 4 key/value heads: tensor divides 4

    c.sandbox.kind = "docker"
    c.agent.max_turns = 64
    c.agent.max_tokens = 65_536
    c.agent.max_turn_tokens = 16_384
    c.agent.command_timeout = 120.0
    c.agent.attempt_timeout = 3600.0  # unpublished; a task's own limit holds too
    c.agent.output_limit = 10_000

    c.sft.examples = 9_700  # as many as ReTerm-10K has
    c.sft.epochs = 2
    c.sft.learning_rate = 2e-5
    c.sft.schedule = "linear"
    c.sft.warmup = 0.03
    c.sft.weight_decay = 0.0  # unpublished
    c.sft.clip_norm = 1.0
    c.sft.row_length = 65_536
    c.sft.batch_rows = 32  # 128 demonstrations, if they have 16k tokens on average (their lengths are unpublished)
    c.sft.micro_rows = 2

    # The same for all stages: these are checked, but base is not trained where there is a pretrained model.
    c.base.micro_rows = 2
    c.base.row_length = 65_536
    c.rl.micro_rows = 2
    c.rl.row_length = 65_536
    c.rl.steps = 0  # the run ends with SFT
    return c


def _quickstart() -> ml_collections.ConfigDict:
    """All fields, with the quickstart's values. Config files are loaded by path, so their directory is no package."""
    spec = importlib.util.spec_from_file_location("quickstart", Path(__file__).with_name("quickstart.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.get_config()
