"""`reterm-rollout`: samples with vLLM in sandboxes, for a trainer whose config names this service."""

from collections.abc import Sequence

from absl import flags
from ml_collections import config_flags

from reterm_jax.cli import common

_CONFIG = config_flags.DEFINE_config_file("config", None, "That of the trainer, with its overrides.", lock_config=True)
_WORKDIR = flags.DEFINE_string(
    "workdir", None, "Holds the groups that no checkpoint has consumed. Not the trainer's. Taken up again if it exists."
)
_LISTEN = flags.DEFINE_string(
    "listen",
    "127.0.0.1:8765",
    "HOST:PORT. On anything but loopback RETERM_ROLLOUT_TOKEN must hold a secret, here and for the trainer; /status "
    "takes it as ?token=, too.",
)
flags.mark_flags_as_required(["config", "workdir"])


def main(argv: Sequence[str]) -> None:
    del argv
    common.quiet_environment()
    from reterm_jax.training import serving

    serving.run(_CONFIG.value, _WORKDIR.value, _LISTEN.value)


def run() -> None:
    """Console entry point."""
    common.run_main(main)


if __name__ == "__main__":
    run()
