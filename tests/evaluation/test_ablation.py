"""The comparison of runs, against numbers worked by hand on made-up runs of two seeds."""

import json
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
import scipy.stats
from evaluation_demo import attempt

from reterm_jax.evaluation import ablation
from reterm_jax.evaluation.records import EvalResult, RunReport
from reterm_jax.evaluation.statistics import Estimate, over_runs

REPO = Path(__file__).parents[2]
# By arm and seed: how many of 10 tasks an attempt solves, and of how many of 4 fixed states a recovery does.
SOLVED = {"base": ([2, 4], [1, 1]), "SFT": ([4, 4], [2, 2]), "GRPO": ([6, 5], [2, 3]), "ReTerm-GRPO": ([8, 9], [4, 4])}
DIRECTORIES = {"GRPO": "grpo", "ReTerm-GRPO": "reterm_grpo"}


def result(name, seed):
    solved, recovered = (SOLVED[name][i][seed] for i in range(2))
    attempts = [attempt(f"t-{i}", float(i < solved), id=f"{name}/t-{i}") for i in range(10)]
    recoveries = [attempt(f"t-{i}", float(i < recovered), parent=f"state/t-{i}") for i in range(4)]
    # Every second failure is recovered from; the last left no state.
    own = [
        attempt(a.task_id, float(i % 2 == 0), id=f"{a.id}/again/0", parent=a.id)
        for i, a in enumerate([a for a in attempts if not a.solved][:-1])
    ]
    return EvalResult(name, attempts, recoveries, own)


@pytest.fixture
def root(tmp_path):
    for seed in range(2):
        shared = [result(name, seed) for name in ("base", "SFT")]
        runs = {"cold_start": shared, **{path: [*shared, result(arm, seed)] for arm, path in DIRECTORIES.items()}}
        for name, results in runs.items():
            directory = tmp_path / f"seed{seed}" / name
            RunReport("run", {"model": "tiny"}, {"rl": 7.0}, results).save(directory / "report.json")
            config = {"seed": seed, "rl": {"epochs": 4, "updates": 1}}
            (directory / "config.json").write_text(json.dumps(config))
            if name != "cold_start":
                rows = [
                    {
                        "step": step,
                        "rollout/sampled_tokens": 1000 + seed,
                        "rollout/root_attempts": 32,
                        "rollout/seconds": 15.0,
                        "train/seconds": 5.0,
                        "recovery/attempts": 8,
                        "rollout/root_reward": 0.2 * step + 0.1 * seed,
                        "train/skipped": 0.5 if step == 2 else 0.0,
                    }
                    for step in (1, 2, 3)
                ]
                (directory / "rl").mkdir()
                (directory / "rl" / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def test_rates_are_means_over_seeds(root):
    found = ablation.load(root)
    assert found.seeds == [0, 1] and list(found.policies) == list(SOLVED)
    single, again, fixed, own = (ablation.estimates(found, "GRPO", measure) for measure in ablation.MEASURES)
    assert [run.value for run in single[0]] == [0.6, 0.5] and single[1].value == single[2].value == 0.55
    # 4 failures of which 2 of the first 3 are recovered from; 5 of which 2 of the first 4 are.
    assert [run.value for run in again[0]] == [0.8, 0.7]
    assert [run.value for run in own[0]] == pytest.approx([2 / 3, 1 / 2])
    assert [run.value for run in fixed[0]] == [0.5, 0.75]
    assert single[1].units == 20 and single[2].units == 2


def test_differences_are_paired_within_a_seed(root):
    found = ablation.load(root)
    single = ablation.MEASURES[0]
    runs, over_tasks, between = ablation.differences(found, "GRPO", "ReTerm-GRPO", single)
    assert [run.value for run in runs] == pytest.approx([0.2, 0.4])
    assert (over_tasks.value, between.value) == pytest.approx((0.3, 0.3))
    assert over_tasks.units == 20 and over_tasks.low > 0
    expected = scipy.stats.t.interval(0.95, 1, loc=0.3, scale=scipy.stats.sem([0.2, 0.4]))
    assert (between.low, between.high) == (pytest.approx(expected[0]), 1.0)  # two runs say next to nothing
    assert ablation.compared(found) == [
        ("base", "SFT"),
        ("SFT", "GRPO"),
        ("SFT", "ReTerm-GRPO"),
        ("GRPO", "ReTerm-GRPO"),
    ]


def test_the_interval_over_runs_is_students():
    values = [0.52, 0.58, 0.49, 0.61]
    found = over_runs([Estimate(v, 0, 1, 80, 160, 1, "bootstrap") for v in values], rate=True)
    expected = scipy.stats.t.interval(0.95, 3, loc=np.mean(values), scale=scipy.stats.sem(values))
    assert (found.low, found.high) == pytest.approx(expected)
    assert (found.units, found.n, found.excluded, found.method) == (4, 640, 4, "runs")
    one = over_runs([Estimate(0.5, 0.4, 0.6, 80, 160, 0, "bootstrap")], rate=True)
    assert (one.value, one.low, one.high) == (0.5, 0.0, 1.0)
    assert over_runs([]).units == 0


def test_what_rl_took(root):
    runs = ablation.load(root).policies["ReTerm-GRPO"]
    # Half of the second step's four updates were skipped.
    assert [run.cost for run in runs] == [
        ablation.Cost(3000.0, 120.0, 10.0, 60.0),
        ablation.Cost(3003.0, 120.0, 10.0, 60.0),
    ]


def test_all_files_are_written_and_agree(root):
    found = ablation.load(root)
    ablation.write(found, root)
    text = (root / "ablation.md").read_text()
    assert "| Pass@1 | ReTerm-GRPO − GRPO | +0.20 | +0.40 | +0.30 [" in text
    assert "| GRPO | 3,002 | 120 | 10.0 | 1 min 00 s |" in text
    numbers = json.loads((root / "ablation.json").read_text())
    assert numbers["differences"]["ReTerm-GRPO - GRPO"]["Pass@1"]["over_tasks"]["value"] == pytest.approx(0.3)
    drawing = (root / "curves.svg").read_text()
    ElementTree.fromstring(drawing)
    for word in ("Root reward while training", "ReTerm-GRPO", "own failures"):
        assert word in drawing
    before = {path: path.read_bytes() for path in root.glob("*.*")}
    ablation.write(ablation.load(root), root)
    assert before == {path: path.read_bytes() for path in root.glob("*.*")}
    page = (root / "report.html").read_text()
    assert "Root reward while training" in page and "<?xml" not in page and "with one recovery" in page


def test_curves_are_over_the_tokens_sampled_so_far(root):
    tokens_S, rewards_RS = ablation._curves(ablation.load(root).policies["GRPO"], "rollout/root_reward")
    np.testing.assert_allclose(tokens_S, [1.0005, 2.001, 3.0015])
    np.testing.assert_allclose(rewards_RS, [[0.2, 0.4, 0.6], [0.3, 0.5, 0.7]])


def test_one_seed_is_said_to_be_one(root):
    shutil.rmtree(root / "seed1")
    text = ablation.markdown(ablation.load(root))
    assert text.startswith("Mean of 1 seed, with 95 % intervals over tasks: one run says nothing of others.")
    assert "| GRPO | 0.60 [0.31, 0.83] |" in text  # Wilson's, of 6 in 10


def test_unfinished_and_missing_runs_are_named(root, tmp_path):
    with pytest.raises(ablation.AblationError, match="holds no seed0"):
        ablation.load(tmp_path / "nothing")
    (root / "seed1" / "grpo" / "report.json").unlink()
    with pytest.raises(ablation.AblationError, match="seed1/grpo: this run has not finished"):
        ablation.load(root)


@pytest.mark.parametrize("seed", [0, 1])
def test_an_arm_that_one_seed_lacks_is_left_out_and_said_to_be(root, seed):
    (root / f"seed{1 - seed}" / "grpo").rename(root / f"seed{seed}" / "grpo_half")
    shutil.rmtree(root / f"seed{seed}" / "grpo")
    found = ablation.load(root)
    assert list(found.policies) == ["base", "SFT", "ReTerm-GRPO"] and found.left_out == {"grpo_half": [seed]}
    said = f"grpo_half (seed {seed}). To add it: launch/ablation.sh --arms=grpo_half --seeds=2"
    assert said in ablation.markdown(found)
    ablation.write(found, root)
    assert json.loads((root / "ablation.json").read_text())["left_out"] == {"grpo_half": [seed]}


def test_two_arms_of_one_name_are_refused(root):
    for seed in range(2):
        shutil.copytree(root / f"seed{seed}" / "grpo", root / f"seed{seed}" / "grpo_half")
    with pytest.raises(ablation.AblationError, match="4 policies of 2 seeds are called GRPO.*rl.name"):
        ablation.load(root)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("--seeds=0", "--seeds=0: give how many, 1 or more"),
        ("--arms=grpo,ppo", "--arms=grpo,ppo: configs/ablation.py has no arm ppo to train; it has grpo"),
        ("--arms=,", "--arms=,: give one arm or more"),
        ("--arms=grpo.*", "--arms=grpo.*: configs/ablation.py has no arm grpo.*"),
        ("--arms=grpo,,grpo", "configs/ablation.py has no arm  to train"),
        ("--arms=cold_start", "configs/ablation.py has no arm cold_start to train"),
        ("--config.rl.name=A", "--config.rl.name=A: this is what arms differ in"),
        ("--seed=3", "unknown argument --seed=3"),
        ("--config.seed=3", "--config.seed=3: the ablation sets this itself"),
    ],
)
def test_the_launcher_refuses_what_it_does_not_know(argument, said):
    done = subprocess.run(["bash", "launch/ablation.sh", argument], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and said in done.stderr


def test_the_launcher_trains_an_arm_for_all_seeds_that_are_there(root):
    command = ["bash", "launch/ablation.sh", "--arms=grpo_half", "--seeds=1", f"--workdir={root}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 1 and "has runs of 2 seeds" in done.stderr and "give --seeds=2 or more" in done.stderr
