"""Attempts that attack the machine, the sandbox or the verdict: others go on, and the outcome is right."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path

import pytest

from reterm_jax.sandbox import SandboxHost, SandboxUnavailable, make_host
from reterm_jax.tasks.task import Task
from reterm_jax.tasks.verifier import verify

# The task is solved by /app/done with "yes" in it; the verifier takes a moment, in which others may interfere.
TEST = """#!/bin/bash
sleep 0.3
echo $(( $(grep -c yes /app/done 2>/dev/null || true) + 0 )) > /logs/verifier/reward.txt
sleep 0.3
"""
TOML = '[environment]\ndocker_image = "reterm-sandbox-base"\nmemory_mb = 256\nstorage_mb = 300\n'
FAKE = "printf '#!/bin/bash\\necho 1 > /logs/verifier/reward.txt\\n'"

NOT_SOLVED = {
    "reward written before": "echo 1 > /logs/verifier/reward.txt; chmod 444 /logs/verifier/reward.txt",
    "fake tests": f"mkdir -p /tests; {FAKE} > /tests/test.sh; chmod 555 /tests/test.sh /tests",
    "logs are a link": "mv /logs /app/mine; ln -s /app/mine /logs; echo 1 > /logs/verifier/reward.txt",
    "verifier directory is a link": "rmdir /logs/verifier; ln -s /app /logs/verifier; echo 1 > /app/reward.json",
    "tests are a link": f"mkdir t; {FAKE} > t/test.sh; chmod +x t/test.sh; ln -s /app/t /tests",
    "reward rewritten from the background": "while :; do echo 1 > /logs/verifier/reward.txt; done & sleep 0.1",
    "reward rewritten once it is there": (
        "(until [ -s /logs/verifier/reward.txt ]; do sleep 0.01; done; echo 1 > /logs/verifier/reward.txt)"
        " >/dev/null 2>&1 & sleep 0.1"
    ),
    "tests rewritten once they are there": (
        f"(until {FAKE} > /tests/test.sh; do sleep 0.01; done) >/dev/null 2>&1 & sleep 0.1"
    ),
    "directories exchanged while the tests run": (
        "(until [ -d /tests ]; do sleep 0.01; done; sleep 0.1; mv /logs /old; mkdir -p /logs/verifier;"
        " while :; do echo 1 > /logs/verifier/reward.txt; sleep 0.05; done) >/dev/null 2>&1 & sleep 0.1"
    ),
    "the shell is removed": "rm -f /bin/bash /usr/bin/bash /bin/sh",
    "rm is removed": "rm -f /bin/rm /usr/bin/rm",
    "everything is removed": "rm -rf --no-preserve-root / 2>/dev/null",
}
GO_ON = {
    "fork bomb": "bomb() { bomb | bomb & }; bomb; sleep 1",
    "memory bomb": "x=$(head -c 800M /dev/zero | tr '\\0' x)",
    "everything is killed": "kill -9 -1; sleep 1",
    "a gigabyte of output": "head -c 1G /dev/zero | tr '\\0' x",
    "the disk is filled": "i=0; while head -c 50M /dev/zero > /app/fill$i; do i=$((i + 1)); sleep 0.05; done",
    "/tmp is removed": "rm -rf /tmp",
}


def why_not(kind: str) -> str:
    try:
        asyncio.run(_probe(kind))
    except SandboxUnavailable as error:
        return str(error)
    return ""


async def _probe(kind: str) -> None:
    if kind == "bubblewrap" and not shutil.which("bwrap"):
        raise SandboxUnavailable("bubblewrap is not installed")
    if kind == "docker":
        from reterm_jax.sandbox.dockerimage import connect

        connect()


@pytest.fixture(params=["bubblewrap", "docker"])
def kind(request: pytest.FixtureRequest) -> str:
    if reason := why_not(request.param):
        pytest.skip(reason)
    return request.param


@pytest.fixture
def task(make_task) -> Task:
    return Task.load(make_task(files={"task.toml": TOML, "tests/test.sh": TEST}))


def played(kind: str, tmp_path: Path, play) -> object:
    async def run() -> object:
        host = make_host(kind, tmp_path / "run", max_concurrent=3, run_id="test")
        try:
            return await asyncio.wait_for(play(host), 100)
        finally:
            await host.close()

    return asyncio.run(run())


@pytest.mark.parametrize("attack", NOT_SOLVED)
def test_an_attempt_cannot_make_its_verdict(kind: str, tmp_path: Path, task: Task, attack: str) -> None:
    async def play(host: SandboxHost) -> None:
        box, other = await asyncio.gather(host.start(task), host.start(task))
        await box.exec(NOT_SOLVED[attack], timeout=20)
        outcome = await verify(box, task)
        assert (outcome.status, outcome.reward) == ("failed", 0.0), outcome
        await other.exec("echo yes > done", timeout=20)
        assert (await verify(other, task)).solved

    played(kind, tmp_path, play)


@pytest.mark.parametrize("attack", GO_ON)
def test_floods_take_nothing_from_others_nor_from_a_later_success(
    kind: str, tmp_path: Path, task: Task, attack: str
) -> None:
    async def play(host: SandboxHost) -> None:
        box, other = await asyncio.gather(host.start(task), host.start(task))
        flood = asyncio.ensure_future(box.exec(GO_ON[attack], timeout=15))
        await asyncio.sleep(0.5)
        assert (await other.exec("echo yes > done; echo $PWD", timeout=20)).output == "/app\n"
        result = await flood
        assert len(result.output) < 300_000
        await box.exec("rm -f /app/fill*; echo yes > /app/done", timeout=20)
        assert (await verify(box, task)).solved and (await verify(other, task)).solved

    played(kind, tmp_path, play)


def test_the_disk_limit_is_kept_and_said(kind: str, tmp_path: Path, task: Task) -> None:
    async def play(host: SandboxHost) -> None:
        box = await host.start(task)
        result = await box.exec(GO_ON["the disk is filled"], timeout=25)
        assert result.exit_code == 137 and not result.timed_out and "disk limit of 300 MB" in result.output
        used = await box.exec("du -sm /app | cut -f1; rm /app/fill*; echo fits > /app/x; cat /app/x", timeout=20)
        size, fits = used.output.split()
        assert fits == "fits" and 250 < int(size) < 4000

    played(kind, tmp_path, play)
