"""Publishing weights and reading them back: seconds per GB against a plain copy of the same bytes, and host memory.

    python benchmarks/bridge.py --layers=12

`publish` is the whole of it, from sharded float32 parameters to the finished directory; of that, `blocked` is what the
trainer waits for. A plain write puts the same bytes into one file, with fsync. `read` takes the tensors of the
directory one after another, as the vLLM plugin does, and copies each to where weights would lie; a plain read does that
with the file. All files are in the page cache. The first publication, untimed, compiles.

Memory is the peak above what was there before. On CPU the devices' bfloat16 copy lies in the host's memory, and is not
counted. The value is the larger peak, in GB above the largest tensor. Bar: at most 1.5.
"""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from absl import app, flags, logging
from reporting import finish

from reterm_jax.checkpoint.publish import Publisher
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import init_params
from reterm_jax.serving.published import read_manifest, read_tensors

_LAYERS = flags.DEFINE_integer("layers", 12, "Of the model: about 35 MB each in bfloat16, beside 134 MB.")
_FSDP = flags.DEFINE_integer("fsdp", 1, "Devices that the parameters are sharded over.")
_REPEATS = flags.DEFINE_integer("repeats", 3, "Timed runs of each; the median counts.")
_DIRECTORY = flags.DEFINE_string("directory", None, "Where to write; a temporary directory if not given.")

_PIECE = 64 * 2**20

SIZES = {
    "model_type": "qwen3_5_text",
    "vocab_size": 32_768,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "tie_word_embeddings": False,
}


def main(argv: list[str]) -> None:
    del argv
    logging.set_verbosity(logging.WARNING)
    config = QwenConfig.from_hf({**SIZES, "num_hidden_layers": _LAYERS.value})
    mesh = make_mesh(fsdp=_FSDP.value)
    with jax.set_mesh(mesh):
        init = jax.jit(init_params, static_argnums=0, out_shardings=param_shardings(config, mesh))
        params = jax.block_until_ready(init(config, jax.random.key(0)))
    workspace = Path(tempfile.mkdtemp(prefix="bridge_", dir=_DIRECTORY.value))
    try:
        _measure(config, params, workspace)
    finally:
        shutil.rmtree(workspace)


def _measure(config: QwenConfig, params: dict, workspace: Path) -> None:
    source = workspace / "source"
    source.mkdir()
    publisher = Publisher(workspace / "published", config, source, tuple(range(32)), keep=1)
    publisher.publish(0, params)
    publisher.wait()
    manifest = read_manifest(publisher.path(0))
    gb = manifest.nbytes / 1e9
    tensors = [int(np.prod(shape)) * 2 for shape, _ in manifest.tensors.values()]
    place = np.empty(max(tensors), np.uint8)
    plain = workspace / "plain"

    seconds: dict[str, list[float]] = {name: [] for name in ("publish", "blocked", "plain write", "read", "plain read")}
    peaks: dict[str, list[float]] = {"publish": [], "read": []}
    for version in range(1, _REPEATS.value + 1):
        start = time.perf_counter()

        def publish(version: int = version, start: float = start) -> None:
            publisher.publish(version, params)
            seconds["blocked"].append(time.perf_counter() - start)
            publisher.wait()

        peaks["publish"].append(_peak_bytes(publish) / 1e9 - gb * (jax.default_backend() == "cpu"))
        seconds["publish"].append(time.perf_counter() - start)
        directory = publisher.path(version)
        seconds["plain write"].append(_timed(lambda: _write(plain, tensors, place)))
        start = time.perf_counter()
        peaks["read"].append(_peak_bytes(lambda: _read_published(directory, place)) / 1e9)  # noqa: B023
        seconds["read"].append(time.perf_counter() - start)
        seconds["plain read"].append(_timed(lambda: _read_plain(plain, tensors, place)))
    publisher.close()

    largest = max(tensors) / 1e9
    print(f"{gb:.2f} GB in {len(tensors)} tensors, the largest {largest:.3f} GB, over {_FSDP.value} device(s)")
    print(f"{'':12} {'s per GB':>9} {'against plain':>14} {'peak GB':>9}")
    median = {name: statistics.median(values) for name, values in seconds.items()}
    for name, over in (("publish", "plain write"), ("blocked", None), ("plain write", None), ("read", "plain read"),
                       ("plain read", None)):  # fmt: skip
        against = f"{median[name] / median[over]:.1f}x" if over else ""
        peak = f"{max(peaks[name]):.2f}" if name in peaks else ""
        print(f"{name:12} {median[name] / gb:9.2f} {against:>14} {peak:>9}")
    above = max(max(values) for values in peaks.values()) - largest
    finish("bridge_host_memory_above_largest_tensor", above, "GB", 1.5, at_least=False)


def _timed(call: Callable[[], None]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _peak_bytes(call: Callable[[], None]) -> int:
    """Peak of this process's resident memory during the call, above that before it."""
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    call()
    return max(0, _resident("VmHWM") - before)


def _resident(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{field}:"))


def _write(path: Path, sizes: list[int], source: np.ndarray) -> None:
    with path.open("wb") as file:
        for size in sizes:
            for start in range(0, size, _PIECE):
                file.write(source[start : min(size, start + _PIECE)])
        file.flush()
        os.fsync(file.fileno())


def _read_plain(path: Path, sizes: list[int], place: np.ndarray) -> None:
    with path.open("rb") as file:
        for size in sizes:
            file.readinto(place[:size])


def _read_published(directory: Path, place: np.ndarray) -> None:
    for _, value in read_tensors(directory):
        place[: value.nbytes] = value.reshape(-1).view(np.uint8)


if __name__ == "__main__":
    app.run(main)
