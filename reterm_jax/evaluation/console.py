"""The final table and the progress line for the terminal."""

import collections
import sys
import time
from collections.abc import Callable, Sequence
from typing import TextIO

from reterm_jax.evaluation.evaluate import Progress
from reterm_jax.evaluation.records import EvalResult
from reterm_jax.evaluation.statistics import (
    Estimate,
    mean_pass_at_k,
    paired_difference,
    pass_at_1,
    recovery_rate,
)


def results_table(results: Sequence[EvalResult], *, seed: int = 0) -> str:
    """One row a policy: Pass@1 and recovery rate with 95 % intervals; below, each policy's gain on the one before.

    Where recoveries from the policies' own failures were made, also Pass@1 with one of them ("+ 1 recovery") and
    their rate ("own failures").
    """
    own = any(result.own for result in results)
    extra = ["+ 1 recovery [95 %]", "own failures [95 %]"] if own else []
    rows = [["policy", "Pass@1 [95 %]", "attempts", *extra, "recovery rate [95 %]", "forks", "not graded"]]
    for result in results:
        passed, recovered = pass_at_1(result.attempts, seed=seed), recovery_rate(result.recoveries, seed=seed)
        again, rescued = pass_at_1(result.with_recovery, seed=seed), recovery_rate(result.own, seed=seed)
        rows.append(
            [
                result.name,
                str(passed),
                _count(passed, "tasks"),
                *([str(again), str(rescued)] if own else []),
                str(recovered),
                _count(recovered, "states"),
                str(passed.excluded + recovered.excluded + rescued.excluded),
            ]
        )
    gains = []
    for before, after in zip(results, results[1:], strict=False):
        passed = paired_difference(before.attempts, after.attempts, seed=seed)
        again = paired_difference(before.with_recovery, after.with_recovery, seed=seed)
        recovered = paired_difference(before.recoveries, after.recoveries, by="parent", seed=seed)
        extra = [again.signed(), ""] if own else []
        gains.append([f"{after.name} - {before.name}", passed.signed(), "", *extra, recovered.signed(), "", ""])
    return _align(rows, gains)


def pass_at_k_table(results: Sequence[EvalResult], *, seed: int = 0) -> str:
    """One row a policy: the chance that one of k attempts succeeds, for k = 1, 2, 4, ... up to the attempts a task."""
    per_task = collections.Counter(attempt.task_id for result in results[:1] for attempt in result.attempts)
    ks = [2**i for i in range(max(per_task.values(), default=1).bit_length())]
    rows = [["policy", *(f"Pass@{k} [95 %]" for k in ks)]]
    for result in results:
        rows.append([result.name, *(str(mean_pass_at_k(result.attempts, k, seed=seed)) for k in ks)])
    return _align(rows, [])


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
