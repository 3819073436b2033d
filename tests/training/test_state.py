import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reterm_jax.training.optimizer import OptimizerConfig, make_optimizer
from reterm_jax.training.state import abstract_state, init_state, state_from_params

KEY = jax.random.key(0)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_abstract_state_describes_the_real_one(hybrid, name):
    optimizer = make_optimizer(OptimizerConfig(name=name), hybrid.specs, 10)
    real, abstract = hybrid.new_state(optimizer), hybrid.abstract_state(optimizer)
    again = init_state(lambda key: jax.tree.map(jnp.copy, real.params), KEY, optimizer, hybrid.mesh, hybrid.shardings)
    assert jax.tree.structure(again) == jax.tree.structure(real)
    jax.tree.map(np.testing.assert_array_equal, again, real)
    assert jax.tree.structure(real) == jax.tree.structure(abstract)
    for a, b in zip(jax.tree.leaves(again), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    assert int(real.step) == 0


def test_an_average_is_laid_out_like_the_parameters_and_is_not_them(hybrid):
    layout = optax.adam(1.0), hybrid.mesh, hybrid.shardings
    state = state_from_params(hybrid.new_state(optax.sgd(1.0)).params, *layout, average=True)
    abstract = abstract_state(jax.eval_shape(lambda: state.params), *layout, average=True)
    assert jax.tree.structure(state) == jax.tree.structure(abstract)
    for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(abstract), strict=True):
        assert (a.shape, a.dtype, a.sharding) == (b.shape, b.dtype, b.sharding)
    jax.tree.map(np.testing.assert_array_equal, state.average, state.params)
    assert state.average["embed"].unsafe_buffer_pointer() != state.params["embed"].unsafe_buffer_pointer()


def test_a_state_from_parameters_owns_float32_copies(hybrid):
    given = jax.tree.map(lambda x: x.astype(jnp.bfloat16), hybrid.new_state(optax.sgd(1.0)).params)
    given["embed"] = given["embed"].astype(jnp.float32)  # no cast, and still a copy
    state = state_from_params(given, optax.adam(1.0), hybrid.mesh, hybrid.shardings)
    assert {x.dtype for x in jax.tree.leaves(state.params)} == {jnp.dtype("float32")}
    np.testing.assert_array_equal(state.params["embed"], given["embed"])
    assert state.params["embed"].unsafe_buffer_pointer() != given["embed"].unsafe_buffer_pointer()
