"""One update of the policy: a pure function of (state, batch), jitted with explicit shardings.

Gradients are accumulated over micro-batches inside the compiled function, with weights and a denominator that belong
to the whole update, so that the cut into micro-batches changes nothing but memory. The loop over micro-batches has a
dynamic trip count and the array of micro-batches is padded to a power of two: updates of any size share a handful of
compilations, and padding costs nothing.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from reterm_jax.losses import sft
from reterm_jax.losses.aggregation import MODES, token_weights
from reterm_jax.losses.policy_gradient import load_objective, sampler_metrics
from reterm_jax.losses.regularisers import KL_ESTIMATES, kl_to_reference
from reterm_jax.losses.token_logprobs import token_logprobs
from reterm_jax.policy import forward
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.sharding import BATCH_AXES, gather_vocab
from reterm_jax.policy.spec import abstract_params
from reterm_jax.tokens.packing import Batch
from reterm_jax.training.state import TrainState, state_shardings

# Micro-batches [M,R,T]: rows over the devices.
_MICRO_BATCHES = PartitionSpec(None, BATCH_AXES)

Metrics = dict[str, jax.Array]
# (logprobs [R,T], entropy [R,T], micro-batch arrays [R,T]) -> (loss [R,T], metrics [R,T] each)
TokenLoss = Callable[[jax.Array, jax.Array, Mapping[str, jax.Array]], tuple[jax.Array, Metrics]]


@dataclass(frozen=True)
class TrainStep:
    """One update, `step(state, batch) -> (state, metrics)`; it donates the state that it is given.

    Where several processes share the mesh, each calls it with the same batch, of which it puts its own part on its
    devices.

    Attributes:
        jitted: (state, micro-batches [M,R,T] by name, number of micro-batches in use) -> (state, metrics).
        micro_rows: R.
    """

    jitted: Callable[..., tuple[TrainState, Metrics]]
    mesh: Mesh
    micro_rows: int

    def __call__(self, state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        arrays, used = _micro_batches(batch, self.micro_rows)
        with jax.set_mesh(self.mesh):
            arrays = _placed(arrays, NamedSharding(self.mesh, _MICRO_BATCHES))
            return self.jitted(state, arrays, _placed(used, NamedSharding(self.mesh, PartitionSpec())))

    def lower(self, state: TrainState, *, rows: int, length: int, forked: bool = False) -> jax.stages.Lowered:
        """The program of an update, before compilation; nothing is allocated.

        Args:
            state: of `jax.ShapeDtypeStruct`, see `state.abstract_state`.
            rows, length: of the batch, all of whose rows have loss tokens; with `forked` it has trunks.
        """
        dtypes = {name: x.dtype for name, x in Batch.empty(0, 0).arrays().items()}
        if forked:
            dtypes["trunks"] = dtypes["segments"]
        shape = (_slots(-(-rows // self.micro_rows)), self.micro_rows, length)
        arrays = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
        with jax.set_mesh(self.mesh):
            return self.jitted.lower(state, arrays, jax.ShapeDtypeStruct((), jnp.int32))


@dataclass(frozen=True)
class StepConfig:
    """
    Attributes:
        micro_rows: rows whose activations exist at one time; a multiple of the mesh's data · fsdp.
        aggregation: a mode of `losses.aggregation`; max_length is the divisor of its "constant" mode.
        temperature: the sampler's temperature. SFT uses 1.
        logprob_chunk: tokens whose logits exist at one time.
        objective: name or import path of an RL objective; objective_args are its hyper-parameters.
        kl_weight, kl_estimate: β and estimate of β·KL(π‖reference) in the RL loss, see `losses.regularisers`; unless β
            is 0 the batch must have `ref_logprobs`.
        entropy_weight: α of −α·entropy in the RL loss.
        ema_decay: d of the moving average of the parameters, average ← d·average + (1 − d)·params after each update
            that was not skipped (Polyak and Juditsky, 1992, in its exponential form); 0: no average is kept.
    """

    micro_rows: int = 1
    aggregation: str = "token"
    max_length: int | None = None
    temperature: float = 1.0
    logprob_chunk: int = 2048
    objective: str = "ppo_clip"
    objective_args: Mapping[str, Any] = field(default_factory=dict)
    kl_weight: float = 0.0
    kl_estimate: str = "k3"
    entropy_weight: float = 0.0
    ema_decay: float = 0.0

    def __post_init__(self) -> None:
        if self.kl_estimate not in KL_ESTIMATES:
            raise ValueError(f"kl_estimate {self.kl_estimate!r} is unknown; one of {', '.join(KL_ESTIMATES)}")
        for name in ("kl_weight", "entropy_weight"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must not be negative, got {getattr(self, name)}")
        if not 0 <= self.ema_decay < 1:
            raise ValueError(f"ema_decay must be at least 0 and below 1, got {self.ema_decay}")
        if self.aggregation not in MODES:
            raise ValueError(f"aggregation {self.aggregation!r} is unknown; one of {', '.join(MODES)}")


def make_sft_step(
    policy: QwenConfig,
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
) -> TrainStep:
    """A step on the negative log-likelihood of the loss tokens. See `_make_step` for what it returns."""

    def token_loss(logprobs_BT, entropy_BT, micro):
        return sft.nll(logprobs_BT, micro["loss_mask"])

    return _make_step(policy, config, optimizer, mesh, param_shardings, token_loss, temperature=1.0)


def make_rl_step(
    policy: QwenConfig,
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
) -> TrainStep:
    """A step on `config.objective`, with metrics of the distance to the sampler.

    Adds `train/clip_fraction` (whatever the objective reports), `train/kl_sampler`, `train/ratio`, and
    `train/logprob_diff_{mean,p50,p99,max}`, the absolute difference between trainer and sampler on the loss tokens,
    `train/ratio_outside`, the fraction of them whose ratio is not in [0.9, 1.1], and `train/kl_reference` where there
    is a reference.
    """
    objective = load_objective(config.objective, config.objective_args)

    def token_loss(logprobs_BT, entropy_BT, micro):
        inputs = logprobs_BT, micro["old_logprobs"], micro["advantages"], micro["loss_mask"]
        loss_BT, metrics = objective(*inputs, segments_BT=micro["segments"])
        if config.entropy_weight:
            loss_BT = loss_BT - config.entropy_weight * entropy_BT * micro["loss_mask"]
        if config.kl_weight:
            kl_BT = kl_to_reference(logprobs_BT, micro["ref_logprobs"], micro["loss_mask"], estimate=config.kl_estimate)
            loss_BT, metrics = loss_BT + config.kl_weight * kl_BT, {**metrics, "kl_reference": kl_BT}
        return loss_BT, {**metrics, **sampler_metrics(logprobs_BT, micro["old_logprobs"], micro["loss_mask"])}

    return _make_step(
        policy, config, optimizer, mesh, param_shardings, token_loss, temperature=config.temperature, quantiles=True
    )


def make_score(
    policy: QwenConfig, config: StepConfig, mesh: Mesh, param_shardings: Any
) -> Callable[[Any, Batch], tuple[np.ndarray, np.ndarray]]:
    """A function (params, batch) -> (logprobs, entropy), numpy float32 [B,T], of the batch's targets."""
    _check_micro_rows(config.micro_rows, mesh)
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))

    def score_micro(params, micro):
        return _logprobs(params, policy, micro, config.temperature, config.logprob_chunk)

    # Every process reads all of what comes out, which is small.
    everywhere = NamedSharding(mesh, PartitionSpec())
    compiled = jax.jit(score_micro, in_shardings=(param_shardings, rows), out_shardings=everywhere)

    def score(params: Any, batch: Batch) -> tuple[np.ndarray, np.ndarray]:
        with jax.set_mesh(mesh):
            parts = []
            for start in range(0, batch.rows, config.micro_rows):
                chosen = np.arange(start, min(start + config.micro_rows, batch.rows))
                micro = _placed(batch.take(chosen, count=config.micro_rows).arrays(), rows)
                parts.append(compiled(params, micro))
        logprobs, entropy = (np.concatenate([np.asarray(x) for x in column]) for column in zip(*parts, strict=True))
        return logprobs[: batch.rows], entropy[: batch.rows]

    return score


def _make_step(
    policy: QwenConfig,
    config: StepConfig,
    optimizer: optax.GradientTransformation,
    mesh: Mesh,
    param_shardings: Any,
    token_loss: TokenLoss,
    *,
    temperature: float,
    quantiles: bool = False,
) -> TrainStep:
    """The step around a per-token loss.

    Its metrics are scalars on the device: `train/loss`, `train/grad_norm` (before clipping), `train/entropy`,
    `train/loss_tokens`, `train/skipped`, and the means (or largest values, for names in `_max`) over the loss tokens
    of what `token_loss` reports. An update whose gradient is not finite, or that has no loss token, changes nothing
    but the step count and sets `train/skipped` to 1.
    """
    _check_micro_rows(config.micro_rows, mesh)

    def micro_loss(params, micro, denominator):
        mask_BT = micro["loss_mask"]
        logprobs_BT, entropy_BT = _logprobs(params, policy, micro, temperature, config.logprob_chunk)
        loss_BT, token_metrics = token_loss(logprobs_BT, entropy_BT, micro)
        loss = jnp.sum(micro["loss_weights"] * loss_BT) / denominator
        token_metrics = {"entropy": entropy_BT, **token_metrics}
        sums = {k: _reduce(k)(jnp.where(mask_BT, x, 0.0)) for k, x in jax.lax.stop_gradient(token_metrics).items()}
        return loss, ({"loss": loss, **sums}, logprobs_BT)

    def update(state: TrainState, batch: dict[str, jax.Array], used: jax.Array) -> tuple[TrainState, Metrics]:
        mask_MRT = batch["loss_mask"]
        flat = {k: batch[k].reshape(-1, batch[k].shape[-1]) for k in ("loss_mask", "segments", "weights")}
        weights_BT, denominator = token_weights(
            flat["loss_mask"], flat["segments"], flat["weights"], mode=config.aggregation, max_length=config.max_length
        )
        batch = {**batch, "loss_weights": weights_BT.reshape(mask_MRT.shape)}
        differentiate = jax.grad(micro_loss, has_aux=True)

        def accumulate(index, carry):
            grads, totals, logprobs_MRT = carry
            micro = {k: x[index] for k, x in batch.items()}
            new_grads, (sums, logprobs_RT) = differentiate(state.params, micro, denominator)
            totals = {k: jnp.maximum(totals[k], x) if k.endswith("_max") else totals[k] + x for k, x in sums.items()}
            grads = jax.lax.with_sharding_constraint(jax.tree.map(jnp.add, grads, new_grads), param_shardings)
            return grads, totals, logprobs_MRT.at[index].set(logprobs_RT)

        first = {k: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for k, x in batch.items()}
        shapes = jax.eval_shape(differentiate, state.params, first, denominator)[1][0]
        zeros = jax.tree.map(jnp.zeros_like, state.params)
        totals = {k: jnp.zeros(s.shape, s.dtype) for k, s in shapes.items()}
        carry = (zeros, totals, jnp.zeros(mask_MRT.shape, jnp.float32))
        grads, totals, logprobs_MRT = jax.lax.fori_loop(0, used, accumulate, carry)

        loss_tokens = jnp.sum(mask_MRT)
        metrics = _averaged(totals, loss_tokens)
        grad_norm = optax.tree.norm(grads)
        applied = jnp.isfinite(grad_norm) & (loss_tokens > 0)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        new = optax.apply_updates(state.params, updates), opt_state
        params, opt_state = jax.tree.map(
            lambda after, before: jnp.where(applied, after, before), new, (state.params, state.opt_state)
        )
        metrics |= {"grad_norm": grad_norm, "loss_tokens": loss_tokens, "skipped": 1 - applied.astype(jnp.int32)}
        if quantiles:
            difference = jnp.abs(logprobs_MRT - batch["old_logprobs"])
            chosen = jnp.where(mask_MRT, difference, jnp.nan).reshape(-1)
            p50, p99 = jnp.nan_to_num(jnp.nanquantile(chosen, jnp.array([0.5, 0.99])))
            metrics |= {"logprob_diff_p50": p50, "logprob_diff_p99": p99}
        average = state.average
        if config.ema_decay:
            rate = jnp.where(applied, 1 - config.ema_decay, 0.0)
            average = jax.tree.map(lambda a, p: a + rate * (p - a), average, params)
        state = TrainState(params=params, opt_state=opt_state, step=state.step + 1, average=average)
        return state, {f"train/{k}": x for k, x in metrics.items()}

    shardings = state_shardings(
        abstract_params(policy), optimizer, mesh, param_shardings, average=bool(config.ema_decay)
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(
        update,
        in_shardings=(shardings, NamedSharding(mesh, _MICRO_BATCHES), replicated),
        out_shardings=(shardings, replicated),
        donate_argnums=0,
    )

    return TrainStep(jitted, mesh, config.micro_rows)


def _logprobs(params, policy, micro, temperature, chunk):
    hidden_BTD = forward.hidden_states(
        params, policy, micro["tokens"], micro["segments"], micro["positions"], micro.get("trunks")
    )
    head_VD, hidden_BTD = gather_vocab(forward.head(params, policy), hidden_BTD)
    return token_logprobs(hidden_BTD, head_VD, micro["targets"], temperature=temperature, chunk=chunk)


def _reduce(name: str) -> Callable[[jax.Array], jax.Array]:
    return jnp.max if name.endswith("_max") else jnp.sum


def _averaged(totals: Metrics, loss_tokens: jax.Array) -> Metrics:
    count = jnp.maximum(loss_tokens, 1)
    return {k: x if k == "loss" or k.endswith("_max") else x / count for k, x in totals.items()}


def _micro_batches(batch: Batch, micro_rows: int) -> tuple[dict[str, np.ndarray], np.int32]:
    """[M, micro_rows, T] arrays with M a power of two, and how many of the micro-batches have loss tokens."""
    trained = np.flatnonzero(batch.loss_mask.any(axis=1))
    used = -(-len(trained) // micro_rows)
    slots = _slots(used)
    padded = batch.take(trained, count=slots * micro_rows)
    return {k: v.reshape(slots, micro_rows, -1) for k, v in padded.arrays().items()}, np.int32(used)


def _placed(arrays: Any, sharding: NamedSharding) -> Any:
    """Host arrays, whole and the same on every process, on the devices of the mesh: each process puts its shards."""
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x, np.shape(x)), arrays)


def _slots(used: int) -> int:
    """The power of two that the array of micro-batches is padded to."""
    return 1 << max(0, used - 1).bit_length()


def _check_micro_rows(micro_rows: int, mesh: Mesh) -> None:
    ways = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
    if micro_rows < 1 or micro_rows % ways:
        raise ValueError(f"micro_rows = {micro_rows} must be a positive multiple of the mesh's data · fsdp = {ways}")
