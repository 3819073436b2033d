"""Parameters sharded over eight simulated devices are published as those on one are."""

import subprocess
import sys

CHECK = """
import sys
from pathlib import Path

import jax
import numpy as np

from reterm_jax.checkpoint.publish import Publisher
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import make_mesh, param_shardings
from reterm_jax.policy.spec import init_params
from reterm_jax.serving.published import read_manifest, read_tensors

sizes = dict(
    model_type="qwen3_5_text", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, tie_word_embeddings=False,
    layer_types=["linear_attention", "full_attention"] * 2, linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=8, linear_value_head_dim=12, linear_conv_kernel_dim=4,
)
config = QwenConfig.from_hf(sizes, initializer_range=0.2, compute_dtype="float32", remat="none", chunk_size=16)
params = jax.tree.map(np.asarray, jax.jit(init_params, static_argnums=0)(config, jax.random.key(0)))
workspace = Path(sys.argv[1])
(workspace / "source").mkdir()
read = []
for number, mesh in enumerate((make_mesh(devices=jax.devices()[:1]), make_mesh(data=2, fsdp=2, tensor=2))):
    publisher = Publisher(workspace / str(number), config, workspace / "source", range(1, 20))
    publisher.publish(1, jax.device_put(params, param_shardings(config, mesh)))
    publisher.close()
    read.append((read_manifest(publisher.path(1)), dict(read_tensors(publisher.path(1)))))
(one, one_tensors), (many, many_tensors) = read
assert one.tensors == many.tensors and list(one_tensors) == list(many_tensors)
for name, value in one_tensors.items():
    np.testing.assert_array_equal(value, many_tensors[name], err_msg=name)
np.testing.assert_allclose(one.probe.logprobs, many.probe.logprobs, atol=1e-4)
print("same", len(one_tensors))
"""


def test_sharded_parameters_give_the_same_publication(tmp_path, simulated):
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(tmp_path)], env=simulated(8), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1].startswith("same")
