"""`reterm-export`: writes a run's policy as a Hugging Face directory, in the layout of the model it was made from.

Of RL that is the best checkpoint, where validation kept one, and the averaged weights, where an average was kept.
"""

from collections.abc import Sequence
from pathlib import Path

from absl import flags

from reterm_jax.cli import common

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_STAGE = flags.DEFINE_enum("stage", "rl", ["base", "sft", "rl"], "Whose weights: what this stage ended with.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.")
flags.mark_flags_as_required(["workdir", "output"])


def main(argv: Sequence[str]) -> None:
    del argv
    common.quiet_environment()
    from reterm_jax.checkpoint.checkpointer import Checkpointer
    from reterm_jax.policy import hf
    from reterm_jax.policy.config import QwenConfig
    from reterm_jax.policy.spec import abstract_params
    from reterm_jax.training.workdir import find_policy

    output = Path(_OUTPUT.value)
    if output.exists():
        raise common.UserError(f"--output: {output} exists; give a new directory")
    source, checkpoints = find_policy(_WORKDIR.value, _STAGE.value)
    config = QwenConfig.from_hf(source)
    with Checkpointer(checkpoints) as checkpointer:
        params = checkpointer.restore_params(abstract_params(config))
    hf.save_params(output, params, config, source=source)
    print(f"{output}: the policy of stage {_STAGE.value}, with all else as in {source}")


def run() -> None:
    """Console entry point."""
    common.run_main(main)


if __name__ == "__main__":
    run()
