"""Reading and writing Hugging Face model directories: between their files and parameters on a mesh."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Sharding

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.hf_files import (
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    NewTensor,
    StoredTensor,
    WeightsError,
    copy_companions,
    has_weights,
    new_directory,
    open_tensors,
    some,
    write_json,
    write_tensors,
)
from reterm_jax.policy.hf_layout import Group, groups
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import Params, param_name, param_specs

# Tensors of multimodal checkpoints that a text policy has no use for: the vision tower and the multi-token predictor.
IGNORED_PREFIXES = ("model.visual.", "visual.", "mtp.", "model.mtp.")

# Where the decoder may sit: the hub's multimodal checkpoints, then text-only ones.
_DECODER_PREFIXES = ("model.language_model.", "model.")

_KINDS = {dtype.name: kind for kind, dtype in DTYPES.items()}
_MAX_FILE_BYTES = 5 * 10**9

Index = tuple[slice, ...]


def load_params(
    directory: str | Path,
    config: QwenConfig,
    *,
    shardings: Params | None = None,
    dtype: str = "float32",
    ignored_prefixes: tuple[str, ...] = IGNORED_PREFIXES,
) -> Params:
    """Reads a model directory into the parameter tree of `config`.

    A process reads only what its devices hold, one layer of one parameter at a time: beside the devices' buffers, host
    memory holds one such piece in the file's dtype and in `dtype`.

    Args:
      directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
      config: the architecture, usually `QwenConfig.from_hf(directory)`.
      shardings: a tree from `param_shardings`; without it everything goes to this process's first device.
      dtype: of the parameters: float32 for training, bfloat16 to sample only.
      ignored_prefixes: tensors that may be in the files without being used.

    Raises WeightsError where a file is absent or damaged, or a tensor is missing, unused, of the wrong shape or dtype,
    or not finite.
    """
    directory = Path(directory)
    tensors = open_tensors(directory)
    layers: dict[str, list[_Piece]] = defaultdict(list)
    copies: dict[str, _Piece] = {}
    for group in _plan(tensors, directory, config, ignored_prefixes):
        tensor = tensors[group.tensor]
        for name, view in zip(group.params, group.split(tensor.view()), strict=True):
            if group.block is None and name in layers:
                copies[name] = _Piece(tensor, view)
            else:
                layers[name].append(_Piece(tensor, view))

    if shardings is None:
        shardings = param_shardings(config, make_mesh(devices=jax.local_devices()[:1]))

    def place(path: jax.tree_util.KeyPath, sharding: Sharding) -> jax.Array:
        name = param_name(path)
        if name.startswith("layers."):
            return _place_stacked(layers[name], sharding, dtype)
        return _place_single(layers[name][0], copies.get(name), sharding, dtype)

    return jax.tree_util.tree_map_with_path(place, shardings)


def save_params(
    directory: str | Path,
    params: Params,
    config: QwenConfig,
    *,
    source: str | Path | None = None,
    dtype: str = "bfloat16",
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Writes a model directory that `transformers` loads; it appears in one move when all of it is there.

    One tensor at a time is gathered, in host memory, and written. Every process must call it; the first one writes.

    Args:
      directory: absent or empty.
      source: the model directory that the parameters came from. Its names and dtypes are kept, and so is all that is
        not the policy's: the vision tower and the multi-token predictor, the config, the tokenizer's files. One without
        weights gives the files only. Without a source the layout is text-only, with a `config.json` and no tokenizer.
      dtype: of tensors that the source does not hold: float32, bfloat16 or float16.

    Raises WeightsError where the parameters are not those of `config`, the source does not match it, or a value is not
    finite in its tensor's dtype.
    """
    directory, source = Path(directory), None if source is None else Path(source)
    flat = {param_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    _check_tree(flat, config)
    stored = open_tensors(source) if source is not None and has_weights(source) else {}
    plan = _plan(stored, source, config, IGNORED_PREFIXES) if stored else list(groups(config))
    new = {}
    for group in plan:
        kind = stored[group.tensor].dtype if stored else _KINDS[dtype]
        size = int(np.prod(group.shape)) * DTYPES[kind].itemsize
        make = partial(_tensor_bytes, group, flat, kind, directory)
        new[group.tensor] = NewTensor(group.tensor, kind, group.shape, size, make)
    for name, tensor in stored.items():
        if name not in new:
            new[name] = NewTensor(name, tensor.dtype, tensor.shape, tensor.data.nbytes, lambda data=tensor.data: data)
    ordered = [new[name] for name in stored or new]

    writes = jax.process_index() == 0
    with new_directory(directory) if writes else contextlib.nullcontext() as unfinished:
        write_tensors(unfinished, ordered, max_file_bytes)
        if writes and source is not None:
            copy_companions(source, unfinished)
        elif writes:
            write_json(unfinished / "config.json", {**config.to_hf(), "dtype": dtype})
    multihost_utils.sync_global_devices(f"saved {directory}")


@dataclass(frozen=True)
class _Piece:
    """A parameter, or one layer of a stacked one, where it lies in a mapped file."""

    tensor: StoredTensor
    view: np.ndarray

    def read(self, index: Index, dtype: str) -> np.ndarray:
        """The part at `index`, contiguous, read from the file once and in the file's order."""
        value = np.asarray(self.view[index].copy(order="K"), jnp.dtype(dtype), order="C")
        if not np.isfinite(value).all():
            raise WeightsError(
                f"{self.tensor.path}: tensor {self.tensor.name} holds values that are not finite; get the file again"
            )
        return value


def _place_stacked(layers: Sequence[_Piece], sharding: Sharding, dtype: str) -> jax.Array:
    """The layers, one after another, into their places in each device's share of the stack."""
    shape = (len(layers), *layers[0].view.shape)
    local_shape = sharding.shard_shape(shape)
    shards = []
    for index, devices in _regions(sharding, shape):
        stacks = [jnp.zeros(local_shape, dtype, device=device) for device in devices]
        for position, layer in enumerate(layers[index[0]]):
            value = layer.read(index[1:], dtype)
            stacks = [_insert(stack, jax.device_put(value, stack.device), position) for stack in stacks]
            # Transfers run in the background and would keep many values alive at once.
            jax.block_until_ready(stacks)
        shards += stacks
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=jnp.dtype(dtype))


def _place_single(piece: _Piece, copy: _Piece | None, sharding: Sharding, dtype: str) -> jax.Array:
    shape = piece.view.shape
    shards = []
    for index, devices in _regions(sharding, shape):
        value = piece.read(index, dtype)
        if copy is not None and not np.array_equal(piece.view[index], copy.view[index]):
            raise WeightsError(
                f"{copy.tensor.path}: {copy.tensor.name} differs from the embeddings, but config.json ties them; "
                "set tie_word_embeddings to false"
            )
        # Without a copy a CPU device would go on using the host's memory.
        shards += jax.block_until_ready([jax.device_put(value, device, may_alias=False) for device in devices])
    return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=jnp.dtype(dtype))


@partial(jax.jit, donate_argnums=0)
def _insert(stack: jax.Array, value: jax.Array, position: int) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(stack, value, position, 0)


def _regions(sharding: Sharding, shape: tuple[int, ...]) -> list[tuple[Index, list[jax.Device]]]:
    """The distinct parts of an array that this process's devices hold, each with its devices."""
    regions: dict[tuple, list[jax.Device]] = defaultdict(list)
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        regions[bounds].append(device)
    return [(tuple(slice(*ends) for ends in bounds), devices) for bounds, devices in regions.items()]


def _tensor_bytes(group: Group, flat: dict[str, jax.Array], kind: str, directory: Path) -> np.ndarray:
    with np.errstate(over="ignore"):
        tensor = group.join((_host_value(flat[name], group.block) for name in group.params), DTYPES[kind])
    if not np.isfinite(tensor).all():
        raise WeightsError(
            f"{directory}: {group.tensor} has values that are not finite in {kind}, the dtype it is written in; choose "
            "a checkpoint from before training diverged, or a source with a wider dtype"
        )
    return tensor.reshape(-1).view(np.uint8)


def _host_value(leaf: jax.Array, block: int | None) -> np.ndarray:
    """A parameter, or one layer of it, on every process's host."""
    # A new array in either case: JAX keeps the host's value of an array for as long as the array lives.
    value = jnp.copy(leaf) if block is None else leaf[block]
    if not value.is_fully_addressable:
        value = multihost_utils.process_allgather(value, tiled=True)
    return np.asarray(value)


def _plan(
    tensors: dict[str, StoredTensor], directory: Path, config: QwenConfig, ignored: tuple[str, ...]
) -> list[Group]:
    """The groups of a checkpoint, each of which it holds in the right shape, and beside which it holds nothing else."""
    plan = list(groups(config, _decoder_prefix(tensors, directory), tied_head="lm_head.weight" in tensors))
    wanted = {group.tensor for group in plan}
    missing = wanted - set(tensors)
    unused = {name for name in tensors if name not in wanted and not name.startswith(ignored)}
    if missing:
        hint = " (is the model tied? then set tie_word_embeddings)" if "lm_head.weight" in missing else ""
        file = directory / (INDEX_NAME if (directory / INDEX_NAME).exists() else SINGLE_NAME)
        raise WeightsError(f"{file}: missing {some(missing)}{hint}; every parameter must be in the checkpoint")
    if unused:
        files = sorted({tensors[name].path.name for name in unused})
        raise WeightsError(
            f"{directory}: not used by this configuration: {some(unused)} in {', '.join(files)}; use the matching "
            "config.json, or list their prefix in ignored_prefixes"
        )
    for group in plan:
        tensor = tensors[group.tensor]
        if tensor.shape != group.shape:
            raise WeightsError(
                f"{tensor.path}: tensor {group.tensor} has shape {tensor.shape}, the configuration asks for "
                f"{group.shape}; use the config.json that belongs to these weights"
            )
    return plan


def _decoder_prefix(tensors: dict[str, StoredTensor], directory: Path) -> str:
    found = [prefix for prefix in _DECODER_PREFIXES if f"{prefix}embed_tokens.weight" in tensors]
    if len(found) == 1:
        return found[0]
    expected = " or ".join(f"{prefix}embed_tokens.weight" for prefix in _DECODER_PREFIXES)
    problem = "holds both of" if found else "holds neither of"
    raise WeightsError(f"{directory}: {problem} {expected}; its tensors: {some(tensors)}")


def _check_tree(flat: dict[str, jax.Array], config: QwenConfig) -> None:
    specs = {param_name(path): spec for path, spec in jax.tree_util.tree_leaves_with_path(param_specs(config))}
    wrong = set(specs) ^ set(flat) or {name for name in specs if specs[name].shape != flat[name].shape}
    if wrong:
        raise WeightsError(f"parameters do not match the configuration: {some(wrong)}; save with the model's config")
