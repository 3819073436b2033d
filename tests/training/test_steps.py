import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reterm_jax.losses.policy_gradient import load_objective
from reterm_jax.policy import forward
from reterm_jax.tokens.packing import Batch, Example, pack, unpack
from reterm_jax.training.steps import StepConfig, make_rl_step, make_score, make_sft_step

SGD = optax.sgd(1.0)  # parameters before minus after are the gradient


@pytest.fixture(scope="module")
def rl(policy):
    """A function (examples, micro_rows, row length, aggregation) -> (gradient, metrics); steps are compiled once."""
    steps = {}

    def run(examples, *, micro_rows=1, length=16, aggregation="token", rows_multiple=1):
        key = micro_rows, aggregation
        if key not in steps:
            config = StepConfig(micro_rows=micro_rows, aggregation=aggregation, max_length=16, temperature=0.7)
            steps[key] = make_rl_step(policy.config, config, SGD, policy.mesh, policy.shardings)
        state = policy.new_state(SGD)
        before = jax.tree.map(np.array, state.params)
        state, metrics = steps[key](state, pack(examples, length=length, rows_multiple=rows_multiple)[0])
        assert int(state.step) == 1
        grads = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
        return grads, {k: float(v) for k, v in metrics.items()}

    return run


def assert_same(a, b, rtol=1e-4, atol=2e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


@pytest.mark.parametrize("aggregation", ["token", "sequence"])
def test_micro_batches_and_packing_do_not_change_the_update(rl, examples, aggregation):
    reference, metrics = rl(examples, aggregation=aggregation)
    for layout in ({"micro_rows": 4}, {"micro_rows": 4, "length": 40}):
        grads, others = rl(examples, aggregation=aggregation, **layout)
        assert_same(grads, reference)
        assert_same(others, metrics, rtol=1e-4)


def test_one_row_per_document_equals_a_direct_computation(rl, policy, examples):
    """Σ over documents computed one by one, logits and log-softmax in the open, divided by all loss tokens."""
    grads, metrics = rl(examples, micro_rows=4, length=40)
    objective = load_objective("ppo_clip")
    total = sum(e.weight * e.loss_mask.sum() for e in examples)

    def loss(params):
        result = 0.0
        for example in examples:
            ids = jnp.asarray(example.ids)[None]
            positions = jnp.arange(ids.shape[1] - 1)[None]
            hidden = forward.hidden_states(params, policy.config, ids[:, :-1], jnp.ones_like(positions), positions)
            logits = hidden @ forward.head(params, policy.config).T / 0.7
            logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), ids[:, 1:, None], -1)[..., 0]
            old, mask = jnp.asarray(example.old_logprobs)[None, 1:], jnp.asarray(example.loss_mask)[None, 1:]
            per_token, _ = objective(logprobs, old, example.advantage, mask, segments_BT=jnp.ones_like(positions))
            result += example.weight * per_token.sum() / total
        return result

    params = policy.new_state(SGD).params
    value, expected = jax.value_and_grad(loss)(params)
    assert_same(grads, expected, rtol=1e-3, atol=1e-5)
    assert metrics["train/loss"] == pytest.approx(float(value), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(float(optax.global_norm(expected)), rel=1e-3)


def test_metrics_of_the_sampler_mismatch(rl, policy, examples):
    _, metrics = rl(examples)
    batch, placements = pack(examples, length=16)
    score = make_score(policy.config, StepConfig(micro_rows=2, temperature=0.7), policy.mesh, policy.shardings)
    logprobs, entropy = score(policy.new_state(SGD).params, batch)
    difference = np.abs(logprobs - batch.old_logprobs)[batch.loss_mask]
    assert metrics["train/logprob_diff_mean"] == pytest.approx(difference.mean(), rel=1e-4)
    assert metrics["train/logprob_diff_max"] == pytest.approx(difference.max(), rel=1e-4)
    assert metrics["train/logprob_diff_p50"] == pytest.approx(np.quantile(difference, 0.5), rel=1e-4)
    assert metrics["train/logprob_diff_p99"] == pytest.approx(np.quantile(difference, 0.99), rel=1e-4)
    assert metrics["train/entropy"] == pytest.approx(entropy[batch.loss_mask].mean(), rel=1e-4)
    assert metrics["train/loss_tokens"] == batch.loss_tokens
    assert unpack(logprobs, placements[0]).shape == (17,)


def test_updates_of_many_sizes_share_few_compilations(policy, examples):
    compiled = []
    step = make_sft_step(policy.config, StepConfig(micro_rows=1), SGD, policy.mesh, policy.shardings)
    listener = lambda name, *_, **__: compiled.append(name)  # noqa: E731
    state = policy.new_state(SGD)
    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for rows in (5, 6, 7, 8):
            state, _ = step(state, pack(examples[:rows], length=17)[0].take(range(5)))
        state, _ = step(state, pack(examples, length=17, rows=8)[0])
    finally:
        jax.monitoring.clear_event_listeners()
    assert sum("backend_compile" in name for name in compiled) == 1


def test_a_gradient_that_is_not_finite_is_skipped(rl, policy, examples):
    broken = dataclasses.replace(examples[0], advantage=float("nan"))
    grads, metrics = rl([broken, *examples[1:]])
    assert metrics["train/skipped"] == 1
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)


def test_an_update_without_loss_tokens_changes_nothing_not_even_momentum(policy):
    adam = optax.adam(0.1)
    step = make_sft_step(policy.config, StepConfig(), adam, policy.mesh, policy.shardings)
    state = policy.new_state(adam)
    before = jax.tree.map(np.array, state)
    state, metrics = step(state, Batch.empty(1, 17))
    assert metrics["train/skipped"] == 1 and int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (before.params, before.opt_state), (state.params, state.opt_state))


def test_sft_learns_a_sequence_by_heart(policy):
    adam = optax.adam(0.02)
    step = make_sft_step(policy.config, StepConfig(), adam, policy.mesh, policy.shardings)
    state = policy.new_state(adam)
    ids = np.random.default_rng(1).integers(0, 32, 17)
    batch, _ = pack([Example(ids, np.arange(17) >= 8)], length=16)
    losses = []
    for _ in range(60):
        state, metrics = step(state, batch)
        losses.append(float(metrics["train/loss"]))
    assert losses[0] > 2 and losses[-1] < 0.1


def test_micro_rows_must_fit_the_mesh(policy):
    with pytest.raises(ValueError, match="micro_rows = 0"):
        make_sft_step(policy.config, StepConfig(micro_rows=0), SGD, policy.mesh, policy.shardings)
