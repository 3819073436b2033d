import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from reterm_jax.losses.policy_gradient import load_objective
from reterm_jax.policy import forward
from reterm_jax.tokens.forking import pack_forked
from reterm_jax.tokens.packing import Batch, Example, pack, unpack
from reterm_jax.training.scoring import score_examples
from reterm_jax.training.steps import StepConfig, make_rl_step, make_score, make_sft_step

DOCS = Path(__file__).parents[2] / "docs"
SGD = optax.sgd(1.0)  # parameters before minus after are the gradient
TEMPERATURE = 0.7


@pytest.fixture(scope="module")
def rl(policy):
    """A function (examples, micro_rows, row length) -> (gradient, metrics); each kind of step is compiled once."""
    steps = {}

    def run(examples, *, micro_rows=1, length=16, **extra):
        kind = micro_rows, *sorted(extra.items())
        if kind not in steps:
            config = StepConfig(micro_rows=micro_rows, temperature=TEMPERATURE, **extra)
            steps[kind] = make_rl_step(policy.config, config, SGD, policy.mesh, policy.shardings)
        state = policy.new_state(SGD)
        before = jax.tree.map(np.array, state.params)
        state, metrics = steps[kind](state, pack(examples, length=length)[0])
        assert int(state.step) == 1
        grads = jax.tree.map(lambda a, b: a - np.asarray(b), before, state.params)
        return grads, {k: float(v) for k, v in metrics.items()}

    return run


def assert_same(a, b, rtol=1e-4, atol=5e-6):
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=rtol, atol=atol), a, b)


def test_micro_batches_and_packing_do_not_change_the_update(rl, examples):
    """Five micro-batches of one short row, against one of two long rows."""
    assert pack(examples, length=16)[0].rows == 5
    assert pack(examples, length=40)[0].rows == 2
    reference = rl(examples)
    assert_same(rl(examples, micro_rows=4, length=40), reference)


def test_the_update_equals_a_direct_computation(rl, policy, examples):
    """One document a row, logits and log-softmax in the open, divided by the weights of all loss tokens."""
    grads, metrics = rl(examples)
    objective = load_objective("ppo_clip")
    batch = {k: jnp.asarray(v) for k, v in pack(examples, length=16)[0].take([]).arrays().items()}
    rows = [pack([example], length=16)[0] for example in examples]
    batch = {k: jnp.concatenate([row.arrays()[k] for row in rows]) for k in batch}

    def loss(params):
        inputs = batch["tokens"], batch["segments"], batch["positions"]
        hidden = forward.hidden_states(params, policy.config, *inputs)
        logits = hidden @ forward.head(params, policy.config).T / TEMPERATURE
        logprobs = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["targets"][..., None], -1)[..., 0]
        mask = batch["loss_mask"]
        per_token, _ = objective(
            logprobs, batch["old_logprobs"], batch["advantages"], mask, segments_BT=batch["segments"]
        )
        return jnp.sum(batch["weights"] * per_token) / jnp.sum(batch["weights"] * mask)

    value, expected = jax.jit(jax.value_and_grad(loss))(policy.new_state(SGD).params)
    assert_same(grads, expected, rtol=1e-3, atol=1e-5)
    assert metrics["train/loss"] == pytest.approx(float(value), rel=1e-4)
    assert metrics["train/grad_norm"] == pytest.approx(float(optax.tree.norm(expected)), rel=1e-3)
    assert metrics["train/skipped"] == 0


def with_reference(examples):
    rng = np.random.default_rng(5)
    return [dataclasses.replace(e, ref_logprobs=np.log(rng.uniform(0.01, 0.1, len(e.ids)))) for e in examples]


@pytest.mark.parametrize("estimate", ["k1", "k3"])
def test_the_reference_and_the_entropy_are_terms_of_the_loss(rl, policy, examples, estimate):
    """The gradient is the objective's plus β times that of the KL minus α times that of the entropy."""
    examples = with_reference(examples)
    beta, alpha = 0.3, 0.2
    plain, _ = rl(examples)
    found, metrics = rl(examples, kl_weight=beta, kl_estimate=estimate, entropy_weight=alpha)
    rows = [pack([example], length=16)[0].arrays() for example in examples]
    batch = {k: jnp.concatenate([row[k] for row in rows]) for k in rows[0]}

    def extra(params):
        inputs = batch["tokens"], batch["segments"], batch["positions"]
        hidden = forward.hidden_states(params, policy.config, *inputs)
        logp = jax.nn.log_softmax(hidden @ forward.head(params, policy.config).T / TEMPERATURE)
        chosen = jnp.take_along_axis(logp, batch["targets"][..., None], -1)[..., 0]
        gap, mask = chosen - batch["ref_logprobs"], batch["loss_mask"]
        # k1 has the gradient of d²/2.
        kl = gap**2 / 2 if estimate == "k1" else jnp.exp(-gap) + gap - 1
        entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
        weights = batch["weights"] * mask
        value = jnp.sum(mask * (gap if estimate == "k1" else kl)) / mask.sum()
        return jnp.sum(weights * (beta * kl - alpha * entropy)) / jnp.sum(weights), value

    grads, kl = jax.jit(jax.grad(extra, has_aux=True))(policy.new_state(SGD).params)
    assert_same(found, jax.tree.map(jnp.add, plain, grads), rtol=1e-3, atol=1e-5)
    assert metrics["train/kl_reference"] == pytest.approx(float(kl), rel=1e-4)


def test_micro_batches_do_not_change_an_update_with_all_its_terms(rl, examples):
    terms = {"kl_weight": 0.3, "kl_estimate": "k3", "entropy_weight": 0.2}
    examples = with_reference(examples)
    assert_same(rl(examples, micro_rows=4, length=40, **terms), rl(examples, **terms))


def test_a_loss_from_the_users_own_file(rl, policy, examples):
    """The file that the documentation shows, by the name that is given on the command line."""
    mine, metrics = rl(examples, objective=str(DOCS / "my_loss.py") + ":my_objective")
    assert metrics["train/advantage"] == pytest.approx(
        np.average([e.advantage for e in examples], weights=[sum(e.loss_mask) for e in examples]), rel=1e-4
    )
    # Where the sampler is as likely as the trainer, REINFORCE's weight is 1.
    score = make_score(policy.config, StepConfig(temperature=TEMPERATURE), policy.mesh, policy.shardings)
    own = score_examples(score, policy.new_state(SGD).params, examples, length=16, forked=False)
    on_policy = [dataclasses.replace(e, old_logprobs=o) for e, o in zip(examples, own, strict=True)]
    assert_same(mine, rl(on_policy, objective="reinforce")[0], rtol=1e-3)


def test_metrics_of_the_sampler_mismatch(rl, policy, examples):
    _, metrics = rl(examples)
    batch, placements = pack(examples, length=16)
    score = make_score(policy.config, StepConfig(micro_rows=4, temperature=TEMPERATURE), policy.mesh, policy.shardings)
    logprobs, entropy = score(policy.new_state(SGD).params, batch)  # five rows: the second micro-batch is filled up
    difference = np.abs(logprobs - batch.old_logprobs)[batch.loss_mask]
    expected = {
        "mean": difference.mean(),
        "max": difference.max(),
        "p50": np.quantile(difference, 0.5),
        "p99": np.quantile(difference, 0.99),
    }
    for name, value in expected.items():
        assert metrics[f"train/logprob_diff_{name}"] == pytest.approx(value, rel=1e-4)
    outside = np.abs(np.exp((logprobs - batch.old_logprobs)[batch.loss_mask]) - 1) > 0.1
    assert metrics["train/ratio_outside"] == pytest.approx(outside.mean(), rel=1e-4)
    assert metrics["train/entropy"] == pytest.approx(entropy[batch.loss_mask].mean(), rel=1e-4)
    assert metrics["train/loss_tokens"] == batch.loss_tokens
    assert unpack(logprobs, placements[0]).shape == (17,)


def test_updates_of_five_to_eight_micro_batches_share_one_compilation(rl, examples):
    rl(examples)
    compiled = []

    def listener(name, *_, **__):
        compiled.append(name)

    jax.monitoring.register_event_duration_secs_listener(listener)
    try:
        for more in (1, 2, 3):
            rl(examples + [examples[0]] * more)  # a whole row each
    finally:
        jax.monitoring.unregister_event_duration_listener(listener)
    assert not [name for name in compiled if "backend_compile" in name]


def test_a_gradient_that_is_not_finite_is_skipped(rl, examples):
    broken = dataclasses.replace(examples[0], advantage=float("nan"))
    grads, metrics = rl([broken, *examples[1:]])
    assert metrics["train/skipped"] == 1
    jax.tree.map(lambda g: np.testing.assert_array_equal(g, 0), grads)


def test_an_update_without_loss_tokens_changes_nothing_not_even_momentum(policy, sft):
    state = policy.new_state(sft.optimizer)
    before = jax.tree.map(np.array, state)
    state, metrics = sft.step(state, Batch.empty(2, 16))
    assert metrics["train/skipped"] == 1 and int(state.step) == 1
    jax.tree.map(np.testing.assert_array_equal, (before.params, before.opt_state), (state.params, state.opt_state))


def test_the_average_follows_the_parameters_and_skips_what_they_skip(policy, sft, examples):
    config = StepConfig(micro_rows=2, ema_decay=0.9)
    step = make_sft_step(policy.config, config, sft.optimizer, policy.mesh, policy.shardings)
    begin = policy.new_state(sft.optimizer)
    state = begin.replace(average=jax.tree.map(jnp.copy, begin.params))
    expected = jax.tree.map(np.array, state.params)
    for _ in range(3):
        state, _ = step(state, pack(examples, length=16)[0])
        expected = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * np.asarray(p), expected, state.params)
    assert_same(state.average, expected, rtol=1e-5, atol=1e-7)
    assert state.result is state.average and begin.result is begin.params
    before = jax.tree.map(np.array, state.average)
    state, metrics = step(state, Batch.empty(2, 16))
    assert metrics["train/skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, state.average)


def test_sft_learns_a_sequence_by_heart(policy, sft):
    state = policy.new_state(sft.optimizer)
    ids = np.random.default_rng(1).integers(0, 32, 17)
    batch, _ = pack([Example(ids, np.arange(17) >= 8)], length=16)
    losses = []
    for _ in range(60):
        state, metrics = sft.step(state, batch)
        losses.append(float(metrics["train/loss"]))
    assert losses[0] > 2 and losses[-1] < 0.1


def test_micro_rows_must_fit_the_mesh(policy):
    with pytest.raises(ValueError, match="micro_rows = 0"):
        make_sft_step(policy.config, StepConfig(micro_rows=0), SGD, policy.mesh, policy.shardings)


@pytest.mark.parametrize("objective,aggregation", [("ppo_clip", "token"), ("gspo", "sequence")])
def test_forked_rows_make_the_same_update_as_plain_ones(hybrid, objective, aggregation):
    """Two groups with trunks, one of them divided over rows, and a document that shares nothing."""
    rng = np.random.default_rng(0)
    examples = []
    for number, (shared, lengths) in enumerate([(20, (4, 9, 1)), (11, (3, 12, 7, 5, 2)), (0, (8,))]):
        start = rng.integers(0, 32, shared)
        for n in lengths:
            ids = np.concatenate([start, rng.integers(0, 32, n)])
            mask = np.arange(len(ids)) >= max(shared, 1)
            old = np.log(rng.uniform(0.01, 0.1, len(ids)))
            examples.append(Example(ids, mask, float(rng.normal()), old, weight=1.0 + n % 2, group=number))
    terms = {}
    if objective == "gspo":
        examples, terms = with_reference(examples), {"kl_weight": 0.3, "kl_estimate": "k1", "entropy_weight": 0.2}
    config = StepConfig(micro_rows=2, aggregation=aggregation, objective=objective, temperature=TEMPERATURE, **terms)
    step = make_rl_step(hybrid.config, config, SGD, hybrid.mesh, hybrid.shardings)
    results = []
    for packed in (pack, pack_forked):
        batch, _ = packed(examples, length=40)
        state, metrics = step(hybrid.new_state(SGD), batch)
        results.append((batch, jax.tree.map(np.asarray, state.params), {k: float(v) for k, v in metrics.items()}))
    (plain, *expected), (forked, *found) = results
    assert forked.used_tokens < 0.75 * plain.used_tokens
    assert_same(found, expected, rtol=1e-4, atol=1e-5)
