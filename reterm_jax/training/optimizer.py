"""The optimizer and its learning-rate schedule, from one small config."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax

from reterm_jax.policy.spec import ArraySpec

NAMES = ("adamw", "muon")
MOMENTS_DTYPES = ("float32", "bfloat16")
SCHEDULES = ("constant", "linear", "cosine")


@dataclass(frozen=True)
class OptimizerConfig:
    """
    Attributes:
        name: "adamw", or "muon" (Newton–Schulz on the matrices of the layers, Nesterov Adam on the rest).
        learning_rate: the peak. Muon's updates are scaled to Adam's size, so that one value suits both.
        schedule: what follows the warm-up: "constant", or "linear" or "cosine" down to `final_fraction` of the peak.
        warmup: steps of linear warm-up; a value below 1 is a fraction of all steps.
        clip_norm: largest global norm of the gradient; 0 turns clipping off.
        weight_decay: decoupled, on matrices only (no norms, biases or decay rates).
        moments_dtype: what the moments are stored in, "float32" or "bfloat16" (4 bytes less for each parameter with
            Adam); they are computed in float32 either way. With b2 = 0.95 a second moment moves by 5 % of a new value
            in each update, well above the 0.4 % that bfloat16 resolves; with 0.999 it would stand still.
    """

    name: str = "adamw"
    learning_rate: float = 1e-6
    schedule: str = "constant"
    warmup: float = 0.0
    final_fraction: float = 0.0
    clip_norm: float = 1.0
    weight_decay: float = 0.0
    b1: float = 0.9
    b2: float = 0.95
    eps: float = 1e-8
    moments_dtype: str = "float32"

    def __post_init__(self) -> None:
        if self.name not in NAMES:
            raise ValueError(f"optimizer {self.name!r} is unknown; one of {', '.join(NAMES)}")
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; one of {', '.join(SCHEDULES)}")
        if self.moments_dtype not in MOMENTS_DTYPES:
            raise ValueError(f"moments_dtype {self.moments_dtype!r} is unknown; one of {', '.join(MOMENTS_DTYPES)}")
        for field in ("learning_rate", "warmup", "clip_norm", "weight_decay", "final_fraction"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must not be negative, got {getattr(self, field)}")


def make_schedule(config: OptimizerConfig, total_steps: int) -> optax.Schedule:
    """Learning rate as a function of the number of updates made so far.

    The first update is made with 1/(warm-up steps) of the peak, not with 0: a step that changes nothing is wasted.
    """
    total_steps = max(1, total_steps)
    warmup = round(config.warmup * total_steps) if config.warmup < 1 else int(config.warmup)
    rest = max(1, total_steps - warmup)
    peak, final = config.learning_rate, config.learning_rate * config.final_fraction
    after = {
        "constant": optax.constant_schedule(peak),
        "linear": optax.linear_schedule(peak, final, rest),
        "cosine": optax.cosine_decay_schedule(peak, rest, config.final_fraction),
    }[config.schedule]
    if warmup == 0:
        return after
    return optax.join_schedules([optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1)), after], [warmup])


def make_optimizer(config: OptimizerConfig, specs: Any, total_steps: int) -> optax.GradientTransformation:
    """Clipping, then the moments, then weight decay and the schedule.

    Args:
        specs: the policy's tree of `ArraySpec`; its logical axes say what a matrix is. (A stacked norm has two
            dimensions, so the shape alone does not.)
        total_steps: of this phase, for warm-up fractions and decay.
    """
    clip = optax.clip_by_global_norm(config.clip_norm) if config.clip_norm else optax.identity()
    if config.name == "muon":
        moments = _muon(config, specs)
    else:
        moments = optax.chain(optax.scale_by_adam(config.b1, config.b2, config.eps), optax.scale(-1.0))
    if config.moments_dtype != "float32":
        moments = _stored_as(jnp.dtype(config.moments_dtype), moments)
    decay = jax.tree.map(_is_matrix, specs)
    return optax.chain(
        clip,
        moments,
        # Negative, because the update already points downhill here.
        optax.add_decayed_weights(-config.weight_decay, decay) if config.weight_decay else optax.identity(),
        optax.scale_by_schedule(make_schedule(config, total_steps)),
    )


def _stored_as(dtype: jnp.dtype, inner: optax.GradientTransformation) -> optax.GradientTransformation:
    """`inner`, whose state is float32 while it computes and `dtype` in between."""

    def cast(state: Any, to: jnp.dtype) -> Any:
        return jax.tree.map(lambda x: x.astype(to) if jnp.issubdtype(x.dtype, jnp.floating) else x, state)

    def init(params: Any) -> Any:
        return cast(inner.init(params), dtype)

    def update(grads: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, state = inner.update(grads, cast(state, jnp.float32), params)
        return updates, cast(state, dtype)

    return optax.GradientTransformation(init, update)


def _axes(spec: ArraySpec) -> tuple[str, ...]:
    return tuple(axis for axis in spec.logical_axes if axis != "layers")


def _is_matrix(spec: ArraySpec) -> bool:
    return len(_axes(spec)) >= 2


def _muon(config: OptimizerConfig, specs: Any) -> optax.GradientTransformation:
    dimensions = jax.tree.map(_muon_dimensions, specs)
    return optax.contrib.muon(
        learning_rate=1.0,
        adam_b1=config.b1,
        adam_b2=config.b2,
        eps=config.eps,
        muon_weight_dimension_numbers=lambda params: dimensions,
        # Root mean square of the update equal to Adam's (arXiv 2502.16982).
        consistent_rms=0.2,
    )


def _muon_dimensions(spec: ArraySpec) -> optax.contrib.MuonDimensionNumbers | None:
    """Input and output axes of a projection from or to the residual stream; None (Adam) for everything else."""
    axes = _axes(spec)
    if len(axes) < 2 or "vocab" in axes or "embed" not in axes:
        return None
    first = len(spec.logical_axes) - len(axes)
    dims = tuple(range(first, len(spec.logical_axes)))
    split = 1 if axes[0] == "embed" else len(dims) - 1
    return optax.contrib.MuonDimensionNumbers(reduction_axis=dims[:split], output_axis=dims[split:])
