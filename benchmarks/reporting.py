"""How every benchmark ends: one JSON line, and exit status 1 where the bar is missed."""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax


def finish(name: str, value: float, unit: str, bar: float, *, at_least: bool = True) -> None:
    """Prints `{"name", "value", "unit", "bar", "ok"}` and exits with 1 where the value is below (above) the bar."""
    ok = value >= bar if at_least else value <= bar
    print(json.dumps({"name": name, "value": round(value, 4), "unit": unit, "bar": bar, "ok": ok}))
    sys.exit(0 if ok else 1)


def in_turns(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Seconds of each call, `repeats` times, the calls in turns, so that a change of the machine's speed meets all.

    Each call is made once before, untimed, to compile.
    """
    for call in calls.values():
        jax.block_until_ready(call())
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: Mapping[str, list[float]], over: str, under: str) -> float:
    """The median over turns of `over`'s time by `under`'s."""
    return statistics.median(a / b for a, b in zip(seconds[over], seconds[under], strict=True))


def temporary_bytes(function: Callable, *args: Any) -> int:
    """Bytes that the compiled function needs beside its arguments and results, as the compiler plans them."""
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes
