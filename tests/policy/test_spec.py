"""Declarations, abstract arrays and initial values agree."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_models import init

from reterm_jax.policy.spec import ArraySpec, abstract_params, param_name, param_specs


def test_initial_values_match_the_declaration(config, key):
    params, abstract = init(config, key), abstract_params(config)
    assert jax.tree.structure(params) == jax.tree.structure(abstract)
    for spec, value, shape in zip(*map(jax.tree.leaves, (param_specs(config), params, abstract)), strict=True):
        assert value.shape == spec.shape == shape.shape
        assert value.dtype == shape.dtype == jnp.float32


def test_a_parameters_value_depends_only_on_key_and_path(config, key):
    wider = config.replace(tie_word_embeddings=not config.tie_word_embeddings)
    np.testing.assert_array_equal(init(config, key)["embed"], init(wider, key)["embed"])
    assert not np.array_equal(init(config, key)["embed"], init(config, jax.random.key(1))["embed"])


def test_layers_are_stacked_over_blocks(config):
    for spec in jax.tree.leaves(param_specs(config)["layers"]):
        assert spec.logical_axes[0] == "layers" and spec.shape[0] == config.num_blocks


def test_names():
    path, _ = jax.tree_util.tree_leaves_with_path({"layers": {"0": {"mixer": {"q_proj": 1}}}})[0]
    assert param_name(path) == "layers.0.mixer.q_proj"


def test_axes_must_match_the_shape():
    with pytest.raises(ValueError, match="1 axes"):
        ArraySpec((2, 3), ("embed",))
