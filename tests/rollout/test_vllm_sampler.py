"""The sampler over fake servers: what a real one seldom does, and what must not be lost when it does."""

import asyncio
import time

import pytest
from fake_vllm import GENERATE, LOAD, STOP, FakeVllm

from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.rollout.samplers.vllm import VllmSampler
from reterm_jax.rollout.samplers.vllm_server import Limits
from reterm_jax.serving.published import Manifest, Probe, PublishedError

SHORT = Limits(connect=1.0, generate=1.5, control=1.0, load=1.0, probe=1.0)


@pytest.fixture
def fakes():
    made = []

    def make(count=1):
        made.extend(FakeVllm() for _ in range(count))
        return made[-count:]

    yield make
    for fake in made:
        fake.close()


@pytest.fixture
def published(tmp_path):
    """Directories of versions 1 and 2, whose probes differ by 1 nat."""
    directories = {}
    for version in (1, 2):
        directory = tmp_path / str(version)
        directory.mkdir()
        manifest = Manifest(version, {}, Probe((1, 2, 3), (-1.0 - version, -2.0 - version)))
        (directory / "manifest.json").write_text(manifest.to_json())
        directories[version] = directory
    return directories


def run(fakes, published, test, **options):
    async def go():
        options_ = {"limits": SHORT, "retry_after": 0.05, "patience": 5.0, **options}
        async with VllmSampler([fake.url for fake in fakes], stop_id=STOP, **options_) as sampler:
            if published is not None:
                await sampler.update(published[1])
            return await test(sampler)

    return asyncio.run(asyncio.wait_for(go(), 30))


def turn(sampler, session="a", ids=(1, 2, 3), parent=None, max_tokens=4):
    return sampler.generate(ids, max_tokens=max_tokens, temperature=0.7, seed=3, session=session, parent=parent)


def test_ids_logprobs_stop_and_version(fakes, published):
    (fake,) = fakes()

    async def test(sampler):
        return await turn(sampler), await turn(sampler, max_tokens=1), await turn(sampler, ids=range(63))

    whole, cut, last = run([fake], published, test)
    assert (whole.ids, whole.logprobs, whole.stop, whole.version) == ([3, STOP], [-0.5, -0.5], "stop", 1)
    assert (cut.ids, cut.stop) == ([3], "length")
    assert len(last.ids) == 1  # 64 is the context
    body = next(body for path, body in fake.calls if path == GENERATE and body["sampling_params"]["max_tokens"] == 4)
    params = body["sampling_params"]
    assert body["token_ids"] == [1, 2, 3] and params["temperature"] == 0.7 and params["seed"] == 3
    assert (params["top_p"], params["top_k"], params["min_p"], params["repetition_penalty"]) == (1.0, 0, 0.0, 1.0)
    assert params["stop_token_ids"] == [STOP] and params["ignore_eos"]


def test_on_cpu_no_seed_is_sent(fakes, published):
    """With one vLLM 0.32's engine ends there as soon as a prompt is computed in parts."""
    (fake,) = fakes()
    fake.device = "cpu"
    run([fake], published, turn)
    assert all("seed" not in body["sampling_params"] for path, body in fake.calls if path == GENERATE)


@pytest.mark.parametrize("fault", [500, 503, "cut", "close", "abort", "garbage", "hang"])
def test_one_failure_loses_no_turn_and_no_server(fakes, published, fault):
    (fake,) = fakes()

    async def test(sampler):
        fake.faults[GENERATE] = [fault]
        done = await turn(sampler)
        return done, sampler.retried, sampler.problems, fake.paths().count(LOAD)

    done, retried, problems, loads = run([fake], published, test)
    assert done.ids == [3, STOP]
    assert (retried, problems, loads) == (1, {}, 1)


def test_a_dying_server_gives_its_turns_to_the_others(fakes, published):
    first, second = fakes(2)
    first.delay = second.delay = 0.3

    async def test(sampler):
        turns = [asyncio.ensure_future(turn(sampler, f"s{i}", (i + 1, 2))) for i in range(8)]
        await asyncio.sleep(0.15)
        assert first.running and second.running
        first.sticky[GENERATE] = first.sticky["/server_info"] = "close"
        await asyncio.to_thread(first.close)
        first.go.set()
        more = [asyncio.ensure_future(turn(sampler, f"m{i}", (i + 11, 2))) for i in range(8)]
        return await asyncio.gather(*turns, *more), sampler.problems

    done, problems = run([first, second], published, test)
    assert len(done) == 16 and all(completion.version == 1 for completion in done)
    assert list(problems) in ([], [first.url])


def test_a_restarted_server_is_given_the_weights_again(fakes, published):
    (fake,) = fakes()
    restarted = []

    async def restart(url):
        restarted.append(url)
        fake.sticky.clear()

    async def test(sampler):
        fake.sticky[GENERATE] = "close"
        fake.version = "default"
        before = sampler.away_seconds
        await asyncio.sleep(0.05)
        assert sampler.serving and sampler.away_seconds == before
        done = await turn(sampler)
        assert sampler.serving and sampler.away_seconds > before + 0.05  # retry_after
        return done

    assert run([fake], published, test, restart=restart).version == 1
    assert restarted == [fake.url] and fake.paths().count(LOAD) == 2


def test_answers_of_weights_that_nobody_published_are_not_used(fakes, published):
    (fake,) = fakes()

    async def test(sampler):
        fake.version = "default"  # as after a restart by hand
        done = await turn(sampler)
        return done, sampler.retried

    done, retried = run([fake], published, test)
    assert (done.version, retried) == (1, 3) and fake.paths().count(LOAD) == 2


def test_groups_stay_on_one_server_and_spread_over_all(fakes, published):
    servers = fakes(2)

    async def test(sampler):
        for group in range(4):
            for member in range(3):
                await turn(sampler, f"{group}-{member}", (group, 7))
                await turn(sampler, f"{group}-{member}", (group, 7, 1, 2))
            await turn(sampler, f"fork-{group}", (group, 7, 1, 2, 3), parent=f"{group}-0")

    run(servers, published, test)
    groups = [{body["token_ids"][0] for path, body in fake.calls if path == GENERATE and body["token_ids"][1] == 7}
              for fake in servers]  # fmt: skip
    assert sorted(map(len, groups)) == [2, 2] and not groups[0] & groups[1]


def test_bad_requests_and_overflow_are_not_retried(fakes, published):
    (fake,) = fakes()

    async def test(sampler):
        with pytest.raises(SamplerError, match="64 prompt tokens do not fit 64"):
            await turn(sampler, ids=range(64))
        fake.faults[GENERATE] = [400]
        with pytest.raises(SamplerError, match="refused the request"):
            await turn(sampler)
        assert sampler.retried == 0

    run([fake], published, test)


def test_a_turn_that_breaks_every_server_is_given_up(fakes, published):
    servers = fakes(2)

    async def test(sampler):
        for fake in servers:
            fake.sticky[GENERATE] = "cut"
        with pytest.raises(SamplerError, match="given up after 8|no server within 1 s"):
            await turn(sampler)

    run(servers, published, test, patience=1.0)


def test_an_update_keeps_running_turns_and_hands_out_no_answer_before_the_probe(fakes, published):
    (fake,) = fakes()
    fake.delay = 0.3

    async def test(sampler):
        running = asyncio.ensure_future(turn(sampler))
        await asyncio.sleep(0.1)
        begun = len(fake.calls)
        await sampler.update(published[2])
        order = fake.paths()[begun:]
        old, new = await running, await turn(sampler)
        return order, old.version, new.version

    order, old, new = run([fake], published, test)
    steps = ["/pause", LOAD, "/reset_prefix_cache", "/update_weight_version", "/resume", GENERATE]
    assert [path for path in order if path in steps] == steps
    assert (old, new) == (1, 2)


def test_turns_wait_for_their_place_and_an_update_does_not(fakes, published):
    (fake,) = fakes()
    fake.delay = 0.4

    async def test(sampler):
        begun = len(fake.calls)
        turns = [asyncio.ensure_future(turn(sampler, session)) for session in "abc"]
        await asyncio.sleep(0.1)
        await sampler.update(published[2])
        await asyncio.gather(*turns)
        return [path for path, body in fake.calls[begun:] if "prompt_logprobs" not in str(body)]

    order = [path for path in run([fake], published, test, turns=1) if path in (GENERATE, "/pause")]
    assert order == [GENERATE, "/pause", GENERATE, GENERATE]


def test_a_stale_server_is_refused_and_the_others_go_on(fakes, published):
    stale, good = fakes(2)

    async def test(sampler):
        stale.stale = True
        stale.delay = good.delay = 0.2
        running = [asyncio.ensure_future(turn(sampler, f"s{i}", (i + 1, 2))) for i in range(4)]
        await asyncio.sleep(0.1)
        await sampler.update(published[2])
        problems = sampler.problems
        done = await asyncio.gather(*running)
        later = await asyncio.gather(*(turn(sampler, f"l{i}", (i + 11, 2)) for i in range(4)))
        assert not stale.go.is_set()  # nothing runs on it
        assert sampler.retried == 2
        stale.stale = False
        while sampler.problems:
            await asyncio.sleep(0.02)
        return problems, done, later

    problems, done, later = run([stale, good], published, test, retry_after=0.8)
    assert list(problems) == [stale.url] and "differ by 1.000 nats" in problems[stale.url]
    assert len(done) == 4 and {completion.version for completion in later} == {2}
    assert stale.go.is_set() and stale.version == "2"


@pytest.mark.parametrize("path", ["/pause", LOAD, "/reset_prefix_cache", "/update_weight_version", "/resume", GENERATE])
@pytest.mark.parametrize("fault", [500, "hang"])
def test_an_update_that_fails_or_hangs_anywhere_stops_within_its_limit(fakes, published, path, fault):
    bad, good = fakes(2)

    async def test(sampler):
        bad.faults[path] = [fault]
        began = time.monotonic()
        with pytest.raises(SamplerError, match=f"1 of 2 servers do not serve .*{path}"):
            await sampler.update(published[2])
        assert time.monotonic() - began < 8
        assert list(sampler.problems) == [bad.url]
        done = await turn(sampler)
        assert done.version == 2
        while sampler.problems:  # it is taken back
            await asyncio.sleep(0.02)
        assert bad.loaded.version == 2 and bad.go.is_set()

    run([bad, good], published, test, on_failure="stop")


def test_all_servers_failing_is_an_error_in_either_mode(fakes, published):
    servers = fakes(2)

    async def test(sampler):
        for fake in servers:
            fake.sticky[LOAD] = 500
        with pytest.raises(SamplerError, match="2 of 2 servers"):
            await sampler.update(published[2])
        with pytest.raises(SamplerError, match="no server within 0.3 s"):
            await turn(sampler)

    run(servers, published, test, patience=0.3)


def test_a_cancelled_turn_leaves_everything_in_order(fakes, published):
    (fake,) = fakes()
    fake.delay = 0.5

    async def test(sampler):
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(turn(sampler), 0.1)
        await sampler.end("a")
        await sampler.end("unknown")
        fake.delay = 0.0
        assert (await turn(sampler, "b")).ids == [3, STOP]
        assert sampler.problems == {}

    run([fake], published, test)


def test_what_cannot_train_is_refused(fakes, published, tmp_path):
    (fake,) = fakes()
    fake.mode = "raw_logprobs"

    async def wrong_mode(sampler):
        with pytest.raises(SamplerError, match="--logprobs-mode processed_logprobs"):
            await sampler.update(published[1])

    async def no_weights(sampler):
        with pytest.raises(SamplerError, match="call update first"):
            await turn(sampler)
        with pytest.raises(PublishedError, match="no such file"):
            await sampler.update(tmp_path)

    run([fake], None, wrong_mode)
    run([fake], None, no_weights)
    with pytest.raises(SamplerError, match="urls"):
        VllmSampler([], stop_id=STOP)
