import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.losses.policy_gradient import OBJECTIVES, load_objective, sampler_metrics

OLD = jnp.log(jnp.array([[0.5, 0.5, 0.5, 0.5, 0.01, 0.5]]))
SEGMENTS = jnp.array([[1, 1, 1, 2, 2, 2]])
MASK = jnp.array([[1, 1, 1, 1, 1, 0]], bool)


def run(name, probs, advantages, **hyper):
    """Loss, metrics and the gradient with respect to the log-probabilities, per token."""
    objective = load_objective(name, hyper)

    def total(logprobs):
        loss, metrics = objective(logprobs, OLD, jnp.array([advantages], jnp.float32), MASK, segments_BT=SEGMENTS)
        return loss.sum(), (loss, metrics)

    (_, (loss, metrics)), grad = jax.value_and_grad(total, has_aux=True)(jnp.log(jnp.array([probs])))
    return np.asarray(loss[0]), metrics, np.asarray(grad[0])


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_on_policy_every_objective_has_the_policy_gradient(name):
    """With π = μ the gradient of each is −A per loss token (for gspo −A · its share of the document)."""
    advantages = [1.0, 1.0, 1.0, -2.0, -2.0, -2.0]
    _, metrics, grad = run(name, [0.5, 0.5, 0.5, 0.5, 0.01, 0.5], advantages)
    np.testing.assert_allclose(grad, [-1, -1, -1, 2, 2, 0], rtol=1e-5)
    np.testing.assert_array_equal(metrics["clip_fraction"] * MASK, np.zeros((1, 6)))


def test_ppo_clips_only_where_the_update_would_go_further():
    probs = [0.7, 0.3, 0.7, 0.3, 0.0101, 0.7]  # ratios 1.4, 0.6, 1.4, 0.6, 1.01
    _, metrics, grad = run("ppo_clip", probs, [1, 1, -1, -1, 1, 1], clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(grad, [0, -0.6, 1.4, 0, -1.01, 0], rtol=1e-4)
    np.testing.assert_array_equal(metrics["clip_fraction"][0, :5], [1, 0, 0, 1, 0])


def test_the_clip_is_asymmetric():
    probs = [0.62, 0.42, 0.62, 0.42, 0.01, 0.5]  # ratios 1.24, 0.84
    _, _, grad = run("ppo_clip", probs, [1, -1, 1, -1, 1, 1], clip_low=0.1, clip_high=0.28)
    np.testing.assert_allclose(grad[:2], [-1.24, 0], rtol=1e-5)


def test_the_dual_clip_ends_the_loss_of_bad_tokens_that_became_likely():
    probs = [0.7, 0.99, 0.3, 0.7, 0.05, 0.5]  # ratios 1.4, 1.98, 0.6, 1.4, 5
    loss, metrics, grad = run("ppo_clip", probs, [-1, -1, -1, 1, -2, 1], clip_dual=1.5)
    np.testing.assert_allclose(loss, [1.4, 1.5, 0.8, -1.28, 3.0, 0], rtol=1e-4)
    np.testing.assert_allclose(grad, [1.4, 0, 0, 0, 0, 0], rtol=1e-4)
    np.testing.assert_array_equal(metrics["clip_fraction"][0, :5], [0, 1, 1, 1, 1])
    with pytest.raises(ValueError, match="clip_dual must be above 1"):
        load_objective("ppo_clip", {"clip_dual": 0.5})


@pytest.mark.parametrize(
    ("name", "hyper"),
    [("ppo_clip", {"clip_dual": 1.5}), ("dppo_tv", {}), ("gspo", {"clip_low": 0.3, "clip_high": 0.2})],
)
def test_gradients_are_finite_differences_of_the_loss(name, hyper):
    """For the objectives without a stopped weight; probabilities lie away from the kinks."""
    probs, advantages, step = np.array([0.62, 0.7, 0.3, 0.99, 0.012, 0.5]), [1, -1, 0.5, -2, 1, 1], 1e-2
    _, _, grad = run(name, probs, advantages, **hyper)
    for place in range(6):
        shift = np.exp(step * (np.arange(6) == place))
        up, down = (run(name, probs * factor, advantages, **hyper)[0].sum() for factor in (shift, 1 / shift))
        np.testing.assert_allclose(grad[place], (up - down) / (2 * step), rtol=2e-3, atol=1e-4)


def test_dppo_masks_by_probability_and_direction_not_by_ratio():
    probs = [0.7, 0.3, 0.7, 0.3, 0.05, 0.5]  # the fifth has ratio 5, but moved by 0.04 only
    _, metrics, grad = run("dppo_tv", probs, [1, 1, -1, -1, 1, 1], delta=0.1)
    np.testing.assert_allclose(grad, [0, -0.6, 1.4, 0, -5, 0], rtol=1e-4)
    np.testing.assert_array_equal(metrics["clip_fraction"][0, :5], [1, 0, 0, 1, 0])


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    _, _, grad = run("cispo", [0.9, 0.5, 0.5, 0.5, 0.2, 0.5], [1] * 6, clip_low=1.0, clip_high=0.5)
    np.testing.assert_allclose(grad, [-1.5, -1, -1, -1, -1.5, 0], rtol=1e-5)


def test_reinforce_truncates_the_importance_weight():
    _, _, grad = run("reinforce", [0.25, 0.5, 0.5, 0.5, 0.5, 0.5], [1] * 6, max_ratio=2.0)
    np.testing.assert_allclose(grad, [-0.5, -1, -1, -1, -2, 0], rtol=1e-5)


def test_gspo_clips_whole_documents():
    probs = [0.6, 0.5, 0.5, 0.45, 0.01, 0.5]
    loss, _, grad = run("gspo", probs, [1, 1, 1, 1, 1, 1], clip_low=0.01, clip_high=0.01)
    # First document: s = 1.2^(1/3) > 1.01 with A > 0: no gradient. Second: s = 0.9^(1/2), inside the minimum.
    np.testing.assert_allclose(grad[:3], 0)
    s = 0.9**0.5
    np.testing.assert_allclose(grad[3:], [-s, -s, 0], rtol=1e-5)
    np.testing.assert_allclose(loss, [-1.01] * 3 + [-s, -s, 0], rtol=1e-5)


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_unknown_sampler_logprobs_off_the_mask_do_no_harm(name):
    objective = load_objective(name)
    mask = jnp.array([[True, False]])

    def total(logprobs):
        loss, _ = objective(
            logprobs, jnp.array([[-1.0, 0.0]]), jnp.array([[1.0, 1.0]]), mask, segments_BT=jnp.ones((1, 2), int)
        )
        return loss.sum()

    value, grad = jax.value_and_grad(total)(jnp.array([[-1.0, -1e4]]))
    assert np.isfinite(value) and np.isfinite(grad).all() and grad[0, 1] == 0


def test_sampler_metrics():
    logprobs = OLD + jnp.array([[0.1, -0.3, 0, 0, 0, 9.0]])
    metrics = sampler_metrics(logprobs, OLD, MASK)
    np.testing.assert_allclose(metrics["logprob_diff_max"], [[0.1, 0.3, 0, 0, 0, 0]], atol=1e-6)
    np.testing.assert_allclose(metrics["kl_sampler"][0, :2], [np.exp(0.1) - 1.1, np.exp(-0.3) - 0.7], atol=1e-6)
    assert (metrics["kl_sampler"] >= 0).all()


def test_objective_from_a_file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(
        "def flat(logprobs, old_logprobs, advantages, mask, *, segments_BT, scale=1.0):\n"
        "    return -scale * advantages * logprobs * mask, {}\n"
    )
    _, _, grad = run(f"{path}:flat", [0.5] * 6, [1.0] * 6, scale=3.0)
    np.testing.assert_allclose(grad, [-3] * 5 + [0])


def test_objective_from_a_module():
    assert load_objective("reterm_jax.losses.policy_gradient:cispo").func is OBJECTIVES["cispo"]


@pytest.mark.parametrize(
    ("name", "hyper", "message"),
    [
        ("ppo", {}, "'ppo' is unknown; one of cispo"),
        ("ppo_clip", {"clip": 0.2}, "unexpected keyword argument 'clip'"),
        ("nowhere.py:f", {}, "no file"),
        ("no_such_module:f", {}, "no_such_module"),
        ("reterm_jax.losses.sft:nothing", {}, "no function 'nothing'"),
    ],
)
def test_errors_name_the_objective_and_the_remedy(name, hyper, message):
    with pytest.raises(ValueError, match=message):
        load_objective(name, hyper)
