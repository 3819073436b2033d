"""The service over HTTP, with made-up rollouts: what a trainer gets, what is refused, and what a kill leaves."""

import asyncio
import dataclasses
import json
import threading
import time
import urllib.error
import urllib.request

import httpx2
import pytest
from made_up import MadeUpRoller
from made_up_service import IDENTITY, SCHEDULE, Running, opening

from reterm_jax.rollout.client import ServiceClient, ServiceError
from reterm_jax.rollout.http_server import HttpServer, ListenError, parse_address
from reterm_jax.rollout.protocol import HEADER, PROTOCOL, Validation, Weights, tokenizer_digest
from reterm_jax.rollout.service import RolloutService
from reterm_jax.rollout.store import GroupStore
from reterm_jax.rollout.wire import decode_group
from reterm_jax.serving.published import Manifest, Probe


@pytest.fixture
def publish(tmp_path):
    def published(version, tokenizer="words"):
        directory = tmp_path / f"{version}-{tokenizer}"
        directory.mkdir(exist_ok=True)
        (directory / "tokenizer.json").write_text(tokenizer)
        (directory / "manifest.json").write_text(Manifest(version, {}, Probe((1, 2), (-1.0,))).to_json())
        return Weights(version, str(directory))

    return published


@pytest.fixture
def start(tmp_path):
    running = []

    def started(name="groups", **options):
        running.append(Running(tmp_path / name, **options))
        return running[-1]

    yield started
    for service in running:
        if service._thread.is_alive():
            service.end()


def trainer(service, weights, first_step=0, **options):
    """A client that has opened a session and published."""
    client = ServiceClient(service.url, patience=5.0, log=lambda line: None, **options)
    client.open(opening(tokenizer=tokenizer_digest(weights.directory), first_step=first_step))
    client.weights(weights)
    return client


def get(url, token=""):
    request = urllib.request.Request(url, headers={"authorization": f"Bearer {token}"} if token else {})
    with urllib.request.urlopen(request, timeout=30) as response:
        return response.read().decode()


def test_a_trainer_gets_every_batch_and_each_token_its_version(start, publish):
    service = start()
    with trainer(service, publish(0)) as client:
        for step in range(4):
            ready, data = client.batch(step)
            groups = [decode_group(blob) for blob in data]
            assert ready.groups == ["root0", "root1", "fork0", "fork1"] and ready.step == step
            assert [group.kind for group in groups] == ["root", "root", "recovery", "recovery"]
            versions = {span.version for g in groups for a in g.attempts for span in a.transcript.spans[-1:]}
            assert all(step - 1 <= version <= step for version in versions)
            served = client.weights(publish(step + 1))
            assert served.problems == {}
            client.acknowledge(step + 1)
        assert service.service.store.counts() == {}
        with pytest.raises(ServiceError, match="refused .410.: no batch for step 4: .* training ends at step 4"):
            client.batch(4)
        with pytest.raises(ServiceError, match="refused .410.: no batch for step 0: those before 4 were consumed"):
            client.batch(0)


def test_groups_of_rounds_are_fetched_by_their_keys(start, publish):
    schedule = dataclasses.replace(SCHEDULE, states=0, step_tokens=40)
    service = start(schedule=schedule)
    with trainer(service, publish(0)) as client:
        ready, data = client.batch(0)
        assert ready.groups[-1] == "round1/root1" and decode_group(data[-1]).attempts[0].id.startswith("0/step0/round1")


def test_validation_groups_are_made_at_once_and_kept_nowhere(start, publish):
    service = start()
    with trainer(service, publish(0)) as client:
        client.batch(0)
        before = service.service.store.counts()
        group = client.validate(Validation("v", 3, "0/validation/v"))
        assert group.rewards == [0.0, 1.0, 0.0] and group.attempts[0].id == "0/validation/v/0"
        assert service.service.store.counts() == before
        with pytest.raises(ServiceError, match="task 'a' is none of the session's validation tasks"):
            client.validate(Validation("a", 3, "x"))


def test_a_service_that_is_started_again_goes_on_by_itself_and_rolls_nothing_twice(start, publish):
    first = start()
    client = trainer(first, publish(0))
    expected = client.batch(0)
    first.end()
    second = start()
    with ServiceClient(second.url, log=lambda line: None) as again:
        assert again.batch(0)[1] == expected[1]
        assert again.batch(1)[0].step == 1  # with version 0, as staleness allows
        assert [seed for seed in second.roller.begun if "step0" in seed] == []
        # A trainer that resumes before its checkpoint of step 1 was acknowledged asks for the same batch.
        again.open(opening(tokenizer=tokenizer_digest(publish(0).directory), first_step=1))
        assert second.service.store.acknowledged == 1


def test_a_trainer_waits_for_a_service_that_is_away(start, publish, tmp_path):
    service, said = start(), []
    client = trainer(service, publish(0))
    port = int(service.url.rpartition(":")[2])
    service.end()
    client._log = said.append

    async def back():
        await asyncio.sleep(0.5)
        with GroupStore(tmp_path / "groups", IDENTITY) as store:
            parts = service.service.parts
            async with RolloutService(dataclasses.replace(parts, store=store)) as again:
                server = HttpServer(again, ("127.0.0.1", port), "")
                got = await asyncio.to_thread(client.batch, 0)
                await server.close()
                return got

    waiting = asyncio.run(back())
    assert waiting[0].groups[0] == "root0"
    client._patience = 0.1
    with pytest.raises(ServiceError, match="did not answer for 0.1 s .*; start it, or correct config.rollout.service"):
        client.batch(1)
    assert said and "is away (" in said[0] and "is back" in said[1]


def test_a_service_that_is_ending_is_away_and_does_not_fail(start, publish):
    """Connections that are kept open outlive the server's socket."""
    service = start()
    with trainer(service, publish(0)), httpx2.Client(headers={HEADER: str(PROTOCOL)}) as kept:
        group = f"{service.url}/v1/batches/0/groups/none"
        assert kept.get(group).status_code == 410
        asyncio.run_coroutine_threadsafe(service.server.close(), service.loop).result(30)
        service.service.store.close()
        assert kept.get(group).status_code == 503


def test_samplers_that_fail_an_update_are_told_to_the_trainer(start, publish):
    service = start()
    with trainer(service, publish(0)) as client:
        service.sampler.fault = "does not serve version 1: stale"
        with pytest.raises(ServiceError, match="refused .502.: does not serve version 1: stale"):
            client.weights(publish(1))
        assert service.service.version == 0
        service.sampler.fault, service.sampler.problems = None, {"http://x": "gone"}
        assert client.weights(publish(1)).problems == {"http://x": "gone"}


def test_an_update_waits_for_a_sampler_that_is_started_again(start, publish):
    service = start(patience=30.0)
    with trainer(service, publish(0)) as client:
        service.sampler.fault = "no answer"
        threading.Timer(0.3, lambda: setattr(service.sampler, "serving", True)).start()
        begun = time.monotonic()
        client.weights(publish(1))
        assert service.service.version == 1 and time.monotonic() - begun > 0.25


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"identity": {**IDENTITY, "rl.forks": 3}},
            "409.: the service was started with rl.forks = 2, the trainer has 3",
        ),
        ({"tasks": {"a": "hash of a", "z": ""}}, "422.: 1 tasks are unknown to the service, the first one 'z'"),
        ({"tasks": {"a": "changed"}}, "422.: task 'a' is another one here .tasks/a.; give both the same tasks"),
        ({"validation": {"w": ""}}, "422.: 1 tasks are unknown to the service, the first one 'w'"),
        ({"first_step": -1}, "409.: .* the trainer is at step -1"),
        ({"first_step": "two"}, "400.: /v1/open: first_step: expected int, found str 'two'"),
    ],
)
def test_a_trainer_that_does_not_fit_is_refused(start, change, said):
    with ServiceClient(start().url) as client, pytest.raises(ServiceError, match="refused ." + said):
        client.open(opening(**change))


def test_weights_that_do_not_fit_are_refused(start, publish, tmp_path):
    service = start()
    with ServiceClient(service.url) as client:
        with pytest.raises(ServiceError, match="409.: no trainer has opened a session"):
            client.weights(publish(0))
        client.open(opening(tokenizer=tokenizer_digest(publish(0).directory)))
        with pytest.raises(ServiceError, match="409.: .* has tokenizer .*, but the trainer's is .*; publish from"):
            client.weights(publish(0, tokenizer="others"))
        with pytest.raises(
            ServiceError, match="422.: .*manifest.json: no such file; give a directory that the trainer"
        ):
            client.weights(Weights(0, str(tmp_path / "nothing")))
        with pytest.raises(ServiceError, match="422.: .* holds version 0, not 1; publish it anew"):
            client.weights(dataclasses.replace(publish(0), version=1))
        with pytest.raises(ServiceError, match="409.: the trainer's tokenizer is x, that of the groups here"):
            client.open(opening(tokenizer="x"))


def test_token_protocol_and_requests_are_checked(start):
    service = start(token="secret")
    assert get(f"{service.url}/healthz") == "ok\n"
    for path, token, status in (
        ("/metrics", "", 401),
        ("/status", "wrong", 401),
        ("/v1/batches/0", "secret", 426),
        ("/other", "secret", 426),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            get(service.url + path, token)
        assert refused.value.code == status, path
    assert "Rollout service" in get(f"{service.url}/status?token=secret")
    with ServiceClient(service.url, "wrong") as client, pytest.raises(ServiceError, match="401.: the token is missing"):
        client.open(opening())
    with ServiceClient(service.url, "secret") as client:
        for path, said in (("/v1/other", "404.: POST /v1/other is not served"), ("/v1/open", "400.: the body is not")):
            with pytest.raises(ServiceError, match=said):
                client._checked(client._http.post(service.url + path, content=b"{"))
        client._http.headers[HEADER] = "0"
        with pytest.raises(ServiceError, match="426.: the service speaks protocol 1, the request 0; install the same"):
            client.open(opening())


def test_what_is_no_service_of_this_protocol_is_named(start, monkeypatch):
    service = start()
    monkeypatch.setattr("reterm_jax.rollout.http_server.PROTOCOL", PROTOCOL + 1)
    with (
        ServiceClient(service.url) as client,
        pytest.raises(ServiceError, match="answers with protocol 2, the trainer"),
    ):
        client.open(opening())


@pytest.mark.parametrize("host", ["0.0.0.0", "10.1.2.3", "example.org"])
def test_other_machines_need_a_token(host):
    async def listen():
        HttpServer(None, (host, 1), "")

    with pytest.raises(ListenError, match="can be reached from other machines; set RETERM_ROLLOUT_TOKEN"):
        asyncio.run(listen())


@pytest.mark.parametrize("listen", ["8765", "host:", ":80", "host:http", "host:70000"])
def test_an_address_is_checked(listen):
    with pytest.raises(ListenError, match="write HOST:PORT"):
        parse_address(listen)


def test_metrics_and_status_tell_what_happened(start, publish):
    service = start()
    with trainer(service, publish(0)) as client:
        client.batch(1)
        lines = dict(
            line.rsplit(" ", 1) for line in get(f"{service.url}/metrics").splitlines() if not line.startswith("#")
        )
        assert lines['reterm_rollout_attempts_total{kind="root",status="solved"}'] == "4.0"
        assert lines['reterm_rollout_groups_total{kind="recovery"}'] == "4.0"
        assert lines["reterm_rollout_version"] == "0.0" and lines["reterm_rollout_stored_groups"] == "8.0"
        service.sampler.problems = {"http://down": "<gone>"}
        page = get(f"{service.url}/status")
        for text in ("step 1", "4 groups, whole", "root, failed", "recovery, solved", "&lt;gone&gt;", "sampler idle"):
            assert text in page, text


def test_an_error_in_a_batch_is_told_and_logged(start, publish):
    class Broken(MadeUpRoller):
        async def root_group(self, *arguments):
            raise ZeroDivisionError("a mistake")

    service = start(roller=Broken())
    with trainer(service, publish(0)) as client:
        with pytest.raises(ServiceError, match="500.: ZeroDivisionError: a mistake; the service's log has"):
            client.batch(0)
        assert json.loads(json.dumps(service.service.version)) == 0
