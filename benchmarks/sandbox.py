"""What sandboxes cost, and whether they hold: Docker commands, forks, snapshots, many at once, and a soak with faults.

    python benchmarks/sandbox.py --part=command   # a command against a raw exec call of Docker's API. Bar: at most 1.3
    python benchmarks/sandbox.py --part=fork      # K forks of a state against replaying its history. Bar: at least 5
    python benchmarks/sandbox.py --part=size      # snapshot and start against the size of the state (a table, no bar)
    python benchmarks/sandbox.py --part=many      # 64 at once, 20 commands and a verdict each. Bar: none wrong
    python benchmarks/sandbox.py --part=soak --attempts=1000   # with random faults. Bar: none wrong

Anything that a part leaves behind misses the bar too. Each part needs a Docker daemon and the image of
third_party/sandbox_base. Faults of the soak: the container is killed, or a command runs past its time limit. A verdict
is wrong where an attempt that did its work is not `solved`, one that did not is not `failed`, or one whose container
was killed is graded at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import resource
import socket
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from absl import app, flags
from reporting import finish

from reterm_jax.cli import common
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.dockerhost import DockerHost
from reterm_jax.sandbox.reaper import run_label
from reterm_jax.tasks.task import Task
from reterm_jax.tasks.verifier import verify

_PART = flags.DEFINE_enum("part", "command", ["command", "fork", "size", "many", "soak"], "What is measured.")
_REPEATS = flags.DEFINE_integer("repeats", 30, "Turns of `command`.", lower_bound=1)
_FORKS = flags.DEFINE_integer("forks", 8, "K of `fork`.", lower_bound=1)
_DEPTH = flags.DEFINE_integer("depth", 20, "Commands before the fork, and of each sandbox of `many`.", lower_bound=1)
_SIZES = flags.DEFINE_list("sizes", ["1", "16", "128", "512", "2000"], "Megabytes of `size`.")
_AT_ONCE = flags.DEFINE_integer("at_once", 64, "Sandboxes alive at once in `many` and `soak`.", lower_bound=1)
_ATTEMPTS = flags.DEFINE_integer("attempts", 1000, "Attempts of `soak`.", lower_bound=1)
_FAULTS = flags.DEFINE_float("faults", 0.3, "Share of the soak's attempts that meet a fault.")

_TEST = "#!/bin/bash\ngrep -qx done /app/state; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
# What an ordinary turn of an agent does: look, write, and a little work.
_COMMANDS = ["ls -la /app", "echo line >> log; tail -n 3 log", "grep -c line log", "cd /tmp; pwd; cd /app", "sort log"]


def main(_: list[str]) -> None:
    parts: dict[str, Callable[[DockerHost, Task], Awaitable[Callable[[], None]]]] = {
        "command": _command,
        "fork": _fork,
        "size": _size,
        "many": _many,
        "soak": _soak,
    }
    common.end_on_signals()
    with tempfile.TemporaryDirectory() as directory:
        task = _task(Path(directory))
        report, left = asyncio.run(_with_host(parts[_PART.value], task, Path(directory) / "run"))
    if left:
        print(f"left behind: {left}")
        finish(f"sandbox {_PART.value}", sum(left.values()), "things left", 0, at_least=False)
    report()


async def _with_host(
    part: Callable[[DockerHost, Task], Awaitable[Callable[[], None]]], task: Task, run_dir: Path
) -> tuple[Callable[[], None], Counter[str]]:
    host = DockerHost(run_dir, max_concurrent=_AT_ONCE.value, run_id="benchmark", snapshot_mb=20_000)
    client = host.client
    try:
        report = await part(host, task)
    finally:
        await host.close()
        filters = {"label": f"reterm.run_dir={run_label(run_dir)}"}
        left = Counter(
            {
                "containers": len(client.containers.list(all=True, filters=filters)),
                "images": len(client.images.list(filters=filters)),
                "files": len(list(run_dir.rglob("*"))),
            }
        )
    return report, +left


async def _command(host: DockerHost, task: Task) -> Callable[[], None]:
    """The same command through `Sandbox.exec` and through Docker's API alone, in turns."""
    box = await host.start(task)
    seconds: dict[str, list[float]] = {"ours": [], "raw": []}
    for turn in range(_REPEATS.value + 2):
        for name in seconds:
            begun = time.perf_counter()
            if name == "ours":
                await box.exec("echo hello", timeout=30)
            else:
                await asyncio.to_thread(_raw, host.client.api, box.id, "echo hello")
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


async def _fork(host: DockerHost, task: Task) -> Callable[[], None]:
    """K sandboxes in a state `depth` commands deep, by forks of its snapshot and by doing the commands again."""

    async def replayed() -> Any:
        box = await host.start(task)
        await _play(box, _DEPTH.value)
        return box

    first = await replayed()
    begun = time.perf_counter()
    snapshot = await first.snapshot()
    forks = await asyncio.gather(*(host.fork(snapshot, task) for _ in range(_FORKS.value)))
    forking = time.perf_counter() - begun
    await asyncio.gather(*(box.close() for box in forks))
    begun = time.perf_counter()
    boxes = await asyncio.gather(*(replayed() for _ in range(_FORKS.value)))
    replaying = time.perf_counter() - begun
    for box in boxes:
        await box.close()
    print(f"K = {_FORKS.value}, depth {_DEPTH.value}: snapshot and forks {forking:.2f} s, replays {replaying:.2f} s")
    return lambda: finish("sandbox fork", replaying / forking, "times as fast as replaying", 5.0)


async def _size(host: DockerHost, task: Task) -> Callable[[], None]:
    """Seconds of a snapshot, of a fork and of a start from the task's image, by megabytes that the agent wrote."""
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


async def _many(host: DockerHost, task: Task) -> Callable[[], None]:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begun = time.perf_counter()
    wrong = await asyncio.gather(*(_attempt(host, task, index, "") for index in range(_AT_ONCE.value)))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    seconds = time.perf_counter() - begun
    print(
        f"{_AT_ONCE.value} at once, {_DEPTH.value} commands each: {seconds:.1f} s; our process grew by {grown:.0f} MB"
    )
    problems = [problem for problem in wrong if problem]
    print("\n".join(problems))
    return lambda: finish("sandbox many", len(problems), "wrong verdicts", 0, at_least=False)


async def _soak(host: DockerHost, task: Task) -> Callable[[], None]:
    gate = asyncio.Semaphore(_AT_ONCE.value)
    rng = random.Random(0)
    faults = [rng.choice(("kill", "timeout")) if rng.random() < _FAULTS.value else "" for _ in range(_ATTEMPTS.value)]

    async def one(index: int) -> str:
        async with gate:
            return await _attempt(host, task, index, faults[index])

    begun = time.perf_counter()
    problems = [problem for problem in await asyncio.gather(*map(one, range(len(faults)))) if problem]
    print(
        f"{len(faults)} attempts in {time.perf_counter() - begun:.0f} s, faults {dict(Counter(filter(None, faults)))}"
    )
    print("\n".join(problems[:20]))
    return lambda: finish("sandbox soak", len(problems), "wrong verdicts", 0, at_least=False)


async def _attempt(host: DockerHost, task: Task, index: int, fault: str) -> str:
    """One attempt; even ones do the task. Returns what is wrong with its verdict, or nothing."""
    expected = "env_error" if fault == "kill" else "failed" if index % 2 else "solved"
    box = await host.start(task)
    try:
        await _play(box, _DEPTH.value if _PART.value == "many" else 3)
        if fault == "timeout":
            assert (await box.exec("sleep 60", timeout=0.3)).timed_out
        await box.exec(f"echo {'nothing' if index % 2 else 'done'} > /app/state", timeout=60)
        if fault == "kill":
            await asyncio.to_thread(host.client.api.kill, box.id)
        found = (await verify(box, task)).status
    except SandboxError as error:
        found = f"env_error: {error}" if fault != "kill" else "env_error"
    finally:
        with contextlib.suppress(SandboxError):
            await box.close()
    return "" if found == expected else f"attempt {index} {fault}: {found}, expected {expected}"


async def _play(box: Any, commands: int) -> None:
    for index in range(commands):
        result = await box.exec(_COMMANDS[index % len(_COMMANDS)], timeout=60)
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
