"""Publications read back by what the sampler uses, against the Hugging Face export of the same parameters."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.checkpoint import publish
from reterm_jax.checkpoint.publish import Publisher, PublishError
from reterm_jax.policy import forward, hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.hf_files import open_tensors
from reterm_jax.policy.spec import init_params
from reterm_jax.serving.published import PublishedError, read_manifest, read_tensors

PROBE = tuple(np.random.default_rng(0).integers(0, 96, 20).tolist())


def config_of(family, tied):
    linear = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8}
    raw = {
        "model_type": family,
        "vocab_size": 96,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "initializer_range": 0.2,
        "tie_word_embeddings": tied,
        **({} if family == "qwen3" else {**linear, "linear_value_head_dim": 12, "linear_conv_kernel_dim": 4}),
    }
    if family != "qwen3":
        raw["layer_types"] = ["linear_attention", "full_attention"] * 2
    return QwenConfig.from_hf(raw, compute_dtype="float32", remat="none", chunk_size=16)


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "source"
    path.mkdir()
    (path / "tokenizer.json").write_text("{}")
    (path / "config.json").write_text('{"other": 1}')
    return path


def publisher(tmp_path, config, source, **options):
    return Publisher(tmp_path / "published", config, source, PROBE, **options)


@pytest.mark.parametrize("family, tied", [("qwen3", False), ("qwen3_5_text", True), ("qwen3_5_text", False)])
def test_the_published_tensors_are_those_of_the_export(tmp_path, source, family, tied):
    config = config_of(family, tied)
    params = init_params(config, jax.random.key(0))
    published = publisher(tmp_path, config, source)
    published.publish(7, params)
    published.close()
    hf.save_params(tmp_path / "hf", params, config)
    expected = open_tensors(tmp_path / "hf")
    got = dict(read_tensors(published.path(7)))
    assert set(got) == set(expected)
    for name, value in got.items():
        np.testing.assert_array_equal(value, expected[name].view(), err_msg=name)
    assert sorted(p.name for p in published.path(7).iterdir()) == [
        "config.json", "manifest.json", "tokenizer.json", "weights",
    ]  # fmt: skip
    assert QwenConfig.from_hf(published.path(7)).tie_word_embeddings == tied


def test_the_probe_is_the_policy_in_bfloat16(tmp_path, source):
    config = config_of("qwen3_5_text", True)
    params = init_params(config, jax.random.key(0))
    published = publisher(tmp_path, config, source)
    published.publish(3, params)
    published.close()
    manifest = read_manifest(published.path(3))
    hf.save_params(tmp_path / "hf", params, config)
    reloaded = hf.load_params(tmp_path / "hf", config)
    tokens_BT = jnp.asarray(PROBE)[None]
    hidden_BTD = forward.hidden_states(
        reloaded, config, tokens_BT, jnp.ones_like(tokens_BT), jnp.arange(len(PROBE))[None]
    )
    logprobs_TV = jax.nn.log_softmax(hidden_BTD[0] @ forward.head(reloaded, config).T)
    expected = [float(logprobs_TV[t, token]) for t, token in enumerate(PROBE[1:])]
    np.testing.assert_allclose(manifest.probe.logprobs, expected, atol=1e-5)
    assert (manifest.version, manifest.probe.ids) == (3, PROBE)
    assert manifest.nbytes == sum(tensor.data.nbytes for tensor in open_tensors(tmp_path / "hf").values())


def test_training_may_go_on_while_it_is_written(tmp_path, source):
    config = config_of("qwen3", True)
    params = init_params(config, jax.random.key(0))
    expected = np.asarray(params["embed"].astype(jnp.bfloat16))
    published = publisher(tmp_path, config, source)
    published.publish(0, params)
    jax.tree.map(lambda leaf: leaf.delete(), params)  # as a donated buffer
    published.close()
    np.testing.assert_array_equal(dict(read_tensors(published.path(0)))["model.embed_tokens.weight"], expected)


def test_the_last_ones_are_kept_and_unfinished_ones_are_not_there(tmp_path, source, monkeypatch):
    config = config_of("qwen3", True)
    params = init_params(config, jax.random.key(0))
    published = publisher(tmp_path, config, source, keep=2)
    for version in (1, 2, 3):
        published.publish(version, params)
    published.wait()
    assert published.versions == [2, 3]
    with pytest.raises(PublishError, match="3 exists"):
        published.publish(3, params)

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(publish, "copy_companions", broken)
    published.publish(4, params)
    with pytest.raises(PublishError, match="disk full"):
        published.wait()
    monkeypatch.undo()
    published.publish(4, params)
    published.close()
    assert published.versions == [3, 4]

    (published.directory / ".9.partial").mkdir()
    publisher(tmp_path, config, source).close()
    assert sorted(os.listdir(published.directory)) == ["3", "4"]


def test_a_run_that_resumes_publishes_its_later_versions_again(tmp_path, source):
    config = config_of("qwen3", False)
    params = init_params(config, jax.random.key(0))
    published = publisher(tmp_path, config, source)
    for version in (1, 2, 3):
        published.publish(version, params)
    published.discard_from(2)
    assert published.versions == [1]
    published.publish(2, jax.tree.map(lambda leaf: 2 * leaf, params))
    published.close()
    first, second = (dict(read_tensors(published.path(version)))["lm_head.weight"] for version in (1, 2))
    np.testing.assert_array_equal(second, 2 * first)


def test_bad_weights_and_bad_arguments_are_refused(tmp_path, source):
    config = config_of("qwen3", True)
    params = init_params(config, jax.random.key(0))
    published = publisher(tmp_path, config, source)
    with pytest.raises(PublishError, match="version 5: parameters are not finite"):
        published.publish(5, {**params, "embed": params["embed"].at[3, 1].set(jnp.nan)})
    with pytest.raises(PublishError, match="not those of the config: lm_head"):
        published.publish(5, {**params, "lm_head": params["embed"]})
    assert published.versions == []
    published.close()
    for bad in ([1], [1, 96]):
        with pytest.raises(PublishError, match="probe_ids"):
            Publisher(tmp_path / "p", config, source, bad)
    with pytest.raises(PublishError, match="keep"):
        publisher(tmp_path, config, source, keep=0)


def test_damaged_directories_are_refused_before_the_first_tensor(tmp_path, source):
    config = config_of("qwen3", True)
    published = publisher(tmp_path, config, source)
    published.publish(1, init_params(config, jax.random.key(0)))
    published.close()
    path = published.path(1) / "manifest.json"
    record = json.loads(path.read_text())

    def refused(message, **change):
        path.write_text(json.dumps({**record, **change}))
        with pytest.raises(PublishedError, match=message):
            next(read_tensors(published.path(1)))

    tensors = record["tensors"]
    first = next(iter(tensors))
    refused("format 2", format=2)
    refused("tensor absent of the manifest is missing", tensors={**tensors, "absent": tensors[first]})
    refused("the manifest says float32", tensors={**tensors, first: {**tensors[first], "dtype": "float32"}})
    refused("one logprob less", probe={"ids": [1, 2], "logprobs": []})
    refused("NoneType", version=None)
    path.write_text("{")
    with pytest.raises(PublishedError, match="not JSON"):
        read_manifest(published.path(1))
    path.unlink()
    with pytest.raises(PublishedError, match="no such file"):
        read_manifest(published.path(1))
    path.mkdir()
    with pytest.raises(PublishedError, match="cannot be read \\(Is a directory\\)"):
        read_manifest(published.path(1))
