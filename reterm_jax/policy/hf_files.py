"""The files of a Hugging Face model directory: safetensors, read through memory maps and written tensor by tensor."""

from __future__ import annotations

import contextlib
import itertools
import json
import mmap
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"

DTYPES = {"F32": np.dtype(np.float32), "BF16": np.dtype(ml_dtypes.bfloat16), "F16": np.dtype(np.float16)}

# Everything at the top of a model directory that describes the model and is not its weights.
_COMPANIONS = ("*.json", "*.jinja", "*.txt", "*.model", "additional_chat_templates/*.jinja", "LICENSE*")


class WeightsError(ValueError):
    """A checkpoint that does not match its configuration; the message names the tensors and the file."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file. `data` is its bytes, mapped into memory: what is not looked at is not read."""

    name: str
    path: Path
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray

    def view(self) -> np.ndarray:
        """The tensor as an array on the map. Raises WeightsError where its dtype is none of `DTYPES`."""
        if self.dtype not in DTYPES:
            raise WeightsError(f"{self.path}: tensor {self.name} is {self.dtype}; only {', '.join(DTYPES)} are read")
        return self.data.view(DTYPES[self.dtype]).reshape(self.shape)


@dataclass(frozen=True)
class NewTensor:
    """A tensor to write. `make` is called once, when its turn comes; it returns the tensor's bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    make: Callable[[], np.ndarray]


def open_tensors(directory: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model directory, none of them read yet, in the order of the files.

    Raises WeightsError where there is no checkpoint, a file is absent or not complete, or the index is not JSON or does
    not say what its files hold.
    """
    index_path, single = directory / INDEX_NAME, directory / SINGLE_NAME
    weight_map = _read_index(index_path) if index_path.exists() else None
    if weight_map is None:
        if not single.exists():
            raise WeightsError(
                f"{directory}: neither {SINGLE_NAME} nor {INDEX_NAME}; point to a directory with weights"
            )
        return {tensor.name: tensor for tensor in _open_file(single)}
    names = sorted(set(weight_map.values()))
    if single.exists() and SINGLE_NAME not in names:
        raise WeightsError(f"{single}: beside {INDEX_NAME} that does not name it; remove the one that is out of date")
    tensors = [tensor for name in names for tensor in _open_file(directory / name)]
    wrong = set(weight_map.items()) ^ {(tensor.name, tensor.path.name) for tensor in tensors}
    if wrong:
        raise WeightsError(f"{index_path}: does not list what its files hold: {some({name for name, _ in wrong})}")
    return {tensor.name: tensor for tensor in tensors}


def has_weights(directory: Path) -> bool:
    return (directory / INDEX_NAME).exists() or (directory / SINGLE_NAME).exists()


def write_tensors(directory: Path | None, tensors: Sequence[NewTensor], max_file_bytes: int) -> None:
    """Writes one file, or several with an index, holding one tensor in memory at a time.

    Without a directory the tensors are made in the same order and dropped: what a process does that does not write, but
    without which the others cannot gather.
    """
    shards = _shards(tensors, max_file_bytes)
    if directory is None:
        for tensor in itertools.chain(*shards):
            tensor.make()
        return
    weight_map = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE_NAME if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write_file(directory / name, shard)
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = sum(tensor.nbytes for tensor in tensors)
        write_json(directory / INDEX_NAME, {"metadata": {"total_size": total}, "weight_map": weight_map})


def copy_companions(source: Path, directory: Path) -> None:
    """Copies config, tokenizer, chat templates, preprocessor configs and licence: all but the weights."""
    for pattern in _COMPANIONS:
        for path in source.glob(pattern):
            if not path.name.endswith(".index.json"):
                copy = directory / path.relative_to(source)
                copy.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, copy)


@contextlib.contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """Yields a directory to fill, which becomes `directory` in one move when the block ends.

    Raises WeightsError where `directory` holds files already: no single move could replace them.
    """
    directory = directory.absolute()
    if directory.exists() and any(directory.iterdir()):
        raise WeightsError(f"{directory}: not empty; write to a new directory")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        os.replace(partial, directory)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def some(names: Collection[str], limit: int = 8) -> str:
    """The first few names, for a message."""
    shown, rest = sorted(names)[:limit], len(names) - limit
    return ", ".join(shown) + (f" and {rest} more" if rest > 0 else "")


def _read_index(path: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if not (weight_map and all(Path(file).name == file for file in weight_map.values())):
            raise ValueError("weight_map does not map tensors to files of this directory")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path}: not an index of safetensors files ({error!r}); get the file again") from error
    return weight_map


def _open_file(path: Path) -> list[StoredTensor]:
    if not path.exists():
        raise WeightsError(f"{path}: named in {INDEX_NAME} but absent; download it")
    try:
        # The library checks that the header is sound and that the file holds all that it promises.
        with safe_open(path, framework="numpy"):
            pass
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: not a complete safetensors file ({error}); get the file again") from error
    with path.open("rb") as file:
        content = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    size = 8 + int.from_bytes(content[:8].tobytes(), "little")
    header = json.loads(content[8:size].tobytes())
    header.pop("__metadata__", None)
    tensors = []
    for name, entry in header.items():
        start, stop = entry["data_offsets"]
        data = content[size + start : size + stop]
        tensors.append(StoredTensor(name, path, entry["dtype"], tuple(entry["shape"]), data))
    return tensors


def _shards(tensors: Sequence[NewTensor], max_file_bytes: int) -> list[list[NewTensor]]:
    shards: list[list[NewTensor]] = [[]]
    size = 0
    for tensor in tensors:
        if shards[-1] and size + tensor.nbytes > max_file_bytes:
            shards.append([])
            size = 0
        shards[-1].append(tensor)
        size += tensor.nbytes
    # Readers want every tensor aligned to its elements, so in each file the widest elements come first.
    return [sorted(shard, key=lambda tensor: -tensor.nbytes / max(1, np.prod(tensor.shape))) for shard in shards]


def _write_file(path: Path, tensors: Sequence[NewTensor]) -> None:
    header: dict[str, dict] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        start, end = end, end + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": (start, end)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            file.write(tensor.make())
        file.flush()
        os.fsync(file.fileno())
