"""`reterm-view PATH`: makes a self-contained page of a run's or a Harbor job's attempts, forks and curves."""

from collections.abc import Sequence
from pathlib import Path

from absl import app, flags

from reterm_jax.cli import common

_OUTPUT = flags.DEFINE_string("output", "report.html", "The page to write.")


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("give one path: a run's --workdir, or a directory of Harbor trials")
    from reterm_jax.evaluation.view import build_view

    print(build_view(Path(argv[1]), Path(_OUTPUT.value)))


def run() -> None:
    """Console entry point."""
    common.run_main(main, positional=1)


if __name__ == "__main__":
    run()
