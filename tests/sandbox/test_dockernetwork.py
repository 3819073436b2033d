"""What sandboxes reach, by packets between containers: each case asks two servers on Docker's bridge."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
from sandbox_bench import Bench, why_not

from reterm_jax.sandbox import SandboxError, dockernetwork
from reterm_jax.sandbox.base import BASE_IMAGE
from reterm_jax.sandbox.dockerimage import connect
from reterm_jax.tasks.config import AgentConfig, Network, VerifierConfig
from reterm_jax.tasks.verifier import verify

pytestmark = pytest.mark.parametrize("bench", ["docker"], indirect=True)

PUBLIC, NONE = Network("public"), Network()
_SERVER = "import socket\ns = socket.create_server(('', 80))\nwhile True: s.accept()[0].sendall(b'served')"


@pytest.fixture
def servers() -> Iterator[list[str]]:
    """Addresses of two servers that say `served`."""
    if reason := why_not("docker"):
        pytest.skip(reason)
    client, _ = connect()
    made = [client.containers.run(BASE_IMAGE, ["python3", "-c", _SERVER], detach=True) for _ in range(2)]
    try:
        for container in made:
            container.reload()
        yield [container.attrs["NetworkSettings"]["IPAddress"] for container in made]
    finally:
        for container in made:
            container.remove(force=True)


def allow(bench: Bench, agent: Network, verifier: Network | None = None, **environment: Any) -> None:
    bench.set_task({str(agent): str(verifier)}, **environment)  # another environment
    networks = {"agent": AgentConfig(network=agent), "verifier": VerifierConfig(network=verifier or agent)}
    bench.task.config = dataclasses.replace(bench.task.config, **networks)


async def reached(bench: Bench, box: Any, hosts: list[str]) -> list[bool]:
    ask = "timeout 2 cat < /dev/tcp/{}/80"
    said = await asyncio.gather(*(bench.sh(box, f"{ask.format(host)} 2>/dev/null; true") for host in hosts))
    return [text == "served" for text in said]


async def test_networks_of_one_kind(bench: Bench, servers: list[str]) -> None:
    for network, found in ((PUBLIC, [True, True]), (NONE, [False, False])):
        allow(bench, network)
        assert await reached(bench, await bench.start(), servers) == found


async def test_an_allowlist_leads_to_its_hosts_alone(
    bench: Bench, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockernetwork.socket, "gethostbyname", {"allowed.example": servers[0]}.__getitem__)
    allow(bench, Network("allowlist", ("allowed.example",)))
    box = await bench.start()
    gateway = servers[0].rsplit(".", 1)[0] + ".1"
    assert await reached(bench, box, ["allowed.example", *servers]) == [True, True, False]
    for host in (gateway, "1.1.1.1"):
        assert "unreachable" in await bench.sh(box, f"cat < /dev/tcp/{host}/80 2>&1; true")
    undo = await bench.sh(box, "ip route add default dev eth0 2>&1; true", user="root")
    assert "not permitted" in undo
    fork = await bench.host.fork(await box.snapshot(), bench.task)
    assert await reached(bench, fork, ["allowed.example", servers[1]]) == [True, False]


@pytest.mark.parametrize("agent", [NONE, PUBLIC])
async def test_the_verifier_has_its_own_network(bench: Bench, servers: list[str], agent: Network) -> None:
    """The verdict is whether the tests reach the first server; the agent's network is the other kind."""
    verifier = PUBLIC if agent == NONE else Network("allowlist", (servers[1],))
    allow(bench, agent, verifier)
    bench.task.tests_dir = bench.directory / "tests"
    bench.task.tests_dir.mkdir()
    look = f'[ "$(timeout 2 cat < /dev/tcp/{servers[0]}/80)" = served ] && echo 1 || echo 0'
    (bench.task.tests_dir / "test.sh").write_text(f"({look}) > /logs/verifier/reward.txt\n")
    box = await bench.start()
    assert await reached(bench, box, servers) == ([False, False] if agent == NONE else [True, True])
    outcome = await verify(box, bench.task)
    assert outcome.reward == (1.0 if verifier == PUBLIC else 0.0), outcome
    assert await reached(bench, box, servers) == ([True, True] if verifier == PUBLIC else [False, True])


async def test_what_cannot_be_allowed_is_refused(bench: Bench) -> None:
    cases = (
        (Network("allowlist", ("*.example",)), {}, r"allowed_hosts: \*.example: patterns are not supported"),
        (Network("allowlist", ("nowhere.invalid",)), {}, "allowed_hosts: nowhere.invalid cannot be looked up"),
        (Network("allowlist", ("10.0.0.1",)), {"capabilities": ("NET_ADMIN",)}, "could undo network_mode"),
    )
    for network, environment, said in cases:
        allow(bench, network, **environment)
        with pytest.raises(SandboxError, match=f"task example.*{said}"):
            await bench.start()
