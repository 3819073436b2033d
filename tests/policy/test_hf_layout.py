"""The way between checkpoint tensors and parameters."""

from __future__ import annotations

import numpy as np

from reterm_jax.policy.hf_layout import groups
from reterm_jax.policy.spec import param_specs


def tensor_of(group) -> np.ndarray:
    return np.arange(np.prod(group.shape), dtype=np.float32).reshape(group.shape)


def test_a_parameter_is_a_view_of_its_tensor(config):
    for group in groups(config):
        tensor = tensor_of(group)
        parts = group.split(tensor)
        assert all(np.shares_memory(part, tensor) for part in parts), group.tensor
        assert sum(part.size for part in parts) == tensor.size, group.tensor


def test_parts_join_to_the_tensor(config):
    for group in groups(config):
        tensor = tensor_of(group)
        np.testing.assert_array_equal(group.join(group.split(tensor), tensor.dtype), tensor, group.tensor)


def test_parts_have_the_shapes_of_the_parameters(config):
    specs = param_specs(config)
    for group in groups(config):
        for name, part in zip(group.params, group.split(tensor_of(group)), strict=True):
            spec = specs
            for key in name.split("."):
                spec = spec[key]
            assert part.shape == spec.shape[0 if group.block is None else 1 :], name


def test_a_tied_head_is_the_embedding_once_more(config):
    tied = config.replace(tie_word_embeddings=True)
    assert "lm_head.weight" not in {group.tensor for group in groups(tied)}
    heads = [group for group in groups(tied, tied_head=True) if group.params == ("embed",)]
    assert [group.tensor for group in heads] == ["model.embed_tokens.weight", "lm_head.weight"]
