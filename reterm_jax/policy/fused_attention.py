"""Attention in one fused kernel, where the backend has one: JAX's own Pallas kernels for TPU (splash) and GPU.

Both know documents by segment ids and skip what is later than the query; neither knows trunks, so rows with forks go
through `blockwise_attention`, which every backend runs. Of other libraries, tokamax 0.0.12 offers more GPU kernels, but
no segment ids in its public call: a packed row would need a [T,T] mask.

Dimension letters are those of `attention.py`, with H = G R.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from reterm_jax.policy.blockwise import blockwise_attention
from reterm_jax.policy.config import BLOCKWISE, ConfigError, QwenConfig
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.sharding import BATCH_AXES, mesh_in_use

SPLASH, PALLAS_GPU = "splash", "pallas_gpu"
KERNEL_OF_BACKEND = {"tpu": SPLASH, "gpu": PALLAS_GPU}
_TILE = 128  # tokens; rows must be a multiple of it
_LARGEST_BLOCK = {SPLASH: 512, PALLAS_GPU: 128}
_TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2}  # of the largest entry; accelerators round float32 products


def choose_attention(wanted: str, config: QwenConfig) -> tuple[str, str]:
    """The form of attention for this process's backend, and why: (a value of `QwenConfig.attention`, the reason).

    A kernel is taken only if it runs here, forward and backward, on a small row with the heads of `config`, and gives
    the values of `blockwise_attention`.

    Args:
      wanted: "auto", or the name of a form.

    Raises:
      ConfigError: where a kernel is asked for by name and cannot be used.
    """
    backend = jax.default_backend()
    if wanted == BLOCKWISE:
        return BLOCKWISE, "as the config asks"
    kernel = KERNEL_OF_BACKEND.get(backend) if wanted == "auto" else wanted
    if kernel is None:
        return BLOCKWISE, f"there is no fused kernel for packed rows on {backend}"
    fault = _fault(kernel, backend, config)
    if fault is None:
        return kernel, f"it runs on {backend} and agrees with the blockwise form; rows with forks stay blockwise"
    if wanted != "auto":
        raise ConfigError(f"model.attention = {wanted!r}: {fault}; use 'auto' or {BLOCKWISE!r}")
    return BLOCKWISE, f"{kernel} was tried and {fault}"


def takes(kernel: str, documents: Documents) -> bool:
    """Whether this kernel can run these rows."""
    return kernel != BLOCKWISE and documents.trunk_BT is None and documents.index_BT.shape[1] % _TILE == 0


def fused_attention(
    q_BGRTK: jax.Array,
    k_BGTK: jax.Array,
    v_BGTK: jax.Array,
    documents: Documents,
    *,
    kernel: str,
    interpret: bool = False,
) -> jax.Array:
    """What `blockwise_attention` computes, by `kernel`, for rows that it `takes`.

    Where a mesh is in use, each device runs the kernel on its rows and heads.

    Args:
      interpret: run the kernel's program on any backend, slowly (for tests).
    """
    run = {SPLASH: _splash, PALLAS_GPU: _pallas_gpu}[kernel]

    def local(q, k, v, index_BT):
        T = index_BT.shape[1]
        block = next(b for b in (512, 256, _TILE) if b <= _LARGEST_BLOCK[kernel] and T % b == 0)
        return run(q * q.shape[-1] ** -0.5, k, v, index_BT, block, interpret)

    mesh = mesh_in_use(q_BGRTK.shape[0])
    if mesh is not None:
        heads = "tensor" if q_BGRTK.shape[1] % mesh.shape["tensor"] == 0 else None
        by_head = PartitionSpec(BATCH_AXES, heads)
        specs = (by_head, by_head, by_head, PartitionSpec(BATCH_AXES))
        local = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=by_head, check_vma=False)
    return local(q_BGRTK, k_BGTK, v_BGTK, documents.index_BT)


def _splash(q_BGRTK, k_BGTK, v_BGTK, index_BT, block, interpret):
    from jax.experimental.pallas.ops.tpu import splash_attention as splash

    B, G, R, T, K = q_BGRTK.shape
    # Two kernels for the gradient: the one for both at once holds a dq for every block of keys, memory square in T.
    sizes = splash.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )
    mask = splash.MultiHeadMask([splash.CausalMask((T, T))] * (G * R))
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes, interpret=interpret)
    q_BHTK = q_BGRTK.reshape(B, G * R, T, K)
    out_BHTK = jax.vmap(kernel)(q_BHTK, k_BGTK, v_BGTK, splash.SegmentIds(index_BT, index_BT))
    return out_BHTK.reshape(q_BGRTK.shape)


def _pallas_gpu(q_BGRTK, k_BGTK, v_BGTK, index_BT, block, interpret):
    from jax.experimental.pallas.ops.gpu import attention as gpu

    B, G, R, T, K = q_BGRTK.shape
    sizes = gpu.BlockSizes(
        block_q=block,
        block_k=block // 2,
        block_q_dkv=block // 4,
        block_kv_dkv=block // 4,
        block_q_dq=block // 4,
        block_kv_dq=block // 2,
    )
    q_BTHK = q_BGRTK.reshape(B, G * R, T, K).swapaxes(1, 2)
    k_BTHK, v_BTHK = (jnp.repeat(x, R, axis=1).swapaxes(1, 2) for x in (k_BGTK, v_BGTK))
    out_BTHK = gpu.mha(q_BTHK, k_BTHK, v_BTHK, index_BT, causal=True, block_sizes=sizes, interpret=interpret)
    return out_BTHK.swapaxes(1, 2).reshape(q_BGRTK.shape)


def _fault(kernel: str, backend: str, config: QwenConfig) -> str | None:
    """Why the kernel cannot be used here, or None."""
    if KERNEL_OF_BACKEND.get(backend) != kernel:
        return f"does not run on {backend}"
    T, G, K = 2 * _TILE, config.num_key_value_heads, config.head_dim
    R = config.num_attention_heads // G
    keys = jax.random.split(jax.random.key(0), 4)
    shapes = (1, G, R, T, K), (1, G, T, K), (1, G, T, K), (1, G, R, T, K)
    q, k, v, direction = (
        jax.random.normal(key, s).astype(config.compute_dtype) for key, s in zip(keys, shapes, strict=True)
    )
    index_BT = (jnp.arange(T) >= T // 3).astype(jnp.int32)[None]
    documents = Documents(index_BT, jnp.zeros_like(index_BT))

    def value_and_gradients(attention):
        out, pull = jax.vjp(lambda *qkv: attention(*qkv, documents), q, k, v)
        return out, *pull(direction)

    expected = jax.jit(lambda: value_and_gradients(lambda *a: blockwise_attention(*a, block=_TILE)))()
    try:
        got = jax.jit(lambda: value_and_gradients(lambda *a: fused_attention(*a, kernel=kernel)))()
        pairs = [(jnp.float32(a), jnp.float32(b)) for a, b in zip(got, expected, strict=True)]
        error = max(float(jnp.max(jnp.abs(a - b)) / jnp.max(jnp.abs(b))) for a, b in pairs)
    except Exception as e:  # compilers raise what they like; the reason is reported
        return f"failed ({type(e).__name__}: {str(e).splitlines()[0] if str(e) else ''})"
    if not error <= _TOLERANCE[config.compute_dtype]:
        return f"gave other values than the blockwise form (largest error {error:.2g} of the largest entry)"
    return None
