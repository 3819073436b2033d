"""What the trainer computes before its updates, with a policy whose logprobs a test can say."""

import numpy as np
import optax
import pytest

from reterm_jax.tokens.packing import Example, has_reference, pack
from reterm_jax.training.scoring import Scorer, ScoringConfig, score_examples
from reterm_jax.training.steps import StepConfig, make_score


def says(params, batch):
    """Log-probability −target/10 + params of every target."""
    return (params - batch.targets / 10).astype(np.float32), None


def example(ids, gap, *, group=None):
    """An attempt whose sampler was `gap` below the trainer (params 0) on every token."""
    ids, mask = np.array(ids), np.arange(len(ids)) >= 2
    return Example(ids, mask, 1.0, np.where(mask, -ids / 10 - gap, 0).astype(np.float32), name=str(ids), group=group)


def test_each_example_gets_its_own_logprobs_back_forked_or_not(policy):
    rng = np.random.default_rng(0)
    start = rng.integers(0, 32, 6)
    made = []
    for n in (4, 9, 2):
        ids = np.concatenate([start, rng.integers(0, 32, n)])
        made.append(Example(ids, np.arange(len(ids)) >= 6, 1.0, np.zeros(len(ids)), group=0))
    score = make_score(policy.config, StepConfig(micro_rows=1, temperature=0.7), policy.mesh, policy.shardings)
    params = policy.new_state(optax.sgd(1.0)).params
    plain, forked = (score_examples(score, params, made, length=40, forked=forked) for forked in (False, True))
    for one, other, alone in zip(plain, forked, made, strict=True):
        direct = score(params, pack([alone], length=40)[0])[0][0, : len(alone.ids) - 1]
        np.testing.assert_allclose(one[1:], direct, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(other[6:], one[6:], rtol=1e-4, atol=1e-5)


def test_a_reference_and_nothing_else():
    scorer = Scorer(ScoringConfig(reference=True), says, reference_params=-1.0)
    given = [example([5, 6, 7, 8], 0.3), example([5, 6, 9], 0.0)]
    made, metrics = scorer(0.0, given, length=16, forked=False)
    assert metrics == {} and has_reference(made)
    np.testing.assert_allclose(made[0].ref_logprobs[1:], [-1.6, -1.7, -1.8], rtol=1e-6)
    np.testing.assert_array_equal(made[0].old_logprobs, given[0].old_logprobs)
    batch, places = pack(made, length=16)
    row = batch.ref_logprobs[places[1].row, places[1].start : places[1].start + 2]
    np.testing.assert_allclose(row, [-1.6, -1.9], rtol=1e-6)


def test_a_correction_weighs_advantages_and_ratios_start_at_one():
    scorer = Scorer(ScoringConfig(correction="token", correction_cap=2.0), says, None)
    made, metrics = scorer(
        0.0, [example([5, 6, 7, 8], np.log(1.5)), example([5, 6, 9], np.log(4))], length=16, forked=False
    )
    np.testing.assert_allclose(made[0].advantage, [1, 1, 1.5, 1.5], rtol=1e-5)
    np.testing.assert_allclose(made[1].advantage, [1, 1, 2.0], rtol=1e-5)
    np.testing.assert_allclose(made[0].old_logprobs[2:], [-0.7, -0.8], rtol=1e-6)
    assert made[0].weight == 1.0
    assert metrics["train/ratio_outside"] == 1 and metrics["train/mismatch_dropped"] == 0


def test_an_attempt_too_far_from_its_sampler_is_dropped_and_counted():
    scorer = Scorer(ScoringConfig(max_mismatch=0.2), says, None)
    near, far = example([5, 6, 7, 8], -0.1), example([5, 6, 9], -0.3)
    made, metrics = scorer(0.0, [near, far], length=16, forked=False)
    assert made == [near] and metrics["train/mismatch_dropped"] == 1
    assert metrics["train/logprob_diff_max"] == pytest.approx(0.3, rel=1e-5)
    assert scorer(0.0, [far], length=16, forked=False)[0] == []
    assert scorer(0.0, [], length=16, forked=False) == ([], {})
