"""`reterm-compare DIR`: tables, curves and a page from runs DIR/seedN/ARM, as `launch/ablation.sh` makes them."""

from collections.abc import Sequence
from pathlib import Path

from absl import app

from reterm_jax.cli import common


def main(argv: Sequence[str]) -> None:
    if len(argv) != 2:
        raise app.UsageError("give one path: the directory that holds seed0/, seed1/ ...")
    from reterm_jax.evaluation import ablation

    root = Path(argv[1])
    found = ablation.load(root)
    ablation.write(found, root)
    print(f"{ablation.markdown(found)}\n{root / 'ablation.md'}\n{root / 'curves.svg'}\n{root / 'report.html'}")


def run() -> None:
    """Console entry point."""
    common.run_main(main, positional=1)


if __name__ == "__main__":
    run()
