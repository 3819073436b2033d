"""What a training phase carries from step to step, created in place on the devices of a mesh."""

from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec


@flax.struct.dataclass
class TrainState:
    """
    Attributes:
        params: master parameters, float32.
        opt_state: the optimizer's state, sharded like the parameters it belongs to.
        step: int32 [], updates attempted so far; data order and schedules of the loops follow from it.
        average: exponential moving average of `params`, float32; None where none is kept.
    """

    params: Any
    opt_state: Any
    step: jax.Array
    average: Any = None

    @property
    def result(self) -> Any:
        """The parameters that are evaluated, exported and published: the average where there is one."""
        return self.params if self.average is None else self.average


def state_shardings(
    abstract_params: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
    *,
    average: bool = False,
) -> TrainState:
    """A NamedSharding for every leaf of the state: moments (and an average of the parameters, with `average`) lie where
    their parameter lies, the rest is replicated."""
    replicated = NamedSharding(mesh, PartitionSpec())
    of_param = {_keys(path): s for path, s in jax.tree_util.tree_leaves_with_path(param_shardings)}
    depth = max(map(len, of_param))

    def sharding(path: jax.tree_util.KeyPath, leaf: Any) -> NamedSharding:
        # A moment's path ends with the path of its parameter, whatever the optimizer wraps around it.
        keys = _keys(path)[-depth:]
        found = next((of_param[keys[i:]] for i in range(len(keys)) if keys[i:] in of_param), None)
        return found if found is not None and leaf.ndim >= len(found.spec) else replicated

    opt_shardings = jax.tree_util.tree_map_with_path(sharding, jax.eval_shape(optimizer.init, abstract_params))
    return TrainState(
        params=param_shardings,
        opt_state=opt_shardings,
        step=replicated,
        average=param_shardings if average else None,
    )


def abstract_state(
    abstract_params: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
    *,
    average: bool = False,
) -> TrainState:
    """Shapes, dtypes and shardings of the state: what a checkpoint is restored into. Allocates nothing."""
    shapes = TrainState(
        params=abstract_params,
        opt_state=jax.eval_shape(optimizer.init, abstract_params),
        step=jax.ShapeDtypeStruct((), jnp.int32),
        average=abstract_params if average else None,
    )
    shardings = state_shardings(abstract_params, optimizer, mesh, param_shardings, average=average)
    return abstract_arrays(shapes, shardings)


def abstract_arrays(abstract: Any, shardings: Any) -> Any:
    """`abstract` with these shardings: what arrays alone are restored into."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), abstract, shardings)


def init_state(
    init_params: Callable[[jax.Array], Any],
    key: jax.Array,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
) -> TrainState:
    """A new state with random parameters. No device ever holds more than its shards."""
    shapes = jax.eval_shape(init_params, key)
    shardings = state_shardings(shapes, optimizer, mesh, param_shardings)
    with jax.set_mesh(mesh):
        params = jax.jit(init_params, out_shardings=shardings.params)(key)
    return _with_new_optimizer(params, optimizer, mesh, shardings)


def state_from_params(
    params: Any,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
    *,
    average: bool = False,
) -> TrainState:
    """A new state at step 0 around given parameters, such as those of an earlier phase or of a model directory.

    The parameters are copied: a step donates its state, and must not take the caller's arrays with it. An average
    begins as they are.
    """
    shapes = jax.eval_shape(lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree), params)
    shardings = state_shardings(shapes, optimizer, mesh, param_shardings)
    params = jax.tree.map(lambda x: x if x.dtype == jnp.float32 else x.astype(jnp.float32), params)
    params = jax.device_put(params, shardings.params, may_alias=False)
    state = _with_new_optimizer(params, optimizer, mesh, shardings)
    return state.replace(average=jax.device_put(params, shardings.params, may_alias=False)) if average else state


def _keys(path: jax.tree_util.KeyPath) -> tuple[str, ...]:
    return tuple(str(getattr(entry, "key", entry)) for entry in path)


def _with_new_optimizer(
    params: Any, optimizer: optax.GradientTransformation, mesh: Mesh, shardings: TrainState
) -> TrainState:
    with jax.set_mesh(mesh):
        opt_state = jax.jit(optimizer.init, out_shardings=shardings.opt_state)(params)
    step = jax.device_put(jnp.zeros((), jnp.int32), shardings.step)
    return TrainState(params=params, opt_state=opt_state, step=step)
