"""`reterm-export`: writes a run's policy as a Hugging Face directory, in the layout of the model it was made from."""

import json
from collections.abc import Sequence
from pathlib import Path

from absl import flags

from reterm_jax.cli import common

_WORKDIR = flags.DEFINE_string("workdir", None, "Directory of the run.")
_STAGE = flags.DEFINE_enum("stage", "rl", ["base", "sft", "rl"], "Whose weights: the last checkpoint of this stage.")
_OUTPUT = flags.DEFINE_string("output", None, "Directory to write; must not exist.")
flags.mark_flags_as_required(["workdir", "output"])


def main(argv: Sequence[str]) -> None:
    del argv
    common.quiet_environment()
    from reterm_jax.checkpoint.checkpointer import Checkpointer
    from reterm_jax.policy import hf
    from reterm_jax.policy.config import QwenConfig
    from reterm_jax.policy.spec import abstract_params

    workdir, output = Path(_WORKDIR.value), Path(_OUTPUT.value)
    record = workdir / "config.json"
    if not record.exists():
        raise common.UserError(f"{workdir} is not a run's directory: it holds no config.json")
    if output.exists():
        raise common.UserError(f"--output: {output} exists; give a new directory")
    source = Path(json.loads(record.read_text(encoding="utf-8"))["model"]["path"] or workdir / "model")
    checkpoints = workdir / _STAGE.value / "checkpoints"
    if not checkpoints.exists():
        raise common.UserError(f"{workdir} has no checkpoint of stage {_STAGE.value} yet")
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
