"""Scalars of a run: JSON lines (for programs), TensorBoard (for people), and the console's progress line."""

import json
import math
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

FILE_NAME = "metrics.jsonl"


class MetricsWriter:
    """Writes scalars under `directory`: `metrics.jsonl`, and TensorBoard event files beside it.

    A run that resumes at step s computes the steps after s again. Lines beyond `resume_step` (and a line that a kill
    cut short) are therefore dropped when the file is opened, and TensorBoard is told to forget them.
    """

    def __init__(self, directory: Path, *, resume_step: int = 0, tensorboard: bool = True) -> None:
        self._path = Path(directory) / FILE_NAME
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            kept = [line for line in read_metrics(self._path) if line["step"] <= resume_step]
            temporary = self._path.with_suffix(".tmp")
            temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
            os.replace(temporary, self._path)
        self._file = self._path.open("a", encoding="utf-8")
        self._board = None
        if tensorboard:
            # Imported here: it pulls in protobuf, which readers of metrics do not need.
            from tensorboardX import SummaryWriter

            self._board = SummaryWriter(str(self._path.parent), purge_step=resume_step + 1 if resume_step else None)

    def write(self, step: int, scalars: Mapping[str, Any]) -> dict[str, float]:
        """Writes one line at once and returns the values as floats. A value that is not finite becomes null in JSON."""
        values = {name: float(value) for name, value in scalars.items()}
        line = {"step": int(step), "time": round(time.time(), 3)}
        line |= {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()
        if self._board is not None:
            for name, value in values.items():
                self._board.add_scalar(name, value, global_step=int(step))
        return values

    def close(self) -> None:
        self._file.close()
        if self._board is not None:
            self._board.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of a `metrics.jsonl` (or of the one in a directory). A last line that was cut short is left out."""
    path = Path(path)
    path = path / FILE_NAME if path.is_dir() else path
    lines = path.read_text(encoding="utf-8").splitlines()
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number == len(lines):
                break
            raise ValueError(
                f"{path}, line {number}: not JSON ({error}); remove the line or start a new workdir"
            ) from None
    return records


def format_progress(phase: str, step: int, total: int, values: Mapping[str, float | str]) -> str:
    """One console line: `sft    40/120  loss 0.812  tokens/s 8.3k  eta 1m20s`."""
    width = len(str(total))
    cells = [f"{name} {value if isinstance(value, str) else format_number(value)}" for name, value in values.items()]
    return "  ".join([f"{phase:<6} {step:>{width}}/{total}", *cells])


def format_number(value: float) -> str:
    """Three significant digits; thousands as k and M."""
    if not math.isfinite(value):
        return str(value)
    for limit, suffix in ((1e6, "M"), (1e4, "k")):
        if abs(value) >= limit:
            return f"{value / (1e6 if suffix == 'M' else 1e3):.3g}{suffix}"
    if value and abs(value) < 1e-3:
        return f"{value:.1e}"
    return f"{value:.3g}" if abs(value) < 100 else f"{value:.0f}"


def format_seconds(seconds: float) -> str:
    """`8s`, `3m05s`, `2h04m`."""
    seconds = max(0, round(seconds))
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
