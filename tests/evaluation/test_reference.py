"""`reterm-evaluate` on real tasks in real sandboxes: sound ones, and one unsound in each way."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reterm_jax.tasks import families

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="sandboxes need Linux")


def evaluate(*args: object) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "reterm_jax.cli.evaluate", "--sandbox=bubblewrap", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    made = families.generate(tmp_path / "all", split="test", per_family=1, seed=0)[:3]
    directory = tmp_path / "tasks"
    directory.mkdir()
    for name, task in zip(("sound", "wrong-solution", "free-reward"), made, strict=True):
        task.path.rename(directory / name)
    return directory


def test_generated_tasks_are_sound_and_records_are_kept(tasks, tmp_path):
    done = evaluate(tasks, f"--workdir={tmp_path / 'out'}")
    assert done.returncode == 0, done.stderr
    assert "oracle: 3 of 3 solved" in done.stdout and "nop: 0 of 3 solved" in done.stdout
    assert "every task is sound" in done.stdout
    assert "oracle: 3/3 attempts, 1.00 solved" in done.stderr
    rows = [json.loads(line) for line in (tmp_path / "out" / "oracle.jsonl").read_text().splitlines()]
    assert [row["record"]["reward"] for row in rows[1:]] == [1.0] * 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["nop.jsonl", "oracle.jsonl", "sandboxes"]
    assert not list((tmp_path / "out" / "sandboxes").iterdir())


def test_unsound_tasks_are_named_with_what_was_found(tasks, tmp_path):
    (tasks / "wrong-solution" / "solution" / "solve.sh").write_text("echo I do not know; exit 3\n")
    (tasks / "free-reward" / "tests" / "test.sh").write_text("#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n")
    broken = tasks / "no-verdict"
    subprocess.run(["cp", "-r", tasks / "sound", broken], check=True)
    (broken / "tests" / "test.sh").write_text("#!/bin/bash\necho could not judge\n")
    done = evaluate(tasks, f"--workdir={tmp_path / 'out'}")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "error: 3 tasks are not sound; the table names them"
    table = {tuple(line.split()[:4]) for line in done.stdout.splitlines()}
    assert ("wrong-solution", "oracle", "1", "0") in table
    assert ("free-reward", "nop", "0", "1") in table
    assert {
        ("no-verdict", agent, *found)
        for agent, found in (("oracle", ("1", "verifier_error")), ("nop", ("0", "verifier_error")))
    } <= table
    assert not any(row[0] == "sound" for row in table if row)
    assert "could not judge" in done.stdout


def test_a_killed_check_goes_on_and_a_changed_task_is_refused(tasks, tmp_path):
    slow = tasks / "sound" / "solution" / "solve.sh"
    slow.write_text(slow.read_text() + "sleep 5\n")
    arguments = [tasks, f"--workdir={tmp_path / 'out'}", "--agent=oracle"]
    command = [sys.executable, "-m", "reterm_jax.cli.evaluate", "--sandbox=bubblewrap", *map(str, arguments)]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.DEVNULL)
    journal = tmp_path / "out" / "oracle.unfinished.jsonl"
    deadline = time.monotonic() + 120
    while not (journal.exists() and len(journal.read_text().splitlines()) == 3):  # the header and two finished tasks
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.05)
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    solution = slow.read_text()
    slow.write_text(solution + "# changed\n")
    refused = evaluate(*arguments)
    assert refused.returncode == 1 and f"{journal}: belongs to another evaluation" in refused.stderr
    slow.write_text(solution)
    resumed = evaluate(*arguments)
    assert resumed.returncode == 0 and "oracle: 3/3 attempts, 1.00 solved, 2 from before" in resumed.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--agent=oracel"], "--agent: 'oracel' is not one of oracle, nop"),
        (["--task=nowhere"], "has no task nowhere"),
    ],
)
def test_bad_arguments_are_one_line(tasks, arguments, message):
    done = evaluate(tasks, *arguments)
    assert done.returncode == 1 and message in done.stderr.splitlines()[-1]


def test_the_oracle_needs_solutions(tasks):
    (tasks / "sound" / "solution" / "solve.sh").unlink()
    done = evaluate(tasks)
    assert done.returncode == 1 and f"{tasks / 'sound' / 'solution' / 'solve.sh'}: missing" in done.stderr
