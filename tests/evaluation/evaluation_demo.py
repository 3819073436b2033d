"""A made-up run for the tests of the report; run with a directory as its argument, it writes the run and its page."""

import json
import math
import sys
from pathlib import Path

import numpy as np

from reterm_jax.evaluation.records import AttemptRecord, EvalResult, ForkTree, RunReport, TurnRecord

FAMILIES = ("archives", "config", "data", "environment", "files", "git", "permissions", "scripting", "text")


def attempt(task_id: str, reward: float | None, **fields) -> AttemptRecord:
    status = "env_error" if reward is None else "solved" if reward >= 1 else "failed"
    defaults = {"id": f"{task_id}#0", "family": task_id.split("-")[0], "turns": [], "status": status, "ended": "submit"}
    return AttemptRecord(task_id=task_id, reward=reward, **{**defaults, **fields})


def result(name: str, pass_rate: float, recovery: float, rng: np.random.Generator) -> EvalResult:
    attempts, recoveries = [], []
    for family in FAMILIES:
        for i in range(4):
            task = f"{family}-test-{i}"
            attempts += [attempt(task, float(rng.random() < pass_rate)) for _ in range(2)]
            recoveries += [attempt(task, float(rng.random() < recovery), parent=f"{task}@0", depth=1) for _ in range(4)]
    attempts[3] = attempt(attempts[3].task_id, None)
    return EvalResult(name, attempts, recoveries)


def tree() -> ForkTree:
    failed = attempt(
        "permissions-test-3",
        0.0,
        id="permissions-test-3/root/2",
        version=24,
        tokens=412,
        seconds=3.4,
        detail="check 1 of 2 failed: /srv/app/service.conf still has workers = 2",
        turns=[
            TurnRecord(
                "The setting is in the configuration file, so I change it in place.",
                "sed -i 's/^workers = .*/workers = 8/' app/service.conf",
                "sed: couldn't open temporary file app/sedZk3vQm: Permission denied\n",
                4,
                0.021,
            ),
            TurnRecord(
                "Let me see what is there.",
                "ls -la app && cat app/service.conf",
                "total 8\ndr-xr-xr-x 2 agent agent 4096 Jun  3 10:02 .\ndrwxr-xr-x 4 agent agent 4096 Jun  3 "
                "10:02 ..\n-r--r--r-- 1 agent agent   41 Jun  3 10:02 service.conf\nname = front\nworkers = 2\n",
                0,
                0.014,
            ),
            TurnRecord(
                "I write a copy with the new value beside it.",
                "sed 's/workers = 2/workers = 8/' app/service.conf > service.conf.new && submit",
                "",
                0,
                0.012,
            ),
        ],
    )
    parent = {"parent": "permissions-test-3/root/2@state", "depth": 1, "version": 24}
    solved = attempt(
        "permissions-test-3",
        1.0,
        id="r0",
        tokens=188,
        seconds=1.9,
        **parent,
        turns=[
            TurnRecord(
                "The directory and the file are read-only and mine. I allow writing, put the new file in place "
                "and restore the modes.",
                "chmod u+w app app/service.conf\ncat service.conf.new > app/service.conf\n"
                "chmod a-w app/service.conf app\nrm service.conf.new",
                "",
                0,
                0.018,
            ),
            TurnRecord(
                "I check the result before I submit.",
                "cat app/service.conf; ls -ld app",
                "name = front\nworkers = 8\ndr-xr-xr-x 2 agent agent 4096 Jun  3 10:03 app\n",
                0,
                0.012,
            ),
        ],
    )
    again = attempt(
        "permissions-test-3",
        0.0,
        id="r1",
        tokens=96,
        seconds=0.8,
        **parent,
        turns=[
            TurnRecord(
                "Move the new file over the old one.",
                "mv service.conf.new app/service.conf",
                "mv: cannot move 'service.conf.new' to 'app/service.conf': Permission denied\n",
                1,
                0.011,
            )
        ],
    )
    hostile = attempt(
        "permissions-test-3",
        0.0,
        id="r2",
        tokens=2048,
        seconds=30.4,
        status="timeout",
        **{**parent, "version": 25},
        turns=[
            TurnRecord(
                "",
                "yes '</pre><script>alert(1)</script>' | head -c 9000",
                "</pre><script>alert(1)</script>\n" * 280,
                0,
                0.02,
            ),
            TurnRecord(
                "",
                "cat app/\x00bell\x07 \u202egnp.exe; sleep 100",
                "\x1b[31mred\x1b[0m progress 10%\rprogress 20%\r\nend \ud800",
                None,
                30.0,
                timed_out=True,
            ),
            TurnRecord("I forgot to call the tool.", None, "Call the bash tool.", None, error="no tool call"),
        ],
    )
    broken = attempt("permissions-test-3", None, id="r3", **parent, detail="the sandbox could not start")
    listing = (
        "/work\n"
        "  dr-xr-xr-x  app/\n"
        "  -r--r--r--      41  app/service.conf\n"
        "  -rw-r--r--      41  service.conf.new\n\n"
        "no processes alive"
    )
    instruction = (
        "The service in /srv/app runs with too few workers. Set `workers = 8` in its configuration "
        "`/srv/app/service.conf`; leave everything else, the modes included, as it is."
    )
    return ForkTree("permissions-test-3", "permissions", instruction, failed, listing, [again, solved, hostile, broken])


def report() -> RunReport:
    rng = np.random.default_rng(0)
    return RunReport(
        title="ReTerm-GRPO quickstart",
        facts={
            "model": "qwen3_5, 4 layers, hidden 128",
            "parameters": "1.8 M",
            "seed": "0",
            "device": "cpu × 2 cores",
            "sandbox": "bubblewrap",
            "algorithm": "ReTerm-GRPO, 8 × 4 roots, 4 forks",
            "config": "configs/quickstart.py",
            "reterm_jax": "0.1.0",
        },
        phases={"demonstrations": 41.0, "SFT": 214.0, "RL": 780.0, "evaluation": 122.0},
        results=[
            result("base", 0.02, 0.02, rng),
            result("SFT", 0.40, 0.35, rng),
            result("after RL", 0.74, 0.72, rng),
        ],
        trees=[tree()],
    )


def metrics() -> str:
    rng = np.random.default_rng(1)
    rows = [{"step": s, "sft/loss": 3.2 * math.exp(-s / 60) + 0.12 + 0.05 * rng.random()} for s in range(0, 300, 5)]
    for step in range(60):
        gain = 1 - math.exp(-step / 25)
        rows.append(
            {
                "step": step,
                "rollout/root_reward": float(np.clip(0.4 + 0.35 * gain + 0.08 * rng.normal(), 0, 1)),
                "recovery/reward": float(np.clip(0.35 + 0.4 * gain + 0.1 * rng.normal(), 0, 1)),
                "train/entropy": 0.3 - 0.12 * gain + 0.01 * rng.normal(),
                "train/logprob_diff_mean": 0.0004 + 0.0001 * abs(rng.normal()),
                "rollout/tokens_per_attempt": 210 + 30 * gain + 9 * rng.normal(),
                "train/grad_norm": 0.6 + 0.2 * abs(rng.normal()),
                "rollout/seconds": 11 + rng.normal(),
            }
        )
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(directory: Path) -> None:
    report().save(directory / "report.json")
    (directory / "rl").mkdir(parents=True, exist_ok=True)
    (directory / "rl" / "metrics.jsonl").write_text(metrics(), encoding="utf-8")


if __name__ == "__main__":
    from reterm_jax.evaluation.view import build_view

    write(Path(sys.argv[1]))
    print(build_view(Path(sys.argv[1]), Path(sys.argv[1]) / "report.html"))
