"""The main job in miniature, as a user starts it: killed in the middle, started again, and bad input refused."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from reterm_jax.training.pipeline import split_train, split_validation
from reterm_jax.training.settings import SettingsError

REPO = Path(__file__).parents[2]
TINY = {
    "model.hidden": 32,
    "model.layers": 2,
    "model.mlp": 48,
    "model.heads": 2,
    "model.kv_heads": 1,
    "model.head_dim": 16,
    "model.linear_heads": 2,
    "model.linear_head_dim": 16,
    "tasks.train_per_family": 8,
    "tasks.test_per_family": 2,
    "sandbox.concurrent": 8,
    "agent.max_turns": 3,
    "agent.max_tokens": 512,
    "agent.max_turn_tokens": 16,
    "base.examples": 20,
    "base.renamings": 2,
    "base.epochs": 1,
    "sft.examples": 8,
    "sft.sampled_fraction": 0.25,
    "sft.renamings": 2,
    "sft.epochs": 1,
    "rl.steps": 3,
    "rl.save_every": 1,
    "rl.tasks": 2,
    "rl.attempts": 3,
    "rl.states": 2,
    "rl.forks": 2,
    "eval.states": 4,
    "eval.forks": 1,
    "eval.trees": 1,
}


def command(workdir, **overrides):
    fields = {**TINY, **{k.replace("__", "."): v for k, v in overrides.items()}}
    flags = [f"--config.{name}={value}" for name, value in fields.items()]
    config = f"--config={REPO / 'configs' / 'quickstart.py'}"
    return [sys.executable, "-m", "reterm_jax.cli.train", config, f"--workdir={workdir}", *flags]


def run(*args, **kwargs):
    return subprocess.run(
        command(*args, **kwargs), cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=900
    )


def wait_for_steps(process, metrics, steps, log):
    """Until that many steps of RL were logged."""
    deadline = time.monotonic() + 900
    while not (metrics.exists() and metrics.read_text().count("\n") >= steps):
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.fixture(scope="module", autouse=True)
def programs_are_compiled_once(tmp_path_factory):
    """Runs of the same sizes are the same programs, and compiling them is most of a run's time here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
        yield


@pytest.fixture(scope="module")
def killed_and_resumed(tmp_path_factory):
    """A run that was killed with SIGKILL after its first RL step, and then run to its end."""
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    workdir = tmp_path_factory.mktemp("job") / "run"
    metrics = workdir / "rl" / "metrics.jsonl"
    log = (workdir.parent / "log").open("w")
    process = subprocess.Popen(command(workdir), cwd=REPO, stdout=log, stderr=log, process_group=0)
    wait_for_steps(process, metrics, 1, workdir.parent / "log")
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return workdir, run(workdir)


def test_a_killed_run_continues_to_its_end(killed_and_resumed):
    workdir, done = killed_and_resumed
    assert done.returncode == 0, done.stdout
    assert "recovery rate" in done.stdout and "ReTerm-GRPO - SFT" in done.stdout
    report = json.loads((workdir / "report.json").read_text())
    assert [result["name"] for result in report["results"]] == ["base", "SFT", "ReTerm-GRPO"]
    assert "First attempt" in (workdir / "report.html").read_text()


def test_no_step_is_lost_or_logged_twice(killed_and_resumed):
    workdir, _ = killed_and_resumed
    lines = [json.loads(line) for line in (workdir / "rl" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    for line in lines:
        assert line["rollout/root_attempts"] == 6
        assert line["recovery/attempts"] <= 4


def test_nothing_is_left_behind(killed_and_resumed):
    workdir, _ = killed_and_resumed
    assert [path for path in (workdir / "sandboxes").rglob("*") if path.is_file()] == []
    processes = subprocess.run(["ps", "-eo", "args"], capture_output=True, text=True).stdout
    assert str(workdir) not in processes


def test_demonstrations_follow_the_published_schema(killed_and_resumed):
    workdir, _ = killed_and_resumed
    rows = [
        json.loads(line)
        for name in ("sampled", "scripted")
        for line in (workdir / "data" / f"recoveries_{name}.jsonl").read_text().splitlines()
    ]
    assert len(rows) == 8
    columns = {"id", "task_id", "messages", "train_from_message_index", "target_attempt_index", "trajectory_sha256"}
    assert all(set(row) == columns for row in rows)


def test_a_finished_run_is_reported_again_without_training(killed_and_resumed):
    workdir, first = killed_and_resumed
    again = run(workdir)
    assert again.returncode == 0
    assert (
        again.stdout.split("policy  ")[1].split("report:")[0] == first.stdout.split("policy  ")[1].split("report:")[0]
    )
    assert "rl     " not in again.stdout


def test_another_run_takes_over_the_sft_and_its_evaluation(killed_and_resumed):
    """With a loss of the user's own, given on the command line. Stopped by SIGTERM in the middle, and started again."""
    origin, _ = killed_and_resumed
    workdir = origin.parent / "taken_over"
    fields = {"start_from": origin, "rl__steps": 2, "rl__states": 0, "rl__objective": "docs/my_loss.py:my_objective"}
    # So small a policy solves nothing; with an entropy bonus its attempts are trained on all the same.
    fields["rl__entropy_weight"] = 0.01
    metrics = workdir / "rl" / "metrics.jsonl"
    with (origin.parent / "log2").open("w") as log:
        process = subprocess.Popen(command(workdir, **fields), cwd=REPO, stdout=log, stderr=log)
        wait_for_steps(process, metrics, 1, origin.parent / "log2")
        process.terminate()
        assert process.wait(timeout=600) != 0
    assert "rl: stopped after step" in (origin.parent / "log2").read_text()
    assert [path for path in (workdir / "sandboxes").rglob("*") if path.is_file()] == []
    first = metrics.read_text().splitlines()

    done = run(workdir, **fields)
    assert done.returncode == 0, done.stdout
    lines = metrics.read_text().splitlines()
    assert lines[: len(first)] == first and len(lines) == 2
    # What my_loss.py reports arrives with the metrics.
    assert all("train/advantage" in json.loads(line) for line in lines)
    report, theirs = (json.loads((path / "report.json").read_text()) for path in (workdir, origin))
    assert [result["name"] for result in report["results"]] == ["base", "SFT", "GRPO"]
    assert report["results"][:2] == theirs["results"][:2]
    assert not any((workdir / stage).exists() for stage in ("base", "sft", "model", "data"))


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"sft__epochs": 2}, "config.sft.epochs was 1, now 2. Where SFT and its evaluation are shared, only config.rl"),
        ({"rl__steps": 0}, "config.rl.steps 0: nothing is left to run"),
    ],
)
def test_what_cannot_be_taken_over_is_named(killed_and_resumed, tmp_path, overrides, said):
    done = run(tmp_path / "run", start_from=killed_and_resumed[0], **overrides)
    assert done.returncode == 1 and said in done.stdout.splitlines()[-1]


def test_each_failed_attempt_of_an_evaluation_has_its_own_recovery(killed_and_resumed):
    workdir, _ = killed_and_resumed
    for result in json.loads((workdir / "report.json").read_text())["results"]:
        failed = [attempt["id"] for attempt in result["attempts"] if attempt["status"] == "failed"]
        assert failed and sorted(recovery["parent"] for recovery in result["own"]) == sorted(failed)
        assert all(recovery["depth"] == 1 for recovery in result["own"])


def test_a_trained_policy_is_evaluated_on_a_task_set(killed_and_resumed, tmp_path):
    workdir, _ = killed_and_resumed
    flags = [flag for flag in command(tmp_path / "out", eval__attempts=2)[3:] if "--workdir" not in flag]
    run_evaluate = [sys.executable, "-m", "reterm_jax.cli.evaluate", f"--policy={workdir}", "--stage=sft", *flags]
    run_evaluate += [f"--workdir={tmp_path / 'out'}", "--limit=3", str(workdir / "tasks" / "test")]
    for again in (False, True):
        done = subprocess.run(run_evaluate, cwd=REPO, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        table = done.stdout.splitlines()[-3:]
        assert table[0].split("  ")[0] == "policy" and "Pass@2 [95 %]" in table[0] and table[2].startswith("sft ")
        assert ("6 from before" in done.stderr) == again
    (result,) = json.loads((tmp_path / "out" / "report.json").read_text())["results"]
    assert len(result["attempts"]) == 6 and len(result["recoveries"]) == 3
    assert {attempt["version"] for attempt in result["attempts"]} == {0}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"rl__forks": 3}, "config.rl.forks was 2, now 3"),
        ({"rl__branches": 3}, "branches"),
    ],
)
def test_another_config_is_refused_and_nothing_overwritten(killed_and_resumed, overrides, said):
    workdir, _ = killed_and_resumed
    before = (workdir / "report.json").read_bytes()
    done = run(workdir, **overrides)
    assert done.returncode == 1
    assert said in done.stdout.splitlines()[-1]
    assert (workdir / "report.json").read_bytes() == before


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("rl__steps", -1, "config.rl: steps must not be negative, got -1"),
        ("rl__row_length", 256, "config.rl: row_length is 256, but an attempt may have agent.max_tokens = 512"),
        ("base__row_length", 256, "config.base: row_length is 256, but"),
        ("rl__aggregation", "mean", "config.rl: aggregation 'mean' is unknown"),
        ("mesh__fsdp", 3, "config.base.micro_rows is 1; it must be a multiple of mesh.data · mesh.fsdp = 3"),
        ("rl__objective", "ppo", "config.rl: objective 'ppo' is unknown"),
        ("base__epochs", 0, "config.base: epochs must be at least 1, got 0"),
        ("sft__optimizer", "sgd", "config.sft: optimizer 'sgd' is unknown"),
        ("sft__sampled_fraction", 1.5, "config.sft.sampled_fraction must be in [0, 1], got 1.5"),
        ("model__path", "some/model", "config.sft.renamings is 2, but names are exchanged only for the model made"),
        ("tasks__sft_share", 0.0, "config.tasks.sft_share must be above 0 and at most 1, got 0.0"),
        ("agent__max_turns", 0, "config.agent: limit max_turns is 0"),
        ("eval__states", 0, "config.eval.states must be positive, got 0"),
        ("eval__own_forks", -1, "config.eval.own_forks must not be negative, got -1"),
    ],
)
def test_a_value_out_of_range_is_named_before_anything_runs(tmp_path, field, value, said):
    done = run(tmp_path / "run", **{field: value})
    assert done.returncode == 1
    assert said in done.stdout.splitlines()[-1]
    assert not (tmp_path / "run").exists()


def test_without_steps_of_rl_a_run_ends_with_sft(tmp_path):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    done = run(tmp_path / "run", rl__steps=0, eval__attempts=1)
    assert done.returncode == 0, done.stdout
    assert "SFT - base" in done.stdout and "GRPO" not in done.stdout
    assert (tmp_path / "run" / "report.html").exists() and not (tmp_path / "run" / "rl").exists()


def test_sft_and_rl_share_no_task():
    tasks = [f"task{i}" for i in range(20)]
    sft, rl = split_train(tasks, 0.3, seed=0)
    assert len(sft) == 6 and sorted([*sft, *rl]) == sorted(tasks)
    assert split_train(tasks, 0.3, seed=0) == (sft, rl) != split_train(tasks, 0.3, seed=1)
    assert split_train(tasks, 1, seed=0) == (tasks, tasks)
    for share in (0.01, 0.99):
        with pytest.raises(SettingsError, match="of 20 train tasks leaves SFT or RL without any"):
            split_train(tasks, share, seed=0)


def test_validation_tasks_are_kept_apart():
    tasks = [f"task{i}" for i in range(10)]
    rest, apart = split_validation(tasks, 3, seed=0)
    assert len(apart) == 3 and sorted([*rest, *apart]) == tasks
    assert split_validation(tasks, 0, seed=0) == (tasks, [])
    with pytest.raises(SettingsError, match="validation_tasks is 10, but RL has only 10 tasks"):
        split_validation(tasks, 10, seed=0)


def test_a_malformed_task_is_named(tmp_path):
    for split in ("train", "test"):
        task = tmp_path / "tasks" / split / "broken"
        task.mkdir(parents=True)
        (task / "task.toml").write_text("[agent]\ntimeout_sec = 'soon'\n")
        (task / "instruction.md").write_text("do it")
    done = run(tmp_path / "run", tasks__path=tmp_path / "tasks")
    assert done.returncode == 1
    assert "broken/task.toml" in done.stdout and "timeout_sec" in done.stdout
