import pytest

from reterm_jax.training.trained import Policy, find
from reterm_jax.training.workdir import Workdir, WorkdirError


@pytest.fixture
def root(tmp_path):
    Workdir(tmp_path / "run").write_json("config.json", {"model": {"path": ""}, "start_from": ""})
    Workdir(tmp_path / "model").write_json("config.json", {"model_type": "qwen3"})
    (tmp_path / "run" / "sft" / "checkpoints" / "12").mkdir(parents=True)
    return tmp_path


def test_a_policy_is_a_model_a_run_a_stage_or_a_step(root):
    assert find(root / "model", "rl") == Policy("model", root / "model")
    model, checkpoints = root / "run" / "model", root / "run" / "sft" / "checkpoints"
    expected = Policy("sft", model, checkpoints)
    assert find(root / "run", "sft") == find(checkpoints, "rl") == expected
    assert find(checkpoints / "12", "rl") == Policy("sft 12", model, checkpoints, 12)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/", "neither a Hugging Face directory"),
        ("nowhere", "nowhere: neither a Hugging Face directory, nor a run's workdir"),
        ("run/sft", "run/sft: neither"),
        ("run/base/checkpoints", "base/checkpoints: neither"),
        ("run", "run has no checkpoint of stage rl yet"),
    ],
)
def test_what_is_no_policy_is_named(root, path, said):
    with pytest.raises(WorkdirError, match=said):
        find(root / path, "rl")
