"""Two processes with two devices each, on one model directory: what each reads, and what they write together."""

from __future__ import annotations

from tiny_models import init, tiny_config

from reterm_jax.policy import hf

SCRIPT = """
import sys
from pathlib import Path
import jax, numpy as np
jax.config.update("jax_disable_most_optimizations", True)
rank, port, root = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
jax.distributed.initialize(f"localhost:{port}", 2, rank)
from reterm_jax.policy import hf
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.hf_files import StoredTensor
from reterm_jax.policy.sharding import DEFAULT_RULES, make_mesh, param_shardings
from reterm_jax.policy.spec import ArraySpec, param_specs

class Counted(np.ndarray):
    bytes_read = 0
    def copy(self, order="C"):
        Counted.bytes_read += self.nbytes
        return np.asarray(self).copy(order)

view = StoredTensor.view
StoredTensor.view = lambda tensor: view(tensor).view(Counted)

source = root / "source"
config = QwenConfig.from_hf(source)
whole = jax.tree.map(np.asarray, hf.load_params(source, config))
specs = jax.tree.leaves(param_specs(config), is_leaf=lambda x: isinstance(x, ArraySpec))
by_layers = {**DEFAULT_RULES, "embed": None, "layers": "fsdp"}
for axes, rules, halved in (
    ((4, 1, 1), DEFAULT_RULES, None),    # everything, but once for both devices
    ((1, 2, 2), by_layers, "layers"),    # half of the layers, and all of the rest
    ((1, 2, 2), DEFAULT_RULES, "embed"), # the processes lie along fsdp: each needs half of what has that axis
):
    Counted.bytes_read = 0
    params = hf.load_params(source, config, shardings=param_shardings(config, make_mesh(*axes), rules))
    expected = sum(2 * int(np.prod(spec.shape)) // (2 if halved in spec.logical_axes else 1) for spec in specs)
    assert Counted.bytes_read == expected, (halved, Counted.bytes_read, expected)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(whole)):
        assert all(np.array_equal(shard.data, want[shard.index]) for shard in got.addressable_shards)
hf.save_params(root / "saved", params, config, source=source)
assert (root / "saved" / "config.json").exists()
print("done")
"""


def test_each_process_reads_its_part_and_one_writes(key, tmp_path, on_two_processes):
    config = tiny_config("qwen3_5", vocab_size=96)
    hf.save_params(tmp_path / "source", init(config, key), config)
    on_two_processes(SCRIPT, tmp_path)
    saved = (tmp_path / "saved" / hf.SINGLE_NAME).read_bytes()
    assert saved == (tmp_path / "source" / hf.SINGLE_NAME).read_bytes()
