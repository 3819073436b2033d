"""The same weights give the same logits and gradients as `transformers`, in float32."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import TINY_QWEN3, TINY_QWEN3_5, forward, init

from reterm_jax.policy import hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.forward import head
from reterm_jax.policy.hf_layout import groups
from reterm_jax.policy.spec import param_name

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")

RAW = {"qwen3": TINY_QWEN3, "qwen3_5": TINY_QWEN3_5}


def reference_model(family: str, tied: bool):
    """A model with weights large enough that no path of the computation is negligible."""
    raw = {key: value for key, value in RAW[family].items() if key != "model_type"}
    torch.manual_seed(0)
    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "qwen3_5": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM),
    }[family]
    model = model_class(config_class(**raw, tie_word_embeddings=tied, attn_implementation="eager")).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "conv1d" in name:
                parameter.copy_(0.5 * torch.randn_like(parameter))
            elif "dt_bias" in name:
                parameter.copy_(torch.linspace(-6, 1, parameter.numel()))
    return model


def jax_logits(params, config, tokens):
    tokens = jnp.asarray(tokens)
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    hidden_BTD = forward(params, config, tokens, jnp.ones_like(tokens), positions)
    return hidden_BTD @ head(params, config).T


def random_tokens(batch: int, length: int) -> np.ndarray:
    return np.random.default_rng(length).integers(0, 97, (batch, length))


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_logits_equal_transformers(family, tied, tmp_path):
    model = reference_model(family, tied)
    model.save_pretrained(tmp_path)
    config = QwenConfig.from_hf(tmp_path, compute_dtype="float32", attention_block=32)
    assert config.tie_word_embeddings is tied
    params = hf.load_params(tmp_path, config)
    for batch, length in ((3, 65),) if tied else ((2, 1), (3, 64), (2, 150)):
        tokens = random_tokens(batch, length)
        with torch.no_grad():
            expected = model(torch.from_numpy(tokens)).logits.numpy()
        np.testing.assert_allclose(jax_logits(params, config, tokens), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_gradients_equal_transformers(family, tmp_path):
    model = reference_model(family, False)
    model.save_pretrained(tmp_path)
    config = QwenConfig.from_hf(tmp_path, compute_dtype="float32", remat="full", attention_block=32)
    params = hf.load_params(tmp_path, config)
    tokens = random_tokens(2, 90)
    model(torch.from_numpy(tokens)).logits.log_softmax(-1)[..., 3].mean().backward()
    expected = dict(model.named_parameters())

    def loss(params):
        return jnp.mean(jax.nn.log_softmax(jax_logits(params, config, tokens))[..., 3])

    gradients = {
        param_name(path): np.asarray(leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(jax.jit(jax.grad(loss))(params))
    }
    for group in groups(config):
        parts = (gradients[name] if group.block is None else gradients[name][group.block] for name in group.params)
        want = expected[group.tensor].grad.numpy()
        np.testing.assert_allclose(
            group.join(parts, np.float32), want, atol=1e-3 * np.abs(want).max() + 1e-8, rtol=1e-3, err_msg=group.tensor
        )


@pytest.mark.parametrize(("family", "tied"), [("qwen3", True), ("qwen3_5", False)])
def test_saved_directory_loads_in_transformers(family, tied, tmp_path, key):
    config = QwenConfig.from_hf({**RAW[family], "tie_word_embeddings": tied}, compute_dtype="float32")
    params = init(config, key)
    hf.save_params(tmp_path, params, config, dtype="float32")
    model, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    tokens = random_tokens(2, 20)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens)).logits.numpy()
    np.testing.assert_allclose(jax_logits(params, config, tokens), expected, atol=2e-4, rtol=1e-4)


def hub_checkpoint(family: str, tied: bool, directory):
    """A directory as the hub has it: bfloat16, for qwen3_5 multimodal with vision tower and multi-token predictor."""
    torch.manual_seed(0)
    text = {key: value for key, value in RAW[family].items() if key != "model_type"}
    if family == "qwen3":
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**text, tie_word_embeddings=tied))
    else:
        vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2, "out_hidden_size": 32}
        vision |= {"patch_size": 4, "num_position_embeddings": 16}
        config = transformers.Qwen3_5Config(
            text_config={**text, "tie_word_embeddings": tied}, vision_config=vision, tie_word_embeddings=tied
        )
        model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    if family == "qwen3_5":
        # `transformers` drops the predictor's tensors; published checkpoints hold them.
        path = directory / hf.SINGLE_NAME
        extra = {"mtp.fc.weight": torch.randn(4, 8, dtype=torch.bfloat16)}
        files.save_file({**files.load_file(path), **extra}, path, {"format": "pt"})
    return type(model)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_5"])
def test_hub_checkpoint_passes_through_unchanged(family, tied, tmp_path):
    source, saved = tmp_path / "source", tmp_path / "saved"
    model_class = hub_checkpoint(family, tied, source)
    config = QwenConfig.from_hf(source)
    hf.save_params(saved, hf.load_params(source, config), config, source=source, max_file_bytes=40_000)

    before = files.load_file(source / hf.SINGLE_NAME)
    after = {name: tensor for path in saved.glob("*.safetensors") for name, tensor in files.load_file(path).items()}
    assert ("model.visual.pos_embed.weight" in after) == ("mtp.fc.weight" in after) == (family == "qwen3_5")
    assert after.keys() == before.keys()
    for name, tensor in before.items():
        assert tensor.dtype == after[name].dtype and torch.equal(
            tensor.view(torch.int16), after[name].view(torch.int16)
        )
    companions = {path.name for path in source.iterdir()} - {hf.SINGLE_NAME}
    assert companions >= {"config.json", "generation_config.json"}
    assert all((saved / name).read_bytes() == (source / name).read_bytes() for name in companions)

    model, info = model_class.from_pretrained(saved, output_loading_info=True)
    assert not any(info[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    state = model.state_dict()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items() if not name.startswith("mtp."))
