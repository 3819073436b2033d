import json

import pytest

from reterm_jax.evaluation.records import EvalResult, RunReport
from reterm_jax.training.origin import fingerprint, open_origin
from reterm_jax.training.workdir import WorkdirError

CONFIG = {"seed": 1, "start_from": "", "sft": {"epochs": 2}, "rl": {"steps": 0}}


@pytest.fixture
def finished(tmp_path):
    (tmp_path / "phases").mkdir()
    (tmp_path / "phases" / "sft.json").write_text('{"seconds": 1.0}')
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    RunReport("run", {}, {}, [EvalResult(name, []) for name in ("base", "SFT", "GRPO")]).save(tmp_path / "report.json")
    return tmp_path


def test_what_comes_before_rl_is_taken_over(finished):
    origin = open_origin(finished, {**CONFIG, "start_from": str(finished), "rl": {"steps": 9}})
    assert [result.name for result in origin.results] == ["base", "SFT"]
    assert origin.fingerprint == fingerprint(CONFIG) != fingerprint({**CONFIG, "seed": 2})


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda root: (root / "config.json").unlink(), "is not a run's directory"),
        (lambda root: (root / "phases" / "sft.json").unlink(), "has not finished"),
        (lambda root: (root / "report.json").unlink(), "has not finished"),
        (
            lambda root: (root / "config.json").write_text(json.dumps(CONFIG | {"start_from": "runs/first"})),
            "took its SFT over from runs/first; give that one",
        ),
        (
            lambda root: (root / "config.json").write_text(json.dumps(CONFIG | {"seed": 2})),
            "config.seed was 2, now 1",
        ),
    ],
)
def test_what_is_no_finished_run_of_the_same_config_is_refused(finished, change, said):
    change(finished)
    with pytest.raises(WorkdirError, match=said):
        open_origin(finished, CONFIG)
