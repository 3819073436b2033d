"""Device meshes, and where parameters and batches lie on them. The rules are data: logical axis to mesh axis."""

from __future__ import annotations

import math
from collections.abc import Mapping

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.spec import ArraySpec, Params, param_name, param_specs

MESH_AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
TIME_AXIS = "tensor"  # of the residual stream between layers

Rules = Mapping[str, str | None]

DEFAULT_RULES: Rules = {
    "vocab": "tensor",
    "embed": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "key_heads": "tensor",
    "value_heads": "tensor",
    "mlp": "tensor",
    "head_dim": None,
    "conv": None,
    "norm": None,
    "layers": None,
}


class ShardingError(ValueError):
    """A parameter or batch that does not fit the mesh; the message names it, its axis and the remedy."""


def make_mesh(data: int = 1, fsdp: int = 1, tensor: int = 1, *, devices: list[jax.Device] | None = None) -> Mesh:
    """A mesh with axes data, fsdp and tensor over the first data * fsdp * tensor devices."""
    devices = jax.devices() if devices is None else devices
    needed = data * fsdp * tensor
    if needed > len(devices):
        raise ShardingError(
            f"mesh data={data} fsdp={fsdp} tensor={tensor} needs {needed} devices, {len(devices)} are visible; "
            "make an axis smaller or start more processes"
        )
    axis_types = (AxisType.Auto,) * len(MESH_AXES)
    return jax.make_mesh((data, fsdp, tensor), MESH_AXES, axis_types=axis_types, devices=devices[:needed])


def param_shardings(config: QwenConfig, mesh: Mesh, rules: Rules = DEFAULT_RULES) -> Params:
    """A NamedSharding for every parameter of `param_specs(config)`.

    Raises ShardingError where a dimension is not divisible by its mesh axis, or a logical axis has no rule.
    """
    return jax.tree_util.tree_map_with_path(
        lambda path, spec: NamedSharding(mesh, _partition(param_name(path), spec, mesh, rules)), param_specs(config)
    )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over data and fsdp together; all other axes whole."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def constrain_batch(x: jax.Array) -> jax.Array:
    """Pins the leading axis of an activation to the batch axes of the mesh in use (`jax.set_mesh`), if there is one.

    Without it the partitioner may choose to follow a sharded weight and replicate the batch instead.
    """
    mesh = mesh_in_use(x.shape[0])
    return x if mesh is None else jax.lax.with_sharding_constraint(x, PartitionSpec(BATCH_AXES))


def constrain_residual(x_BTD: jax.Array) -> jax.Array:
    """Pins what is added to the residual stream to the batch axes of the mesh in use, and its tokens to `tensor`.

    Between two layers nothing needs all tokens of a row, and what a layer keeps for its backward pass is its input: cut
    over `tensor`, it takes that many times less memory. Where T is not divisible by `tensor`, rows are whole.
    """
    mesh = mesh_in_use(x_BTD.shape[0])
    if mesh is None:
        return x_BTD
    time = TIME_AXIS if x_BTD.shape[1] % mesh.shape[TIME_AXIS] == 0 else None
    # Whole rows first, for the gradient: it is gathered here, and not the weights of the matmul that made x.
    return jax.lax.with_sharding_constraint(constrain_batch(x_BTD), PartitionSpec(BATCH_AXES, time))


def gather_vocab(table_VD: jax.Array, used_with: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(matrix, what it is used with): an embedding or output matrix with all of D on every device and V over `tensor`.

    Without it a lookup is made for the rows of all devices, each with its part of D, and users that loop over slices of
    a row gather the matrix in each. The barrier ties the gather to the micro-batch of `used_with` (leading axis: rows):
    XLA would move it out of the loop over micro-batches, and hold the gathered matrix for the whole update.
    """
    mesh = mesh_in_use(used_with.shape[0])
    if mesh is None:
        return table_VD, used_with
    table_VD, used_with = jax.lax.optimization_barrier((table_VD, used_with))
    return jax.lax.with_sharding_constraint(table_VD, PartitionSpec(DEFAULT_RULES["vocab"])), used_with


def mesh_in_use(rows: int) -> AbstractMesh | None:
    """The mesh of `jax.set_mesh`, if it is one of ours; raises ShardingError where it cannot divide the rows."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or any(axis not in mesh.axis_names for axis in MESH_AXES):
        return None
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if rows % ways:
        raise ShardingError(
            f"batch of {rows} rows is not divisible by data * fsdp = {ways}; pad the batch or shrink the mesh"
        )
    return mesh


def _partition(name: str, spec: ArraySpec, mesh: Mesh, rules: Rules) -> PartitionSpec:
    axes: list[str | None] = []
    for size, logical in zip(spec.shape, spec.logical_axes, strict=True):
        if logical not in rules:
            raise ShardingError(f"parameter {name}: logical axis {logical!r} has no sharding rule; add one")
        axis = rules[logical]
        if axis is not None and size % mesh.shape[axis]:
            raise ShardingError(
                f"parameter {name}: axis {logical!r} of size {size} is not divisible by mesh axis {axis!r} of size "
                f"{mesh.shape[axis]}; choose a size that divides it, or map {logical!r} to None in the rules"
            )
        axes.append(axis)
    return PartitionSpec(*axes)
