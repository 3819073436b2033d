"""The policy's forward pass over packed rows, from token ids to final hidden states."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive

from reterm_jax.policy.attention import self_attention
from reterm_jax.policy.config import LINEAR, QwenConfig
from reterm_jax.policy.delta_net import delta_net, initial_state
from reterm_jax.policy.documents import Documents
from reterm_jax.policy.layers import MIXED, mlp, rms_norm
from reterm_jax.policy.sharding import constrain_batch, constrain_residual, gather_vocab
from reterm_jax.policy.spec import Params

_INPUT = "layer_input"


def hidden_states(
    params: Params,
    config: QwenConfig,
    tokens_BT: jax.Array,
    segments_BT: jax.Array,
    positions_BT: jax.Array,
    trunks_BT: jax.Array | None = None,
) -> jax.Array:
    """Final-norm hidden states [B,T,D], in the compute dtype, of rows that may hold several documents.

    Args:
      tokens_BT: token ids.
      segments_BT: 0 for padding, otherwise any number that differs between neighbouring documents. A document gives
        the same values packed as alone; at padding the values mean nothing (but are finite).
      positions_BT: each token's position within its document, for the rotary embedding.
      trunks_BT: for documents that share their beginning, which is computed once: the segment that a token's segment
        continues, or its own. Segments of a row must then all differ. See `documents.Documents`.
    """
    documents = Documents.of(segments_BT, positions_BT, trunks_BT)
    table_VD, tokens_BT = gather_vocab(params["embed"], tokens_BT)
    x_BTD = constrain_residual(embed({"embed": table_VD}, config, tokens_BT))

    def layer(kind: str, x_BTD: jax.Array, p: Params) -> jax.Array:
        # Gathered here, once, and with heads or MLP columns over `tensor` from here to the next sum of partial results.
        normed_BTD = constrain_batch(layer_norm(x_BTD, p["input_norm"], config))
        if kind == LINEAR:
            mixed_BTD, _ = delta_net(p["mixer"], config, normed_BTD, documents, initial_state(config, x_BTD.shape[0]))
        else:
            mixed_BTD, _ = self_attention(p["mixer"], config, normed_BTD, documents)
        x_BTD += constrain_residual(mixed_BTD)
        normed_BTD = constrain_batch(layer_norm(x_BTD, p["post_norm"], config))
        return x_BTD + constrain_residual(mlp(p["mlp"], normed_BTD))

    def block(x_BTD: jax.Array, block_params: Params) -> tuple[jax.Array, None]:
        for kind, run in itertools.groupby(range(len(config.layer_pattern)), config.layer_pattern.__getitem__):
            run_params = [block_params[str(position)] for position in run]
            x_BTD = _apply_run(functools.partial(layer, kind), x_BTD, run_params, config)
        return x_BTD, None

    if config.remat != "none":
        # Without it the loops of `_apply_run` would keep the weights that they were given, a copy of all.
        block = jax.checkpoint(block, policy=_kept(config), prevent_cse=False)
    x_BTD, _ = jax.lax.scan(block, x_BTD, params["layers"])
    return constrain_batch(layer_norm(x_BTD, params["final_norm"], config))


def head(params: Params, config: QwenConfig) -> jax.Array:
    """The output matrix [V,D]: the embeddings where the model ties them, else its own."""
    return params["embed"] if config.tie_word_embeddings else params["lm_head"]


def embed(params: Params, config: QwenConfig, tokens: jax.Array) -> jax.Array:
    """Token embeddings [..., D] in the compute dtype."""
    return jnp.take(params["embed"], tokens, axis=0, mode="clip").astype(config.compute_dtype)


def layer_norm(x_BTD: jax.Array, weight_D: jax.Array, config: QwenConfig) -> jax.Array:
    return rms_norm(x_BTD, weight_D, eps=config.rms_norm_eps, offset=config.norm_offset)


def _apply_run(layer: Callable, x_BTD: jax.Array, run_params: list[Params], config: QwenConfig) -> jax.Array:
    """Layers of one kind, one after another, under the configured trade of memory against recomputation.

    Those that are recomputed in the backward pass run as a loop. Side by side in one program, all of them may be
    recomputed before the gradient of the last is there, and are then in memory at one time; XLA's CPU backend, which
    drops optimization barriers, does that.
    """
    if config.remat == "none":
        for p in run_params:
            x_BTD = layer(x_BTD, p)
        return x_BTD
    # Inside a scan nothing merges the recomputation with the first computation, so the barrier is only a cost.
    recomputed = jax.checkpoint(layer, policy=_kept(config), prevent_cse=False)
    stacked = jax.tree.map(lambda *xs: jnp.stack(xs), *run_params)
    return jax.lax.scan(lambda x, p: (recomputed(checkpoint_name(x, _INPUT), p), None), x_BTD, stacked)[0]


def _kept(config: QwenConfig) -> Callable:
    """What stays in memory for the backward pass: see `QwenConfig.remat`."""
    policies = jax.checkpoint_policies
    if config.remat == "full":
        return policies.save_only_these_names(_INPUT)
    named = policies.save_only_these_names(_INPUT, MIXED)
    kept = policies.save_from_both_policies(named, _is_fused_kernel)
    if config.remat == "dots":
        return policies.save_from_both_policies(kept, policies.dots_with_no_batch_dims_saveable)
    return kept


def _is_fused_kernel(primitive: Primitive, *_: object, **params: object) -> bool:
    """Whether this is an attention kernel, whose results cannot be named inside; the GPU's calls itself by its rule."""
    if primitive.name == "custom_vjp_call":
        return "pallas_call" in str(params["call_jaxpr"])
    return primitive.name == "pallas_call"
