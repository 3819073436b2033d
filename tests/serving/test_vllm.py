"""The whole bridge with a real vLLM: publish, serve, sample, update in place, refuse stale weights.

The model is tiny, random and of the kind that a plain reload gets wrong: on most CPUs vLLM multiplies with a packed
copy of a tied LM head. The environment is made by `third_party/vllm/install.sh`; RETERM_VLLM names another place.
"""

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
import urllib.request
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import AutoTokenizer

from reterm_jax.checkpoint.publish import Publisher
from reterm_jax.losses.token_logprobs import token_logprobs
from reterm_jax.policy import forward
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.spec import init_params
from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.rollout.samplers.vllm import VllmSampler
from reterm_jax.serving.published import read_tensors
from reterm_jax.tokens import tiny_tokenizer

REPO = Path(__file__).parents[2]
ENVIRONMENT = Path(os.environ.get("RETERM_VLLM", REPO / ".venv-vllm-cpu"))
HINT = f"vLLM: no environment at {ENVIRONMENT}; run: bash third_party/vllm/install.sh cpu"
needs_vllm = pytest.mark.skipif(not (ENVIRONMENT / "bin" / "python").exists(), reason=HINT)
START_SECONDS = 400

# vLLM's CPU kernels want DeltaNet heads of 128.
SIZES = {
    "model_type": "qwen3_5_text",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": True,
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    """Two versions of a policy, published: (publisher, config, {version: rounded parameters}, stop id)."""
    source = tiny_tokenizer.build(["the build fails"], tmp_path_factory.mktemp("tokenizer"))
    tokenizer = AutoTokenizer.from_pretrained(source)
    stop = tokenizer.convert_tokens_to_ids("<|im_end|>")
    sizes = {**SIZES, "vocab_size": len(tokenizer), "eos_token_id": stop}
    config = QwenConfig.from_hf(sizes, initializer_range=0.08, compute_dtype="float32", remat="none")
    ids = np.random.default_rng(0).integers(0, 250, 48).tolist()
    publisher = Publisher(tmp_path_factory.mktemp("published"), config, source, ids)
    rounded = {}
    for version in (1, 2):
        params = jax.jit(init_params, static_argnums=0)(config, jax.random.key(version))
        publisher.publish(version, params)
        rounded[version] = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), params)
    publisher.close()
    return publisher, config, rounded, stop


@pytest.fixture(scope="module")
def server(policy, tmp_path_factory):
    """The url of a vLLM that serves version 1."""
    publisher, *_ = policy
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = tmp_path_factory.mktemp("vllm") / "log"
    command = [ENVIRONMENT / "bin" / "python", "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", publisher.path(1), "--load-format", "orbax", "--max-model-len", "512", "--enforce-eager"]
    command += ["--worker-extension-cls", "reterm_jax.serving.worker.OrbaxWorker", "--enable-scale-out"]
    command += ["--logprobs-mode", "processed_logprobs", "--host", "127.0.0.1", "--port", str(port)]
    env = {**os.environ, "VLLM_SERVER_DEV_MODE": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    # The plugin under test is this working tree's, whichever one the environment was made from.
    env |= {"PYTHONPATH": str(REPO), "VLLM_NO_USAGE_STATS": "1"}
    with log.open("w") as file:
        process = subprocess.Popen(list(map(str, command)), env=env, stdout=file, stderr=file, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_SECONDS
        while True:
            try:
                with urllib.request.urlopen(f"{url}/health", timeout=5):
                    break
            except OSError:
                ended = process.poll() is not None
                if ended or time.monotonic() > deadline:
                    pytest.fail(f"vLLM {'ended' if ended else 'did not start'}:\n{log.read_text()[-4000:]}")
                time.sleep(1)
        yield url
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def trained(policy, version, ids, sampled, temperature):
    """Logprobs of the sampled ids by the trainer's forward pass."""
    _, config, rounded, _ = policy
    tokens_BT = jnp.asarray([[*ids, *sampled]])
    inputs_BT = tokens_BT[:, :-1]
    hidden_BTD = forward.hidden_states(
        rounded[version], config, inputs_BT, jnp.ones_like(inputs_BT), jnp.arange(inputs_BT.shape[1])[None]
    )
    head_VD = forward.head(rounded[version], config)
    return np.asarray(token_logprobs(hidden_BTD, head_VD, tokens_BT[:, 1:], temperature=temperature)[0])[
        0, len(ids) - 1 :
    ]


@needs_vllm
def test_publish_serve_sample_update_and_refuse_stale_weights(policy, server):
    publisher, _, _, stop = policy

    async def sample(sampler, version):
        differences = []
        for session, temperature in (("a", 1.0), ("b", 0.7)):
            ids = np.random.default_rng(version).integers(0, 250, 40).tolist()
            for _ in range(2):
                done = await sampler.generate(
                    ids, max_tokens=40, temperature=temperature, seed=version, session=session
                )
                assert done.version == version
                expected = trained(policy, version, ids, done.ids, temperature)
                differences.extend(np.abs(expected - done.logprobs))
                ids = [*ids, *done.ids, 5, 6, 7]
        # bfloat16's noise; a turn can be as short as one token.
        assert np.mean(differences) < 0.03 and np.max(differences) < 0.15, version

    async def test():
        async with VllmSampler([server], stop_id=stop, on_failure="stop", retry_after=1000.0) as sampler:
            await sampler.update(publisher.path(1))
            await sample(sampler, 1)

            longest = sampler.generate([1, 2, 3], max_tokens=450, temperature=1.0, seed=0, session="c")
            running = asyncio.ensure_future(longest)
            await asyncio.sleep(0.3)
            await sampler.update(publisher.path(2))
            await sample(sampler, 2)
            assert (await running).version in (1, 2)
            with pytest.raises(SamplerError, match="512 prompt tokens do not fit 512"):
                await sampler.generate([1] * 512, max_tokens=4, temperature=1.0, seed=0, session="d")

            # Weights that are stale though the server answers 200: it keeps those that it has.
            vllm = sampler._replicas[0].server
            ours, stale = vllm.load, "does not serve version 1: its logprobs .* stale or partly loaded"
            vllm.load = lambda directory: ours(str(publisher.path(2)))
            with pytest.raises(SamplerError, match=stale):
                await sampler.update(publisher.path(1))

            # So does vLLM's own reload, where its CPU kernels pack the tied head; with AVX2 alone they do not.
            async def plain_reload(directory):
                body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
                await vllm._call("POST", "/collective_rpc", json=body, seconds=60)

            vllm.load = plain_reload
            try:
                await sampler.update(publisher.path(1))
                await sample(sampler, 1)
            except SamplerError as error:
                assert re.search(stale, str(error))
            vllm.load = ours
            await sampler.update(publisher.path(1))
            await sample(sampler, 1)

    asyncio.run(test())


@needs_vllm
def test_the_plugin_needs_neither_jax_nor_the_trainer(policy):
    publisher, *_ = policy
    script = (
        "import sys; from reterm_jax.serving import plugin, published, worker; plugin.register(); plugin.register();"
        "from vllm.config.load import LoadConfig; from vllm.model_executor.model_loader import get_model_loader;"
        "print(type(get_model_loader(LoadConfig(load_format='orbax'))).__name__);"
        f"print(sum(t.nbytes for _, t in plugin.torch_tensors({str(publisher.path(1))!r})));"
        "print([m for m in sys.modules if m.split('.')[0] in ('jax', 'flax', 'orbax')],"
        " [m for m in sys.modules if m.startswith('reterm_jax.') and not m.startswith('reterm_jax.serving')])"
    )
    command = [ENVIRONMENT / "bin" / "python", "-c", script]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(REPO)}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    size = sum(value.nbytes for _, value in read_tensors(publisher.path(1)))
    assert done.stdout.splitlines()[-3:] == ["OrbaxModelLoader", str(size), "[] []"]
