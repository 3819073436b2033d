"""What sandboxes cost, and whether they hold: Docker commands, forks, snapshots, many at once, and a soak with faults.

    python benchmarks/sandbox.py --part=command   # a command against a raw exec call of Docker's API. Bar: at most 1.3
    python benchmarks/sandbox.py --part=fork      # K forks of a state against replaying its history. Bar: at least 5
    python benchmarks/sandbox.py --part=size      # snapshot and start against the size of the state (a table, no bar)
    python benchmarks/sandbox.py --part=many      # 64 at once, 20 commands and a verdict each. Bar: none wrong
    python benchmarks/sandbox.py --part=soak --attempts=1000 --restarts=4   # with random faults. Bar: none wrong

Anything that a part leaves behind misses the bar too. Each part needs a Docker daemon and the image of
third_party/sandbox_base. Faults of the soak: the container is killed, or a command runs past its time limit; and with
--restarts the soak runs on a daemon of its own (as root), which is restarted so many times; one that is killed
(--crash) can leave processes of containers that it no longer knows. A verdict is wrong where an attempt that did its
work is not `solved`, one that did not is not `failed`, or one whose container was killed is graded at all; an attempt
that lived through a restart may also end as `env_error`.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import resource
import signal
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from absl import app, flags
from docker.errors import DockerException
from own_daemon import OwnDaemon
from reporting import finish

from reterm_jax.cli import common
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.dockerhost import DockerHost
from reterm_jax.sandbox.dockerimage import connect
from reterm_jax.sandbox.reaper import run_label
from reterm_jax.tasks.task import Task
from reterm_jax.tasks.verifier import verify

_PART = flags.DEFINE_enum("part", "command", ["command", "fork", "size", "many", "soak"], "What is measured.")
_REPEATS = flags.DEFINE_integer("repeats", 10, "Turns of `command` and of `fork`.", lower_bound=1)
_FORKS = flags.DEFINE_integer("forks", 8, "K of `fork`.", lower_bound=1)
_DEPTH = flags.DEFINE_integer("depth", 20, "Commands before the fork, and of each sandbox of `many`.", lower_bound=1)
_SIZES = flags.DEFINE_list("sizes", ["1", "16", "128", "512", "2000"], "Megabytes of `size`.")
_AT_ONCE = flags.DEFINE_integer("at_once", 64, "Sandboxes alive at once in `many` and `soak`.", lower_bound=1)
_ATTEMPTS = flags.DEFINE_integer("attempts", 1000, "Attempts of `soak`.", lower_bound=1)
_FAULTS = flags.DEFINE_float("faults", 0.3, "Share of the soak's attempts that meet a fault.")
_RESTARTS = flags.DEFINE_integer("restarts", 0, "Restarts of the daemon in `soak`, which then has its own.")
_CRASH = flags.DEFINE_bool("crash", False, "Restarts come after SIGKILL, not SIGTERM.")

_SETTLE = 30.0  # seconds for processes of removed containers
_MEGABYTES = 256  # by which our process may grow in `many` and `soak`

_TEST = "#!/bin/bash\ngrep -qx done /app/state; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
# Turns that take no time of their own.
_COMMANDS = ["ls -la /app", "echo line >> log; tail -n 3 log", "grep -c line log", "cd /tmp; pwd; cd /app", "sort log"]
# What an ordinary history is made of: looking, writing a program, running it, running its tests, committing.
_HISTORY = [
    "git init -q . 2>/dev/null; ls -la; git status --short | head",
    "cat > work.py <<'END'\ndef work(n):\n    return sorted((i * 7919) % 100003 for i in range(n))\nEND",
    "python3 -c 'import work; work.work(500_000)'",
    "python3 -m unittest -q 2>&1 | tail -n 1; python3 -c 'import json, work; json.dumps(work.work(200_000))'",
    "git add -A; git -c user.name=n -c user.email=e commit -qm step; git log --oneline | wc -l; grep -rn def *.py",
]


def main(_: list[str]) -> None:
    parts: dict[str, Callable[[Bench], Awaitable[Callable[[], None]]]] = {
        "command": _command,
        "fork": _fork,
        "size": _size,
        "many": _many,
        "soak": _soak,
    }
    common.end_on_signals()
    own = _PART.value == "soak" and _RESTARTS.value > 0
    with tempfile.TemporaryDirectory() as directory, OwnDaemon() if own else contextlib.nullcontext() as daemon:
        task = _task(Path(directory))
        report, left = asyncio.run(_with_host(parts[_PART.value], task, Path(directory) / "run", daemon))
    if left:
        print(f"left behind: {dict(left)}")
        finish(f"sandbox {_PART.value}", sum(left.values()), "things left", 0, at_least=False)
    report()


@dataclass(frozen=True)
class Bench:
    """What a part works with; `daemon` is there where it has one of its own."""

    host: DockerHost
    task: Task
    daemon: OwnDaemon | None


async def _with_host(
    part: Callable[[Bench], Awaitable[Callable[[], None]]], task: Task, run_dir: Path, daemon: OwnDaemon | None
) -> tuple[Callable[[], None], Counter[str]]:
    """Runs a part; returns its report and what it left."""
    url = daemon.url if daemon else None
    client, _ = connect(url=url)
    networks = len(client.networks.list())
    open_files = len(os.listdir("/proc/self/fd"))
    host = DockerHost(run_dir, max_concurrent=_AT_ONCE.value, run_id="benchmark", snapshot_mb=20_000, url=url)
    try:
        report = await part(Bench(host, task, daemon))
    finally:
        await host.close()
    gc.collect()  # what an exception of a broken connection still holds
    begun = time.monotonic()
    while daemon and daemon.shims() and time.monotonic() - begun < _SETTLE:  # they end after their containers
        await asyncio.sleep(0.5)
    filters = {"label": f"reterm.run_dir={run_label(run_dir)}"}
    left = Counter(
        {
            "containers": len(client.containers.list(all=True, filters=filters)),
            "images": len(client.images.list(filters=filters)),
            "networks": len(client.networks.list()) - networks if daemon else 0,  # else others may be at work
            "processes of containers": daemon.shims() if daemon else 0,
            "files": len(list(run_dir.rglob("*"))),
            # Some are held by `client`, and by the event loop for its threads.
            "open files": max(0, len(os.listdir("/proc/self/fd")) - open_files - 8),
        }
    )
    return report, +left


async def _command(bench: Bench) -> Callable[[], None]:
    """The same command as an agent's, as a verifier's (in a shell of its own) and through Docker's API, in turns."""
    host, task = bench.host, bench.task
    box = await host.start(task)
    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "ours": lambda: box.exec("echo hello", timeout=30),
        "fresh": lambda: box.exec("echo hello", timeout=30, fresh=True),
        "raw": lambda: asyncio.to_thread(_raw, host.client.api, box.id, "echo hello"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(_REPEATS.value + 2):
        for name, way in ways.items():
            begun = time.perf_counter()
            await way()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - begun)
    print(f"{'':8}{'median ms':>10}{'best':>8}")
    for name, times in seconds.items():
        print(f"{name:8}{1e3 * statistics.median(times):10.1f}{1e3 * min(times):8.1f}")
    ratio = statistics.median(a / b for a, b in zip(seconds["ours"], seconds["raw"], strict=True))
    return lambda: finish("sandbox command", ratio, "times a raw exec call", 1.3, at_least=False)


def _raw(api: Any, container: str, command: str) -> bytes:
    """Exec as Docker's API gives it: create, start, read to the end, ask for the exit status."""
    made = api.exec_create(container, ["bash", "-c", command])
    stream = api.exec_start(made["Id"], socket=True)
    connection: socket.socket = getattr(stream, "_sock", stream)
    output = b""
    while data := connection.recv(65536):
        output += data
    stream.close()
    assert api.exec_inspect(made["Id"])["ExitCode"] == 0
    return output


async def _fork(bench: Bench) -> Callable[[], None]:
    """K sandboxes in a state `depth` commands deep, by forks of its snapshot and by doing the commands again."""
    host, task = bench.host, bench.task

    async def replayed() -> Any:
        box = await host.start(task)
        await _play(box, _DEPTH.value, _HISTORY)
        return box

    first = await replayed()
    seconds: dict[str, list[float]] = {"forks": [], "replays": []}
    for _ in range(_REPEATS.value):
        begun = time.perf_counter()
        snapshot = await first.snapshot()
        forks = await asyncio.gather(*(host.fork(snapshot, task) for _ in range(_FORKS.value)))
        seconds["forks"].append(time.perf_counter() - begun)
        await asyncio.gather(*(box.close() for box in forks))
        await host.release(snapshot)
        begun = time.perf_counter()
        boxes = await asyncio.gather(*(replayed() for _ in range(_FORKS.value)))
        seconds["replays"].append(time.perf_counter() - begun)
        await asyncio.gather(*(box.close() for box in boxes))
    forking, replaying = (statistics.median(times) for times in seconds.values())
    ratio = statistics.median(b / a for a, b in zip(*seconds.values(), strict=True))
    print(f"K = {_FORKS.value}, depth {_DEPTH.value}: snapshot and forks {forking:.2f} s, replays {replaying:.2f} s")
    return lambda: finish("sandbox fork", ratio, "times as fast as replaying", 5.0)


async def _size(bench: Bench) -> Callable[[], None]:
    """Seconds of a snapshot, of a fork and of a start from the task's image, by megabytes that the agent wrote."""
    host, task = bench.host, bench.task
    print(f"{'MB':>6}{'snapshot s':>12}{'fork s':>9}{'start s':>9}")
    worst = 0.0
    for megabytes in map(int, _SIZES.value):
        times = []
        box = await host.start(task)
        files, each = -(-megabytes // 500), min(megabytes, 500)
        script = f"for i in $(seq {files}); do head -c {each}M /dev/urandom > /app/f$i; done"
        await box.exec(script, timeout=300)
        begun = time.perf_counter()
        snapshot = await box.snapshot()
        times.append(time.perf_counter() - begun)
        for starting in (host.fork(snapshot, task), host.start(task)):
            begun = time.perf_counter()
            made = await starting
            times.append(time.perf_counter() - begun)
            await made.close()
        await box.close()
        await host.release(snapshot)
        print(f"{megabytes:6}{times[0]:12.2f}{times[1]:9.2f}{times[2]:9.2f}")
        worst = max(worst, times[0])
    return lambda: finish("sandbox size", worst, "s of the slowest snapshot", float("inf"), at_least=False)


async def _many(bench: Bench) -> Callable[[], None]:
    growth = _Growth()
    begun = time.perf_counter()
    found = await asyncio.gather(*(_attempt(bench, index, "", lambda: False) for index in range(_AT_ONCE.value)))
    seconds = time.perf_counter() - begun
    print(f"{_AT_ONCE.value} at once, {_DEPTH.value} commands each: {seconds:.1f} s; our process grew by {growth} MB")
    return _verdicts("many", found, growth)


async def _soak(bench: Bench) -> Callable[[], None]:
    gate = asyncio.Semaphore(_AT_ONCE.value)
    rng = random.Random(0)
    faults = [rng.choice(("kill", "timeout")) if rng.random() < _FAULTS.value else "" for _ in range(_ATTEMPTS.value)]
    every = _ATTEMPTS.value // (_RESTARTS.value + 1)
    done, restarts, restarting = 0, 0, asyncio.Lock()

    async def one(index: int) -> _Found:
        nonlocal done, restarts
        async with gate:
            before = restarts
            found = await _attempt(bench, index, faults[index], lambda: restarts != before or restarting.locked())
            done += 1
        if done % 100 == 0:
            print(f"{done} of {_ATTEMPTS.value} attempts, {time.perf_counter() - begun:.0f} s", flush=True)
        if bench.daemon and done >= every * (restarts + 1) and restarts < _RESTARTS.value and not restarting.locked():
            async with restarting:
                await asyncio.to_thread(bench.daemon.restart, signal.SIGKILL if _CRASH.value else signal.SIGTERM)
                restarts += 1
        return found

    growth = _Growth()
    begun = time.perf_counter()
    found = await asyncio.gather(*map(one, range(len(faults))))
    met = Counter(filter(None, faults)) + Counter({"restart": restarts})
    print(f"{len(faults)} attempts in {time.perf_counter() - begun:.0f} s, faults {dict(met)}; grew by {growth} MB")
    return _verdicts("soak", found, growth)


class _Growth:
    """By how many megabytes the largest size of our process has grown since this was made."""

    def __init__(self) -> None:
        self._before = self._now()

    @staticmethod
    def _now() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024

    def __int__(self) -> int:
        return self._now() - self._before

    def __str__(self) -> str:
        return str(int(self))


@dataclass(frozen=True)
class _Found:
    """The status of an attempt, and what is wrong with it, or nothing."""

    status: str
    problem: str


def _verdicts(part: str, found: list[_Found], growth: _Growth) -> Callable[[], None]:
    print(f"verdicts {dict(Counter(one.status for one in found))}")
    problems = [one.problem for one in found if one.problem]
    if int(growth) > _MEGABYTES:
        problems.append(f"our process grew by {growth} MB")
    print("\n".join(problems[:20]))
    return lambda: finish(f"sandbox {part}", len(problems), "wrong", 0, at_least=False)


async def _attempt(bench: Bench, index: int, fault: str, restarted: Callable[[], bool]) -> _Found:
    """One attempt; even ones do the task. `restarted` tells whether the daemon was restarted meanwhile."""
    expected = "env_error" if fault == "kill" else "failed" if index % 2 else "solved"
    detail, box = "", None
    try:
        box = await bench.host.start(bench.task)
        await _play(box, _DEPTH.value if _PART.value == "many" else 3)
        if fault == "timeout":
            assert (await box.exec("sleep 60", timeout=0.3)).timed_out
        await box.exec(f"echo {'nothing' if index % 2 else 'done'} > /app/state", timeout=60)
        if fault == "kill":
            await asyncio.to_thread(bench.host.client.api.kill, box.id)
        outcome = await verify(box, bench.task)
        found, detail = outcome.status, outcome.detail
    except (SandboxError, DockerException, OSError) as error:
        found, detail = "env_error", str(error)
    finally:
        if box is not None:
            with contextlib.suppress(SandboxError):
                await box.close()
    if found == expected or (found == "env_error" and restarted()):
        return _Found(found, "")
    return _Found(found, f"attempt {index} {fault}: {found}, expected {expected}: {detail[:300]}")


async def _play(box: Any, count: int, commands: Sequence[str] = _COMMANDS) -> None:
    for index in range(count):
        result = await box.exec(commands[index % len(commands)], timeout=120)
        if result.timed_out:
            raise SandboxError(f"command {index} ran out of time")


def _task(directory: Path) -> Task:
    files = {
        "task.toml": '[environment]\ndocker_image = "reterm-sandbox-base"\nmemory_mb = 256\nstorage_mb = 4000\n',
        "instruction.md": "Write `done` into /app/state.\n",
        "tests/test.sh": _TEST,
    }
    for name, text in files.items():
        path = directory / "benchmark" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Task.load(directory / "benchmark")


if __name__ == "__main__":
    app.run(main)
