"""A run directory belongs to one config and one process."""

import pytest

from reterm_jax.training.workdir import Workdir, WorkdirError, find_policy, open_workdir

CONFIG = {"seed": 0, "rl": {"steps": 3, "forks": 8}}


def test_reopens_with_the_same_config_and_remembers_finished_phases(tmp_path):
    with open_workdir(tmp_path / "run", CONFIG) as work, work.phase("sft") as pending:
        assert pending
    with open_workdir(tmp_path / "run", CONFIG) as work:
        with work.phase("sft") as pending:
            assert not pending
        assert list(work.phase_seconds()) == ["sft"]


def test_a_phase_that_fails_is_not_finished(tmp_path):
    with open_workdir(tmp_path, CONFIG) as work:
        with pytest.raises(KeyboardInterrupt), work.phase("rl"):
            raise KeyboardInterrupt
        with work.phase("rl") as pending:
            assert pending


def test_names_the_field_in_which_another_config_differs(tmp_path):
    with open_workdir(tmp_path, CONFIG):
        pass
    other = {"seed": 0, "rl": {"steps": 3, "forks": 4}}
    with pytest.raises(WorkdirError, match=r"config\.rl\.forks was 8, now 4"), open_workdir(tmp_path, other):
        pass


def test_refuses_a_directory_with_other_things_and_leaves_them(tmp_path):
    (tmp_path / "thesis.tex").write_text("important")
    with pytest.raises(WorkdirError, match=r"thesis\.tex"), open_workdir(tmp_path, CONFIG):
        pass
    assert not (tmp_path / "config.json").exists()


def test_refuses_a_second_process(tmp_path):
    with (
        open_workdir(tmp_path, CONFIG),
        pytest.raises(WorkdirError, match="in use by another process"),
        open_workdir(tmp_path, CONFIG),
    ):
        pass


def test_the_policy_of_a_run_is_found(tmp_path):
    origin, run = tmp_path / "origin", tmp_path / "run"
    for root, start_from in ((origin, ""), (run, str(origin))):
        Workdir(root).write_json("config.json", {"model": {"path": ""}, "start_from": start_from})
    for path in (origin / "sft" / "checkpoints", run / "rl" / "checkpoints"):
        path.mkdir(parents=True)
    assert find_policy(origin, "sft") == find_policy(run, "sft") == (origin / "model", origin / "sft" / "checkpoints")
    assert find_policy(run, "rl") == (origin / "model", run / "rl" / "checkpoints")
    (run / "rl" / "best").mkdir()
    assert find_policy(run, "rl")[1] == run / "rl" / "best"
    with pytest.raises(WorkdirError, match="origin has no checkpoint of stage rl yet"):
        find_policy(origin, "rl")
    with pytest.raises(WorkdirError, match="is not a run's directory"):
        find_policy(tmp_path, "rl")
