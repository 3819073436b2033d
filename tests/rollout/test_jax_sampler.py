"""The in-process sampler against the full forward pass, and its independence of what runs beside a request."""

import asyncio

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from reterm_jax.policy import forward
from reterm_jax.policy.config import QwenConfig
from reterm_jax.policy.spec import init_params
from reterm_jax.rollout.samplers import jax as jax_sampler
from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.rollout.samplers.jax import JaxSampler

STOP = 39


@pytest.fixture(autouse=True)
def short_lengths(monkeypatch):
    """So that attempts outgrow one decode call's cache length after another within these tests."""
    monkeypatch.setattr(jax_sampler, "_LENGTHS", (24, 40))


@pytest.fixture(scope="module")
def policy():
    config = QwenConfig.from_hf(
        {
            "model_type": "qwen3_5_text",
            "vocab_size": 40,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 8,
            "linear_conv_kernel_dim": 4,
            "full_attention_interval": 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25},
            "tie_word_embeddings": True,
        },
        compute_dtype="float32",
        initializer_range=0.3,
    )
    return config, init_params(config, jax.random.key(0))


def make(policy, slots=8, **kwargs):
    config, params = policy
    return JaxSampler(params, config, stop_id=STOP, slots=slots, max_len=96, steps=4, **kwargs)


def logits_of(policy, ids):
    """[T,V] by one full forward pass."""
    config, params = policy
    tokens_BT = jnp.asarray([ids])
    hidden_BTD = forward.hidden_states(
        params, config, tokens_BT, jnp.ones_like(tokens_BT), jnp.arange(tokens_BT.shape[1])[None]
    )
    return (hidden_BTD @ forward.head(params, config).T)[0]


def logprobs_of(policy, ids, temperature=1.0):
    """log p(ids[t] | ids[:t]); index 0 is meaningless."""
    logits_TV = logits_of(policy, ids[:-1]) / temperature
    return np.concatenate(
        [[0.0], jnp.take_along_axis(jax.nn.log_softmax(logits_TV), jnp.asarray(ids[1:])[:, None], 1)[:, 0]]
    )


def prompt(seed, n=20):
    return np.random.default_rng(seed).integers(0, STOP, n).tolist()


def test_logprobs_are_those_of_the_policy_over_two_turns(policy):
    async def turns():
        sampler = make(policy)
        ids = prompt(0)
        first = await sampler.generate(ids, max_tokens=12, temperature=0.7, seed=3, session="a")
        ids = ids + first.ids + prompt(1, 5)
        second = await sampler.generate(ids, max_tokens=12, temperature=0.7, seed=4, session="a")
        return first, ids + second.ids, second, sampler.tokens_prefilled

    first, ids, second, prefilled = asyncio.run(turns())
    expected = logprobs_of(policy, ids, 0.7)
    np.testing.assert_allclose(first.logprobs, expected[20 : 20 + len(first.ids)], atol=2e-5)
    np.testing.assert_allclose(second.logprobs, expected[-len(second.ids) :], atol=2e-5)
    assert prefilled == 25  # the second turn paid for its new tokens only


def test_what_is_sampled_does_not_depend_on_what_runs_beside_it(policy):
    async def one(sampler, index):
        completion = await sampler.generate(
            prompt(index, 5 + index), max_tokens=20, temperature=1.0, seed=index, session=str(index)
        )
        await sampler.end(str(index))
        return completion

    async def together():
        sampler = make(policy)
        return await asyncio.gather(*(one(sampler, i) for i in range(9)))

    async def alone():
        sampler = make(policy)
        return [await one(sampler, i) for i in range(9)]

    assert asyncio.run(together()) == asyncio.run(alone())


def test_equal_prompts_are_computed_once_and_forks_diverge(policy):
    async def forks():
        sampler = make(policy, slots=8)
        done = await asyncio.gather(
            *(
                sampler.generate(prompt(0, 30), max_tokens=15, temperature=1.0, seed=i, session=f"f{i}")
                for i in range(6)
            )
        )
        return done, sampler.tokens_prefilled

    done, prefilled = asyncio.run(forks())
    assert prefilled == 30
    assert len({tuple(completion.ids) for completion in done}) > 1
    for completion in done:
        expected = logprobs_of(policy, prompt(0, 30) + completion.ids)
        np.testing.assert_allclose(completion.logprobs, expected[30:], atol=2e-5)


def test_sampling_follows_the_distribution(policy):
    async def draws():
        sampler = make(policy, slots=8)
        done = await asyncio.gather(
            *(sampler.generate(prompt(2), max_tokens=1, temperature=1.0, seed=i, session=f"s{i}") for i in range(400))
        )
        return [completion.ids[0] for completion in done]

    counts = np.bincount(asyncio.run(draws()), minlength=40)
    expected = 400 * np.asarray(jax.nn.softmax(logits_of(policy, prompt(2))[-1]))
    big = expected > 5
    chi2 = ((counts[big] - expected[big]) ** 2 / expected[big]).sum()
    assert chi2 < 3 * big.sum() + 10


def test_ends_at_the_stop_token_or_the_limit(policy):
    async def run():
        sampler = make(policy)
        return [
            await sampler.generate(prompt(i), max_tokens=40, temperature=2.0, seed=i, session=str(i)) for i in range(8)
        ]

    for completion in asyncio.run(run()):
        assert STOP not in completion.ids[:-1]
        assert (completion.stop == "stop") == (completion.ids[-1] == STOP)
        assert completion.stop == "stop" or len(completion.ids) == 40


def test_update_serves_the_new_weights_and_forgets_the_caches(policy):
    config, params = policy
    other = init_params(config, jax.random.key(1))

    async def run():
        sampler = make(policy)
        await sampler.generate(prompt(0), max_tokens=4, temperature=1.0, seed=0, session="a")
        sampler.update(other, 7)
        return await sampler.generate(prompt(0), max_tokens=4, temperature=1.0, seed=0, session="a")

    completion = asyncio.run(run())
    assert completion.version == 7
    expected = logprobs_of((config, other), prompt(0) + completion.ids)
    np.testing.assert_allclose(completion.logprobs, expected[20:], atol=2e-5)


def test_a_cancelled_request_leaves_the_sampler_in_order(policy):
    async def run():
        sampler = make(policy, slots=8)
        running = asyncio.create_task(
            sampler.generate(prompt(0), max_tokens=60, temperature=1.0, seed=0, session="slow")
        )
        waiting = asyncio.create_task(
            sampler.generate(prompt(1), max_tokens=60, temperature=1.0, seed=0, session="queued")
        )
        await asyncio.sleep(0.01)
        running.cancel()
        waiting.cancel()
        await asyncio.gather(running, waiting, return_exceptions=True)
        await sampler.end("slow")
        await sampler.idle()
        sampler.update(sampler.params, 1)  # refused while a call runs
        after = await sampler.generate(prompt(2), max_tokens=8, temperature=1.0, seed=5, session="next")
        return after

    completion = asyncio.run(run())
    expected = logprobs_of(policy, prompt(2) + completion.ids)
    np.testing.assert_allclose(completion.logprobs, expected[20:], atol=2e-5)


def test_a_prompt_that_fills_the_context_is_refused(policy):
    with pytest.raises(SamplerError, match="96 prompt tokens do not fit"):
        asyncio.run(make(policy).generate(prompt(0, 96), max_tokens=1, temperature=1.0, seed=0, session="a"))
