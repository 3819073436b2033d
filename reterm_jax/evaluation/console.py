"""The final table and the progress line for the terminal."""

import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from reterm_jax.evaluation.evaluate import Progress
from reterm_jax.evaluation.records import EvalResult
from reterm_jax.evaluation.statistics import Estimate, paired_difference, pass_at_1, recovery_rate


def results_table(results: Sequence[EvalResult], *, seed: int = 0) -> str:
    """One row a policy: Pass@1 and recovery rate with 95 % intervals; below, each policy's gain on the one before."""
    rows = [["policy", "Pass@1 [95 %]", "attempts", "recovery rate [95 %]", "forks", "not graded"]]
    for result in results:
        passed, recovered = pass_at_1(result.attempts, seed=seed), recovery_rate(result.recoveries, seed=seed)
        rows.append(
            [
                result.name,
                str(passed),
                _count(passed, "tasks"),
                str(recovered),
                _count(recovered, "states"),
                str(passed.excluded + recovered.excluded),
            ]
        )
    gains = []
    for before, after in zip(results, results[1:], strict=False):
        passed = paired_difference(before.attempts, after.attempts, seed=seed)
        recovered = paired_difference(before.recoveries, after.recoveries, by="parent", seed=seed)
        gains.append([f"{after.name} - {before.name}", passed.signed(), "", recovered.signed(), "", ""])
    return _align(rows, gains)


def progress_printer(name: str, *, stream: TextIO | None = None, every: float = 5.0) -> Callable[[Progress], None]:
    """A callback for `evaluate_pass` and `evaluate_recovery`: a line at most every `every` seconds, and the last."""
    start = time.monotonic()
    last = -every

    def show(progress: Progress) -> None:
        nonlocal last
        elapsed = time.monotonic() - start
        if elapsed - last < every and progress.done < progress.total:
            return
        last = elapsed
        new = progress.done - progress.resumed
        left = f", {elapsed / new * (progress.total - progress.done):.0f} s left" if new else ""
        rate = f", {progress.solved / progress.graded:.2f} solved" if progress.graded else ""
        lost = progress.done - progress.graded
        ungraded = f", {lost} not graded" if lost else ""
        resumed = f", {progress.resumed} from before" if progress.resumed else ""
        line = f"{name}: {progress.done}/{progress.total} attempts{rate}{ungraded}{resumed}{left}"
        print(line, file=stream or sys.stderr, flush=True)

    return show


def _count(estimate: Estimate, unit: str) -> str:
    return f"{estimate.n} ({estimate.units} {unit})" if estimate.units else "0"


def _align(rows: Sequence[Sequence[str]], footer: Sequence[Sequence[str]]) -> str:
    widths = [max(len(row[i]) for row in [*rows, *footer]) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    rule = "  ".join("-" * width for width in widths)
    lines = [line(rows[0]), rule, *(line(row) for row in rows[1:])]
    return "\n".join(lines + ([rule] + [line(row) for row in footer] if footer else []))
