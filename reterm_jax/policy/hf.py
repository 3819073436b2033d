"""Reading and writing Hugging Face model directories: `config.json` and safetensors, single file or sharded."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.hf_layout import Flat, Group, groups
from reterm_jax.policy.spec import Params, param_name, param_specs

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

# Tensors of multimodal checkpoints that a text policy has no use for: the vision tower and the multi-token predictor.
IGNORED_PREFIXES = ("model.visual.", "visual.", "mtp.", "model.mtp.")

# Where the decoder may sit: text-only checkpoints, then the hub's multimodal ones.
_DECODER_PREFIXES = ("model.language_model.", "model.")

_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
_MAX_FILE_BYTES = 5 * 1024**3


class WeightsError(ValueError):
    """A checkpoint that does not match its configuration; the message names the tensors and the file."""


def load_params(
    directory: str | Path,
    config: QwenConfig,
    *,
    shardings: Params | None = None,
    dtype: str = "float32",
    ignored_prefixes: tuple[str, ...] = IGNORED_PREFIXES,
) -> Params:
    """Reads a model directory into the parameter tree of `config`.

    Args:
      directory: holds `model.safetensors`, or shards with `model.safetensors.index.json`.
      config: the architecture, usually `QwenConfig.from_hf(directory)`.
      shardings: a tree from `param_shardings`; each parameter is then placed on its devices as soon as it is read.
      dtype: of the parameters: float32 for training, bfloat16 to sample only.
      ignored_prefixes: tensors that may be in the files without being used.

    Raises WeightsError where a tensor is missing, unused, of the wrong shape, or not finite.
    """
    directory = Path(directory)
    where = _tensor_files(directory)
    prefix = _decoder_prefix(where, directory)
    plan = list(groups(config, prefix))
    _check_names(plan, where, directory, config, ignored_prefixes)

    # Group by parameter, so that only one stacked parameter (with those fused to it) is in host memory at a time.
    by_params: dict[tuple[str, ...], list[Group]] = defaultdict(list)
    for group in plan:
        by_params[group.params].append(group)
    flat_shardings = _flatten(shardings) if shardings is not None else {}
    specs = _flatten(param_specs(config))
    placed: dict[str, jax.Array] = {}
    reader = _Reader(where)
    for names, parts in by_params.items():
        arrays = {name: np.empty(specs[name].shape, _DTYPES[dtype]) for name in names}
        for group in parts:
            for name, value in zip(names, group.split(reader.read(group)), strict=True):
                arrays[name][... if group.block is None else group.block] = value
        for name, array in arrays.items():
            placed[name] = _place(array, flat_shardings.get(name))
    if config.tie_word_embeddings and "lm_head.weight" in where:
        _check_tied(reader, plan[0], where)
    return jax.tree_util.tree_map_with_path(lambda path, _: placed[param_name(path)], param_specs(config))


def save_params(
    directory: str | Path,
    params: Params,
    config: QwenConfig,
    *,
    dtype: str = "bfloat16",
    max_file_bytes: int = _MAX_FILE_BYTES,
) -> None:
    """Writes a text-only model directory (weights and `config.json`) that `transformers` loads.

    The tokenizer's files are the caller's to copy. Every parameter must be fully addressable on this host.
    """
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    flat = _flatten(params)
    _check_tree(flat, config)
    names: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for group in groups(config):
        bytes_ = int(np.prod(group.shape)) * _DTYPES[dtype].itemsize
        if names[-1] and size + bytes_ > max_file_bytes:
            names.append({})
            size = 0
        names[-1][group.tensor] = group.shape
        size += bytes_
    plan = {group.tensor: group for group in groups(config)}
    weight_map, total = {}, 0
    for number, tensors in enumerate(names):
        file_name = SINGLE_NAME if len(names) == 1 else f"model-{number + 1:05d}-of-{len(names):05d}.safetensors"
        arrays = {name: _to_tensor(plan[name], flat, dtype) for name in tensors}
        _write_atomically(directory / file_name, lambda path, arrays=arrays: save_file(arrays, path, {"format": "pt"}))
        weight_map |= dict.fromkeys(tensors, file_name)
        total += sum(array.nbytes for array in arrays.values())
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / INDEX_NAME, index)
    else:
        # An index left by an earlier, larger model would take precedence over the single file.
        (directory / INDEX_NAME).unlink(missing_ok=True)
    _write_json(directory / "config.json", {**config.to_hf(), "dtype": dtype})


class _Reader:
    """Reads tensors by name; a file is opened once."""

    def __init__(self, where: dict[str, Path]):
        self._where = where
        self._open: dict[Path, object] = {}

    def read(self, group: Group) -> np.ndarray:
        path = self._where[group.tensor]
        if path not in self._open:
            self._open[path] = safe_open(path, framework="numpy")
        array = self._open[path].get_tensor(group.tensor)
        if array.shape != group.shape:
            raise WeightsError(
                f"{path}: tensor {group.tensor} has shape {array.shape}, the configuration asks for {group.shape}; "
                "use the config.json that belongs to these weights"
            )
        if not np.isfinite(array.astype(np.float32)).all():
            raise WeightsError(f"{path}: tensor {group.tensor} holds values that are not finite; get the file again")
        return array


def _tensor_files(directory: Path) -> dict[str, Path]:
    """The file of every tensor, from the files themselves; an index must agree with them."""
    index_path, single = directory / INDEX_NAME, directory / SINGLE_NAME
    if index_path.exists():
        weight_map = json.loads(index_path.read_text(encoding="utf-8"))["weight_map"]
        files = [directory / name for name in sorted(set(weight_map.values()))]
    elif single.exists():
        weight_map, files = None, [single]
    else:
        raise WeightsError(f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME}; point to a directory with weights")
    where: dict[str, Path] = {}
    for path in files:
        if not path.exists():
            raise WeightsError(f"{path}: named in {INDEX_NAME} but absent; download it")
        try:
            with safe_open(path, framework="numpy") as file:
                where |= dict.fromkeys(file.keys(), path)
        except Exception as error:
            raise WeightsError(f"{path}: not a complete safetensors file ({error}); get the file again") from error
    if weight_map is not None and set(weight_map) != set(where):
        raise WeightsError(f"{index_path}: does not list what its files hold: {_some(set(weight_map) ^ set(where))}")
    return where


def _decoder_prefix(where: dict[str, Path], directory: Path) -> str:
    found = [prefix for prefix in _DECODER_PREFIXES if f"{prefix}embed_tokens.weight" in where]
    if len(found) == 1:
        return found[0]
    expected = " or ".join(f"{prefix}embed_tokens.weight" for prefix in _DECODER_PREFIXES)
    problem = "holds both of" if found else "holds neither of"
    raise WeightsError(f"{directory}: {problem} {expected}; its tensors: {_some(where)}")


def _check_names(
    plan: list[Group], where: dict[str, Path], directory: Path, config: QwenConfig, ignored: tuple[str, ...]
) -> None:
    wanted = {group.tensor for group in plan}
    allowed = {"lm_head.weight"} if config.tie_word_embeddings else set()
    missing = wanted - set(where)
    unused = {name for name in where if name not in wanted | allowed and not name.startswith(ignored)}
    if missing:
        hint = " (is the model tied? then set tie_word_embeddings)" if "lm_head.weight" in missing else ""
        raise WeightsError(f"{directory}: missing {_some(missing)}{hint}; every parameter must be in the checkpoint")
    if unused:
        files = sorted({where[name].name for name in unused})
        raise WeightsError(
            f"{directory}: not used by this configuration: {_some(unused)} in {', '.join(files)}; use the matching "
            "config.json, or list their prefix in ignored_prefixes"
        )


def _check_tied(reader: _Reader, embedding: Group, where: dict[str, Path]) -> None:
    head = Group("lm_head.weight", embedding.shape, embedding.params, None, embedding.split, embedding.join)
    if not np.array_equal(reader.read(head), reader.read(embedding)):
        raise WeightsError(
            f"{where['lm_head.weight']}: lm_head.weight differs from the embeddings, but config.json ties them; "
            "set tie_word_embeddings to false"
        )


def _check_tree(flat: Flat, config: QwenConfig) -> None:
    specs = _flatten(param_specs(config))
    wrong = set(specs) ^ set(flat) or {name for name in specs if specs[name].shape != flat[name].shape}
    if wrong:
        raise WeightsError(f"parameters do not match the configuration: {_some(wrong)}; save with the model's config")


def _to_tensor(group: Group, flat: Flat, dtype: str) -> np.ndarray:
    parts = (flat[name] if group.block is None else flat[name][group.block] for name in group.params)
    joined = group.join(*(np.asarray(part) for part in parts))
    return np.ascontiguousarray(joined.astype(_DTYPES[dtype]))


def _place(array: np.ndarray, sharding: jax.sharding.Sharding | None) -> jax.Array:
    if sharding is None:
        return jax.device_put(array)
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def _flatten(tree: Params) -> dict:
    return {param_name(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _some(names: set[str] | dict[str, Path], limit: int = 8) -> str:
    ordered: Iterator[str] = iter(sorted(names))
    shown = [name for name, _ in zip(ordered, range(limit), strict=False)]
    rest = len(names) - len(shown)
    return ", ".join(shown) + (f" and {rest} more" if rest else "")


def _write_json(path: Path, content: dict) -> None:
    text = json.dumps(content, indent=2) + "\n"
    _write_atomically(path, lambda temporary: Path(temporary).write_text(text, encoding="utf-8"))


def _write_atomically(path: Path, write) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    write(temporary)
    os.replace(temporary, path)
