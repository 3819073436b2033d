"""A published directory: what the trainer leaves for a sampler, and how it is read. Neither JAX nor torch.

    DIR/config.json, tokenizer files     as in a Hugging Face directory
    DIR/manifest.json                    written last; see `Manifest`
    DIR/weights/                         an Orbax checkpoint whose leaves are the tensors of a Hugging Face checkpoint,
                                         by name and in shape, in bfloat16

Leaves are named and shaped as serving stacks want them, so that a reader needs no knowledge of the policy's own layout
and moves each tensor once.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tensorstore as ts

MANIFEST_NAME = "manifest.json"
WEIGHTS_NAME = "weights"
FORMAT = 1

# Bytes of weights that are read ahead of the tensor in use.
_READ_AHEAD = 256 * 2**20


class PublishedError(ValueError):
    """A directory that cannot be served. The message names it, the file or tensor, and the remedy."""


@dataclasses.dataclass(frozen=True)
class Probe:
    """Token ids and what the trainer's own forward pass makes of them: the check that a sampler has these weights.

    Attributes:
      ids: token ids.
      logprobs: natural log-probabilities at temperature 1 of `ids[1:]`, each given all ids before it.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.ids) < 2 or len(self.logprobs) != len(self.ids) - 1:
            raise PublishedError(f"a probe of {len(self.ids)} ids needs one logprob less, not {len(self.logprobs)}")


@dataclasses.dataclass(frozen=True)
class Manifest:
    """What a published directory holds.

    Attributes:
      version: training step of the weights.
      tensors: name to (shape, dtype name), in the order in which a sampler should load them.
      probe: see `Probe`.
    """

    version: int
    tensors: dict[str, tuple[tuple[int, ...], str]]
    probe: Probe

    @property
    def nbytes(self) -> int:
        return sum(_nbytes(shape, dtype) for shape, dtype in self.tensors.values())

    def to_json(self) -> str:
        tensors = {name: {"shape": list(shape), "dtype": dtype} for name, (shape, dtype) in self.tensors.items()}
        record = {
            "format": FORMAT,
            "version": self.version,
            "tensors": tensors,
            "probe": dataclasses.asdict(self.probe),
        }
        return json.dumps(record, indent=1) + "\n"


def read_manifest(directory: str | Path) -> Manifest:
    """Raises PublishedError where the directory is not a finished publication of a known format."""
    path = Path(directory) / MANIFEST_NAME
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise PublishedError(f"{path}: no such file; give a directory that the trainer published") from None
    except OSError as error:
        raise PublishedError(f"{path}: cannot be read ({error.strerror}); see its owner and mode") from None
    except ValueError as error:
        raise PublishedError(f"{path}: not JSON ({error}); publish again") from None
    try:
        if record["format"] != FORMAT:
            raise PublishedError(f"{path}: format {record['format']}, but this package reads {FORMAT}; use its version")
        tensors = {name: (tuple(entry["shape"]), entry["dtype"]) for name, entry in record["tensors"].items()}
        probe = Probe(tuple(record["probe"]["ids"]), tuple(record["probe"]["logprobs"]))
        return Manifest(int(record["version"]), tensors, probe)
    except (KeyError, TypeError, AttributeError) as error:
        raise PublishedError(f"{path}: field {error} is missing or of another type; publish again") from None


def read_tensors(directory: str | Path) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors in the manifest's order, read one after another with a bounded read-ahead.

    All of them are opened, and their shapes and dtypes compared with the manifest, before the first one is given: what
    is missing is found before a sampler has overwritten anything.

    Raises PublishedError.
    """
    manifest = read_manifest(directory)
    opened = _open(Path(directory) / WEIGHTS_NAME, manifest)
    waiting: list[tuple[str, Any, int]] = []
    ahead = 0

    def finish() -> tuple[str, np.ndarray]:
        name, future, _ = waiting.pop(0)
        try:
            return name, future.result()
        except (ValueError, OSError) as error:
            raise PublishedError(f"{directory}: tensor {name} cannot be read ({error}); publish again") from error

    for name, (shape, dtype) in manifest.tensors.items():
        size = _nbytes(shape, dtype)
        while waiting and ahead + size > _READ_AHEAD:
            ahead -= waiting[0][2]
            yield finish()
        # Out of the dict, so that a tensor's memory is free as soon as its reader has dropped it.
        waiting.append((name, opened.pop(name).read(), size))
        ahead += size
    while waiting:
        yield finish()


def _open(weights: Path, manifest: Manifest) -> dict[str, ts.TensorStore]:
    # Without a cache pool nothing that was read stays in memory.
    context = ts.Context({"cache_pool": {"total_bytes_limit": 0}})
    futures = {
        name: ts.open(
            {
                "driver": "zarr",
                "kvstore": {"driver": "ocdbt", "base": f"file://{weights.absolute()}/", "path": f"{name}/"},
            },
            open=True,
            read=True,
            context=context,
        )
        for name in manifest.tensors
    }
    opened = {}
    for name, future in futures.items():
        try:
            array = future.result()
        except (ValueError, OSError) as error:
            raise PublishedError(
                f"{weights}: tensor {name} of the manifest is missing ({error}); publish again"
            ) from None
        shape, dtype = manifest.tensors[name]
        if tuple(array.shape) != shape or array.dtype.name != dtype:
            raise PublishedError(
                f"{weights}: tensor {name} is {array.dtype.name}{list(array.shape)}, the manifest says "
                f"{dtype}{list(shape)}; publish again"
            )
        opened[name] = array
    return opened


def _nbytes(shape: tuple[int, ...], dtype: str) -> int:
    itemsize = np.dtype(ml_dtypes.bfloat16).itemsize if dtype == "bfloat16" else np.dtype(dtype).itemsize
    return int(np.prod(shape, dtype=np.int64)) * itemsize
