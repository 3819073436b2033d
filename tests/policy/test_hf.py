"""Model directories: layouts, round trips, and errors that name what is wrong."""

from __future__ import annotations

import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tiny_models import SMALL_PIECES, init, tiny_config

from reterm_jax.policy import hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import param_specs


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
    with pytest.raises(hf.WeightsError, match=r"model\.safetensors: missing lm_head\.weight \(is the model tied"):
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


def to_hub(tensors, config):
    """The names, other tensors and mixed dtypes of a hub checkpoint; values that only some dtypes hold exactly."""
    for name in [name for name in tensors if name.startswith("model.")]:
        dtype = np.float32 if name.endswith(("A_log", "norm.weight")) else ml_dtypes.bfloat16
        tensors[name.replace("model.", "model.language_model.", 1)] = tensors.pop(name).astype(dtype)
    tensors["model.visual.patch_embed.proj.weight"] = np.arange(6, dtype=np.float16).reshape(2, 3)
    tensors["mtp.fc.weight"] = np.array([[np.nan, 2]], ml_dtypes.bfloat16)
    if config.tie_word_embeddings:
        tensors["lm_head.weight"] = tensors["model.language_model.embed_tokens.weight"]


def tensor_bytes(directory):
    return {name: (x.dtype, x.shape, x.data.tobytes()) for name, x in hf.open_tensors(directory).items()}


@pytest.fixture(params=[False, True], ids=["untied", "tied"])
def hub(request, config, key, tmp_path):
    """A multimodal directory with files of all kinds."""
    config = config.replace(tie_word_embeddings=request.param)
    directory = tmp_path / "hub"
    hf.save_params(directory, init(config, key), config, dtype="float32")
    rewrite(directory, lambda tensors: to_hub(tensors, config))
    for name in ("tokenizer.json", "generation_config.json", "chat_template.jinja", "merges.txt", "LICENSE"):
        (directory / name).write_text(f"content of {name}")
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (directory / "pytorch_model.bin.index.json").write_text("of other weights")
    return directory, config


@pytest.mark.parametrize("max_file_bytes", [20_000, 10**9])
def test_load_then_save_changes_nothing(hub, tmp_path, max_file_bytes):
    source, config = hub
    output = tmp_path / "saved"
    params = hf.load_params(source, config)
    hf.save_params(output, params, config, source=source, max_file_bytes=max_file_bytes)
    assert tensor_bytes(output) == tensor_bytes(source)
    assert (output / hf.INDEX_NAME).exists() == (max_file_bytes == 20_000)
    passed = {path.relative_to(source) for path in source.rglob("*") if path.suffix in (".json", ".jinja", ".txt", "")}
    passed -= {path for path in passed if path.name.endswith(".index.json")}
    assert len(passed) == 8
    for path in passed:
        assert (output / path).is_dir() or (output / path).read_bytes() == (source / path).read_bytes()
    assert not (output / "pytorch_model.bin.index.json").exists()


def test_changed_parameters_replace_the_sources(hub, tmp_path):
    source, config = hub
    params = jax.tree.map(lambda x: 2 * x, hf.load_params(source, config))
    hf.save_params(tmp_path / "saved", params, config, source=source)
    assert same_tree(hf.load_params(tmp_path / "saved", config), params)
    before, after = tensor_bytes(source), tensor_bytes(tmp_path / "saved")
    assert {name: x[:2] for name, x in after.items()} == {name: x[:2] for name, x in before.items()}
    changed = {name for name in before if before[name] != after[name]}
    assert "model.language_model.embed_tokens.weight" in changed and "lm_head.weight" in changed
    assert not {name for name in changed if name.startswith(("model.visual.", "mtp."))}


def test_source_without_weights_gives_its_files(config, key, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text("{}")
    (source / "tokenizer.json").write_text("[]")
    params = init(config, key)
    hf.save_params(tmp_path / "saved", params, config, source=source, dtype="float32")
    assert same_tree(hf.load_params(tmp_path / "saved", config), params)
    assert (tmp_path / "saved" / "config.json").read_text() == "{}"
    assert (tmp_path / "saved" / "tokenizer.json").read_text() == "[]"


def test_source_of_another_model_is_refused(hub, key, tmp_path):
    source, config = hub
    other = config.replace(intermediate_size=40)
    with pytest.raises(hf.WeightsError, match=rf"{source}/.*gate_proj.weight has shape \(48, 32\), the configuration"):
        hf.save_params(tmp_path / "saved", init(other, key), other, source=source)
    assert not (tmp_path / "saved").exists()


@pytest.fixture
def half(config, key, tmp_path):
    """A float16 directory, with the smallest and the largest values of that dtype."""
    hf.save_params(tmp_path / "half", init(config, key), config, dtype="float16")

    def extremes(tensors):
        tensors["model.norm.weight"][:4] = (65504, -65504, 6e-8, -0.0)

    rewrite(tmp_path / "half", extremes)
    return tmp_path / "half", config


def test_float16_round_trip(half, tmp_path):
    source, config = half
    params = hf.load_params(source, config)
    assert params["final_norm"][0] == 65504 and params["final_norm"][2] > 0
    hf.save_params(tmp_path / "saved", params, config, source=source)
    assert tensor_bytes(tmp_path / "saved") == tensor_bytes(source)


def test_float16_overflow_names_the_tensor(half, tmp_path):
    source, config = half
    params = hf.load_params(source, config)
    params["layers"]["0"]["mlp"]["up"] = params["layers"]["0"]["mlp"]["up"].at[1, 2, 3].set(65520.0)
    layer = len(config.layer_pattern)
    name = rf"model\.layers\.{layer}\.mlp\.up_proj\.weight"
    with pytest.raises(hf.WeightsError, match=rf"{tmp_path}/saved: {name} has values that are not finite in F16"):
        hf.save_params(tmp_path / "saved", params, config, source=source)
    assert {path.name for path in tmp_path.iterdir()} == {"half"}


def test_tensor_of_another_dtype_is_named(saved):
    directory, _, config = saved
    rewrite(directory, lambda tensors: tensors.update({"model.norm.weight": np.zeros(32, np.int32)}))
    with pytest.raises(hf.WeightsError, match=r"model\.safetensors: tensor model\.norm\.weight is I32"):
        hf.load_params(directory, config)


def peak_host_bytes(function) -> int:
    """The most that Python and numpy allocated at once. Device buffers and maps of files do not count."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_host_memory_is_bounded_by_one_tensor(tmp_path):
    config = tiny_config("qwen3", num_hidden_layers=24, layer_types=("full_attention",) * 24, intermediate_size=16_384)
    largest = 32 * 16_384 * 4
    stack = 24 * largest
    specs = param_specs(config)
    params = jax.tree.map(lambda spec: jnp.full(spec.shape, 0.5), specs)
    source = tmp_path / "source"
    hf.save_params(source, params, config)
    hf.load_params(source, config)  # compiles
    slack = largest
    assert peak_host_bytes(lambda: hf.load_params(source, config)) < 2 * largest + slack < stack / 4
    saving = peak_host_bytes(lambda: hf.save_params(tmp_path / "saved", params, config, source=source))
    assert saving < 2 * largest + slack


def test_directory_without_weights(tmp_path, config):
    with pytest.raises(hf.WeightsError, match="neither model.safetensors nor"):
        hf.load_params(tmp_path, config)


def test_save_refuses_another_models_parameters(tmp_path, config, key):
    params = init(config, key)
    with pytest.raises(hf.WeightsError, match="embed"):
        hf.save_params(tmp_path, params, config.replace(vocab_size=96))
