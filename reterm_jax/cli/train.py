"""`reterm-train`: runs the stages that a config names, from wherever its workdir left off."""

from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from reterm_jax.cli import common

_CONFIG = config_flags.DEFINE_config_file("config", None, "Experiment, e.g. configs/quickstart.py.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Directory of the run: checkpoints, metrics, report. Resumed if it exists."
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: Sequence[str]) -> None:
    del argv
    common.quiet_environment()
    from reterm_jax.training import pipeline

    pipeline.run(_CONFIG.value, _WORKDIR.value)


def run() -> None:
    """Console entry point."""
    common.run_main(main)


if __name__ == "__main__":
    run()
