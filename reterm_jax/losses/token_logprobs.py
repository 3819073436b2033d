"""Log-probabilities and entropies of tokens without the logits of a whole batch.

With Qwen's vocabulary the float32 logits of one 32k-token row are 33 GB. Both passes therefore run over slices of the
time axis: the forward pass keeps only one log-normaliser per token, and the backward pass computes the slice's logits
again. Where one slice holds all the tokens its logits are kept for the backward pass: that comes next, so the peak of
memory stays that of a slice, and a quarter of the products is saved. The batch axis is never sliced, so a batch that is
sharded over devices stays where it is.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

_PRECISION = lax.Precision.HIGHEST


def token_logprobs(
    hidden_BTD: jax.Array,
    head_VD: jax.Array,
    targets_BT: jax.Array,
    *,
    temperature: float = 1.0,
    chunk: int = 2048,
) -> tuple[jax.Array, jax.Array]:
    """Scores `targets_BT` under the softmax of `hidden · headᵀ / temperature`, in float32 whatever the inputs are.

    Args:
        hidden_BTD: last hidden states, any float dtype.
        head_VD: output embedding.
        targets_BT: token ids in [0, V); the target of position t is the token that follows it.
        temperature: the temperature that the sampler used.
        chunk: upper bound on the number of tokens whose logits exist at one time (at least one time step is taken).

    Returns:
        (logprobs_BT, entropy_BT), float32, entropy in nats. Both are differentiable in `hidden_BTD` and `head_VD`.

    Raises:
        ValueError: for a temperature or a chunk that is not positive, or shapes that do not fit.
    """
    if temperature <= 0:
        raise ValueError(f"temperature must be positive to score tokens, got {temperature}")
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1 token, got {chunk}")
    if hidden_BTD.shape[:2] != targets_BT.shape or hidden_BTD.shape[-1] != head_VD.shape[-1]:
        raise ValueError(
            f"hidden {hidden_BTD.shape}, targets {targets_BT.shape} and head {head_VD.shape} do not fit "
            "[B,T,D], [B,T], [V,D]"
        )
    batch, time = targets_BT.shape
    steps = min(time, max(1, chunk // batch))
    return _token_logprobs(hidden_BTD, head_VD, targets_BT, float(temperature), steps)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _token_logprobs(hidden_BTD, head_VD, targets_BT, temperature, steps):
    return _forward(hidden_BTD, head_VD, targets_BT, temperature, steps)[0]


def _forward(hidden_BTD, head_VD, targets_BT, temperature, steps):
    head32_VD = head_VD.astype(jnp.float32)
    time = targets_BT.shape[1]
    keep = steps == time

    def score(carry, inputs):
        hidden_ND, targets_N = map(_tokens, inputs)
        logits_NV = _logits(hidden_ND, head32_VD, temperature)
        norm_N = jax.nn.logsumexp(logits_NV, axis=-1)
        # Where the vocabulary is sharded, each device looks in its part, and [N] numbers are summed.
        chosen_N = jnp.take_along_axis(logits_NV, targets_N[:, None], axis=-1, mode="clip")[:, 0]
        mean_N = jnp.sum(jnp.exp(logits_NV - norm_N[:, None]) * logits_NV, axis=-1)
        scores = tuple(x_N.reshape(inputs[1].shape) for x_N in (chosen_N - norm_N, norm_N - mean_N, norm_N))
        return carry, (scores, logits_NV if keep else None)

    _, (scores, logits) = lax.scan(score, None, (_split(hidden_BTD, steps), _split(targets_BT, steps)))
    logprobs_BT, entropy_BT, norm_BT = (_join(x, time) for x in scores)
    return (logprobs_BT, entropy_BT), (hidden_BTD, head_VD, targets_BT, norm_BT, entropy_BT, logits)


def _backward(temperature, steps, residuals, cotangents):
    hidden_BTD, head_VD, targets_BT, norm_BT, entropy_BT, logits = residuals
    head32_VD = head_VD.astype(jnp.float32)
    by_token = tuple(_split(x, steps) for x in (hidden_BTD, targets_BT, norm_BT, entropy_BT, *cotangents))

    def differentiate(head_grad_VD, slice_):
        inputs, logits_NV = slice_
        hidden_ND, targets_N, norm_N, entropy_N, dlogprob_N, dentropy_N = map(_tokens, inputs)
        if logits_NV is None:
            logits_NV = _logits(hidden_ND, head32_VD, temperature)
        logp_NV = logits_NV - norm_N[:, None]
        # d logprob / d logit = onehot - p ; d entropy / d logit = -p (log p + entropy)
        chosen_NV = jnp.where(_is_target(logp_NV, targets_N), dlogprob_N[:, None], 0.0)
        slope_NV = dlogprob_N[:, None] + dentropy_N[:, None] * (logp_NV + entropy_N[:, None])
        dlogits_NV = (chosen_NV - jnp.exp(logp_NV) * slope_NV) / temperature
        dhidden_ND = jnp.einsum("nv,vd->nd", dlogits_NV, head32_VD, precision=_PRECISION)
        head_grad_VD += jnp.einsum("nv,nd->vd", dlogits_NV, hidden_ND.astype(jnp.float32), precision=_PRECISION)
        return head_grad_VD, dhidden_ND.astype(hidden_BTD.dtype).reshape(inputs[0].shape)

    head_grad_VD, dhidden = lax.scan(differentiate, jnp.zeros(head_VD.shape, jnp.float32), (by_token, logits))
    return _join(dhidden, targets_BT.shape[1]), head_grad_VD.astype(head_VD.dtype), None


_token_logprobs.defvjp(_forward, _backward)


def _logits(hidden_ND, head32_VD, temperature):
    return jnp.einsum("nd,vd->nv", hidden_ND.astype(jnp.float32), head32_VD, precision=_PRECISION) / temperature


def _is_target(logits_NV, targets_N):
    return lax.broadcasted_iota(targets_N.dtype, logits_NV.shape, 1) == targets_N[:, None]


def _tokens(x_BC):
    """[B, C, ...] -> [N, ...], the tokens of a slice: XLA's CPU backend is slow on reductions with B and C apart."""
    return x_BC.reshape(-1, *x_BC.shape[2:])


def _split(x_BT, steps):
    """[B, T, ...] -> [N, B, steps, ...]; the last slice is filled with zeros."""
    batch, time = x_BT.shape[:2]
    slices = -(-time // steps)
    padding = [(0, 0), (0, slices * steps - time)] + [(0, 0)] * (x_BT.ndim - 2)
    x = jnp.pad(x_BT, padding).reshape(batch, slices, steps, *x_BT.shape[2:])
    return jnp.moveaxis(x, 1, 0)


def _join(x_NBC, time):
    """The inverse of `_split`."""
    x = jnp.moveaxis(x_NBC, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :time]
