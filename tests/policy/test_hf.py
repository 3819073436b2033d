"""Model directories: layouts, round trips, and errors that name what is wrong."""

from __future__ import annotations

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import SMALL_PIECES, init, tiny_config

from reterm_jax.policy import hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings


def same_tree(a, b) -> bool:
    return all(jax.tree.leaves(jax.tree.map(lambda x, y: np.array_equal(np.asarray(x), np.asarray(y)), a, b)))


@pytest.fixture
def saved(config, key, tmp_path):
    params = init(config, key)
    hf.save_params(tmp_path / "model", params, config, dtype="float32")
    return tmp_path / "model", params, config


def rewrite(directory, change):
    path = directory / hf.SINGLE_NAME
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def test_round_trip(saved):
    directory, params, config = saved
    assert same_tree(hf.load_params(directory, config), params)
    read = QwenConfig.from_hf(directory, **SMALL_PIECES)
    assert read == config


def test_sharded_files_round_trip(saved):
    directory, params, config = saved
    sharded = directory.with_name("sharded")
    hf.save_params(sharded, params, config, dtype="float32", max_file_bytes=20_000)
    assert len(list(sharded.glob("*.safetensors"))) > 2
    assert same_tree(hf.load_params(sharded, config), params)


def test_bfloat16_round_trip(saved):
    directory, params, config = saved
    half = directory.with_name("half")
    hf.save_params(half, params, config)
    rounded = jax.tree.map(lambda x: np.asarray(x).astype(ml_dtypes.bfloat16).astype(np.float32), params)
    assert same_tree(hf.load_params(half, config), rounded)
    assert hf.load_params(half, config, dtype="bfloat16")["embed"].dtype == "bfloat16"


def test_load_places_parameters(saved):
    directory, params, config = saved
    shardings = param_shardings(config, make_mesh())
    loaded = hf.load_params(directory, config, shardings=shardings)
    assert same_tree(loaded, params)
    assert loaded["embed"].sharding == shardings["embed"]


def test_hub_layout_ignores_vision_and_mtp(saved):
    directory, params, config = saved

    def to_hub(tensors):
        for name in [name for name in tensors if name.startswith("model.")]:
            tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name)
        tensors["model.visual.patch_embed.proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["mtp.fc.weight"] = np.zeros((2, 2), np.float32)

    rewrite(directory, to_hub)
    assert same_tree(hf.load_params(directory, config), params)
    with pytest.raises(hf.WeightsError, match=r"not used.*model\.visual\.patch_embed\.proj\.weight"):
        hf.load_params(directory, config, ignored_prefixes=("mtp.",))


def test_missing_tensor_is_named(saved):
    directory, _, config = saved
    rewrite(directory, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(hf.WeightsError, match=rf"{directory}.*missing model\.layers\.1\.mlp\.up_proj\.weight"):
        hf.load_params(directory, config)


def test_wrong_prefix_is_not_skipped(saved):
    directory, _, config = saved

    def wrong_prefix(tensors):
        tensors["language_model.norm.weight"] = tensors.pop("model.norm.weight")

    rewrite(directory, wrong_prefix)
    with pytest.raises(hf.WeightsError, match=r"missing model\.norm\.weight"):
        hf.load_params(directory, config)


def test_unused_tensor_is_named(saved):
    directory, _, config = saved
    rewrite(directory, lambda tensors: tensors.update({"model.layers.9.extra": np.zeros(2, np.float32)}))
    with pytest.raises(hf.WeightsError, match=r"not used.*model\.layers\.9\.extra in model\.safetensors"):
        hf.load_params(directory, config)


def test_untied_model_needs_its_head(saved):
    directory, _, config = saved
    rewrite(directory, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(hf.WeightsError, match=r"missing lm_head\.weight \(is the model tied"):
        hf.load_params(directory, config)


def test_tied_model_rejects_a_different_head(tmp_path, key):
    config = tiny_config("qwen3", tie_word_embeddings=True)
    params = init(config, key)
    hf.save_params(tmp_path, params, config, dtype="float32")
    embedding = np.asarray(params["embed"])
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding}))
    assert same_tree(hf.load_params(tmp_path, config), params)
    rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": embedding + 1}))
    with pytest.raises(hf.WeightsError, match="lm_head.weight differs from the embeddings"):
        hf.load_params(tmp_path, config)


def test_wrong_shape_names_tensor_and_file(saved):
    directory, _, config = saved
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": np.zeros(3, np.float32)}))
    with pytest.raises(hf.WeightsError, match=r"model\.safetensors: tensor model\.norm\.weight has shape \(3,\)"):
        hf.load_params(directory, config)


def test_not_finite_weights_are_rejected(saved):
    directory, _, config = saved
    rewrite(directory, lambda tensors: tensors["model.norm.weight"].__setitem__(0, np.nan))
    with pytest.raises(hf.WeightsError, match=r"model\.norm\.weight holds values that are not finite"):
        hf.load_params(directory, config)


def test_truncated_file_is_named(saved):
    directory, _, config = saved
    path = directory / hf.SINGLE_NAME
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(hf.WeightsError, match=r"model\.safetensors: not a complete safetensors file"):
        hf.load_params(directory, config)


def test_directory_without_weights(tmp_path, config):
    with pytest.raises(hf.WeightsError, match="neither model.safetensors nor"):
        hf.load_params(tmp_path, config)


def test_save_refuses_another_models_parameters(tmp_path, config, key):
    params = init(config, key)
    with pytest.raises(hf.WeightsError, match="embed"):
        hf.save_params(tmp_path, params, config.replace(vocab_size=96))
