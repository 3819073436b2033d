"""What sandboxes reach, by packets between containers: each case asks two servers on Docker's bridge."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sandbox_bench import Bench, why_not

from reterm_jax.sandbox import SandboxError, SnapshotLost, dockercompose, dockernetwork
from reterm_jax.sandbox.base import BASE_IMAGE
from reterm_jax.sandbox.dockerimage import connect
from reterm_jax.tasks.config import AgentConfig, Network, VerifierConfig
from reterm_jax.tasks.verifier import verify

pytestmark = pytest.mark.parametrize("bench", ["docker"], indirect=True)

PUBLIC, NONE = Network("public"), Network()
ELSEWHERE = Network("allowlist", ("10.9.9.9",))
# Says `served` over TCP, and to each datagram.
_SERVER = """
import socket, threading
tcp, udp = socket.create_server(("", 80)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("", 80))
def datagrams():
    while True:
        udp.sendto(b"served", udp.recvfrom(9)[1])
threading.Thread(target=datagrams).start()
while True:
    tcp.accept()[0].sendall(b"served")
"""
# What comes of each way to a host: routed, and past the routes, by a socket that is bound to a network device.
_ASK = r"""
import socket, struct, sys
host = socket.gethostbyname(sys.argv[1]), 80
def ask(kind, device):
    with socket.socket(socket.AF_INET, kind) as found:
        found.settimeout(1)
        if device:
            found.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        found.connect(host)
        found.send(b"?")
        return found.recv(9).decode()
def packet_info(device):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as found:
        found.settimeout(1)
        chosen = struct.pack("iII", socket.if_nametoindex(device), 0, 0)
        found.sendmsg([b"?"], [(socket.IPPROTO_IP, 8, chosen)], 0, host)
        return found.recv(9).decode()
devices = [name for _, name in socket.if_nameindex() if name != "lo"]
ways = [(ask, kind, device) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM) for device in ["", *devices]]
for function, *arguments in ways + [(packet_info, device) for device in devices]:
    try:
        print(function(*arguments))
    except OSError as error:
        print(type(error).__name__, error)
"""


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
        yield [container.attrs["NetworkSettings"]["Networks"]["bridge"]["IPAddress"] for container in made]
    finally:
        for container in made:
            container.remove(force=True)


def allow(bench: Bench, agent: Network, verifier: Network | None = None, files: Any = None, **environment: Any) -> None:
    bench.set_task({str(agent): str(verifier), **(files or {})}, **environment)  # another environment
    networks = {"agent": AgentConfig(network=agent), "verifier": VerifierConfig(network=verifier or agent)}
    bench.task.config = dataclasses.replace(bench.task.config, **networks)


def judge(bench: Bench, script: str) -> None:
    bench.task.tests_dir = bench.directory / "tests"
    bench.task.tests_dir.mkdir(exist_ok=True)
    (bench.task.tests_dir / "test.sh").write_text(script)


async def answers(bench: Bench, box: Any, host: str, **options: Any) -> list[str]:
    return (await bench.sh(box, f"python3 - {host} <<'END'\n{_ASK}\nEND\n", timeout=60, **options)).splitlines()


async def reached(bench: Bench, box: Any, hosts: list[str], **options: Any) -> list[bool]:
    """Whether any way leads there."""
    return ["served" in await answers(bench, box, host, **options) for host in hosts]


async def test_networks_of_one_kind(bench: Bench, servers: list[str]) -> None:
    for network, mode, found in ((PUBLIC, "bridge", [True, True]), (NONE, "none", [False, False])):
        allow(bench, network)
        box = await bench.start()
        assert await reached(bench, box, servers) == found
        assert box._container.attrs["HostConfig"]["NetworkMode"] == mode


async def test_an_allowlist_leads_to_its_hosts_alone(
    bench: Bench, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockernetwork.socket, "gethostbyname", {"allowed.example": servers[0]}.__getitem__)
    allow(bench, Network("allowlist", ("allowed.example",)))
    box = await bench.start()
    assert set(await answers(bench, box, "allowed.example")) == {"served"}
    assert await reached(bench, box, servers) == [True, False]
    assert await reached(bench, box, servers, user="nobody") == [True, False]
    gateway = servers[0].rsplit(".", 1)[0] + ".1"  # the machine of the daemon
    for host in (gateway, "1.1.1.1"):
        said = await answers(bench, box, host)
        assert len(said) >= 5 and all("unreachable" in text or "not permitted" in text for text in said), said
    assert "not permitted" in await bench.sh(box, "nft flush ruleset 2>&1; true", user="root")
    fork = await bench.host.fork(await box.snapshot(), bench.task)
    assert await reached(bench, fork, ["allowed.example", servers[1]]) == [True, False]


@pytest.mark.parametrize("agent", [NONE, PUBLIC])
async def test_the_verifier_has_its_own_network(bench: Bench, servers: list[str], agent: Network) -> None:
    """The verdict is whether the tests reach the first server; the agent's network is the other kind."""
    verifier = PUBLIC if agent == NONE else Network("allowlist", (servers[1],))
    allow(bench, agent, verifier)
    look = f'[ "$(timeout 2 cat < /dev/tcp/{servers[0]}/80)" = served ] && echo 1 || echo 0'
    judge(bench, f"({look}) > /logs/verifier/reward.txt\n")
    box = await bench.start()
    assert await reached(bench, box, servers) == ([False, False] if agent == NONE else [True, True])
    await bench.sh(box, "setsid sleep 85.5 >/dev/null 2>&1 &")
    outcome = await verify(box, bench.task)
    assert outcome.reward == (1.0 if verifier == PUBLIC else 0.0), outcome
    assert await reached(bench, box, servers) == ([True, True] if verifier == PUBLIC else [False, True])
    assert await bench.sh(box, "pgrep -fc '^sleep 85.5'") == "1\n", "a server that the agent has started would run on"
    host: Any = bench.host
    owned = host.client.containers.list(all=True, filters={"label": f"reterm.owner={host.directory.id}"})
    assert [container.name for container in owned] == [box.id], "no helper is left"


async def test_the_network_can_change_to_and_fro(bench: Bench, servers: list[str]) -> None:
    allow(bench, PUBLIC, ELSEWHERE)
    box = await bench.start()
    for phase, found in (("verifier", [False, False]), ("agent", [True, True]), ("verifier", [False, False])):
        await box.set_network(phase)
        assert await reached(bench, box, servers) == found


async def test_a_network_that_comes_later_has_the_name_servers_of_the_bridge(bench: Bench) -> None:
    allow(bench, PUBLIC)
    files = [await bench.sh(await bench.start(), "cat /etc/resolv.conf")]
    allow(bench, NONE, PUBLIC)
    box = await bench.start()
    await box.set_network("verifier")
    assert [await bench.sh(box, "cat /etc/resolv.conf")] == files


@pytest.mark.parametrize(("agent", "verifier"), [(NONE, PUBLIC), (ELSEWHERE, None)])
async def test_process_1_of_a_fork_finds_no_network(
    bench: Bench, servers: list[str], agent: Network, verifier: Network | None
) -> None:
    """It is a bash that starts a `sleep`, and both are files that the agent can write."""
    allow(bench, agent, verifier)
    box = await bench.start()
    ask = f"{{ timeout 0.2 cat < /dev/tcp/{servers[0]}/80; }} >> /tmp/got 2>> /tmp/said"
    await bench.sh(
        box,
        "mv /usr/bin/sleep /usr/bin/other && cat > /usr/bin/sleep <<'END' && chmod +x /usr/bin/sleep\n"
        f'#!/bin/bash\nfor try in {{1..200}}; do {ask}; other 0.01; done; exec other "$@"\nEND',
    )
    fork = await bench.host.fork(await box.snapshot(), bench.task)
    await asyncio.sleep(2)
    assert await bench.sh(fork, "cat /tmp/got; [ -s /tmp/said ]") == ""


@pytest.mark.parametrize("verifier", [PUBLIC, ELSEWHERE])
async def test_a_container_that_has_ended_is_an_error_of_the_environment(bench: Bench, verifier: Network) -> None:
    allow(bench, NONE, verifier)
    judge(bench, "echo 1 > /logs/verifier/reward.txt")
    host: Any = bench.host
    box, other = await bench.start(), await bench.start()
    snapshot = await box.snapshot()
    host.client.api.kill(box.id)
    with pytest.raises(SandboxError, match=f"container {box.id} has ended while its network was set"):
        await box.set_network("verifier")
    run = other.exec

    async def exec_and_end(*arguments: Any, **options: Any) -> Any:
        done = await run(*arguments, **options)
        host.client.api.kill(other.id)
        return done

    other.exec = exec_and_end
    assert (await verify(other, bench.task)).status == "env_error"
    host._snapshots[snapshot.id] = dataclasses.replace(host._snapshots[snapshot.id], sentinel="other")
    with pytest.raises(SandboxError, match="not complete"):  # process 1 ends, before the network is set or after it
        await bench.sh(await host.fork(snapshot, bench.task), "true")


async def test_without_the_base_image_filters_are_refused(
    bench: Bench, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    host: Any = bench.host
    allow(bench, Network("allowlist", (servers[0],)))
    snapshot = await (await bench.start()).snapshot()

    def pull(*_: Any, **__: Any) -> None:
        raise AssertionError("a registry was asked for it")

    monkeypatch.setattr(type(host.client.images), "pull", pull)
    monkeypatch.setattr(dockernetwork, "BASE_IMAGE", "reterm-missing")
    for make in (bench.start, lambda: host.fork(snapshot, bench.task)):
        with pytest.raises(SandboxError, match="reterm-missing, which is missing: bash .*build.sh") as raised:
            await make()
        assert not isinstance(raised.value, SnapshotLost)


async def test_filters_that_cannot_be_set_are_an_error(
    bench: Bench, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockernetwork, "_FILTERS", "nonsense")
    allow(bench, Network("allowlist", (servers[0],)))
    with pytest.raises(SandboxError, match=r"kernel.*have netfilter \(nf_tables\)\? .*syntax error"):
        await bench.start()


async def test_what_cannot_be_allowed_is_refused(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dockercompose, "_resolve", lambda file, where: yaml.safe_load(Path(file).read_text()))

    def adds(service: str, name: str) -> dict[str, str]:
        services = {"main": {}, "db": {"image": BASE_IMAGE}}
        services[service]["cap_add"] = [name]
        return {"compose.yaml": yaml.safe_dump({"services": services})}

    undo = r"\['{}'\] the agent could undo network_mode"
    ten = ("10.0.0.1",)
    cases: tuple[tuple[tuple[str, ...], dict[str, Any], str], ...] = (
        (("*.example",), {}, r"allowed_hosts: \*.example: patterns are not supported"),
        (("nowhere.invalid",), {}, "allowed_hosts: nowhere.invalid cannot be looked up"),
        (ten, {"capabilities": ("NET_ADMIN",)}, "environment.capabilities " + undo.format("NET_ADMIN")),
        (ten, {"capabilities": ("cap_net_admin",)}, "environment.capabilities " + undo.format("NET_ADMIN")),
        (ten, {"files": adds("main", "NET_ADMIN")}, "services.main.cap_add " + undo.format("NET_ADMIN")),
        (ten, {"files": adds("main", "cap_net_raw")}, "services.main.cap_add " + undo.format("NET_RAW")),
        (ten, {"files": adds("db", "all")}, "services.db.cap_add " + undo.format("ALL")),
    )
    for hosts, environment, said in cases:
        allow(bench, Network("allowlist", hosts), **environment)
        with pytest.raises(SandboxError, match=f"task example.*{said}"):
            await bench.start()


async def test_sidecars_have_the_network_of_the_agent(
    bench: Bench, servers: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dockercompose, "_resolve", lambda file, where: yaml.safe_load(Path(file).read_text()))
    sidecar = {"image": BASE_IMAGE, "command": "sleep 1000", "cap_add": ["cap_sys_nice"]}
    files = {"compose.yaml": yaml.safe_dump({"services": {"main": {}, "db": sidecar}})}
    allow(bench, Network("allowlist", (servers[0],)), NONE, files)
    box = await bench.start()
    host: Any = bench.host
    db = host.client.containers.get(f"{box.id}-db")

    def asked() -> list[bool]:
        return [b"served" in db.exec_run(["python3", "-c", _ASK, server]).output for server in servers]

    assert asked() == [True, False]
    frames = "import socket; socket.socket(socket.AF_PACKET, socket.SOCK_RAW)"
    assert b"PermissionError" in db.exec_run(["python3", "-c", frames]).output
    await box.set_network("verifier")
    assert asked() == [False, False]
    snapshot = await box.snapshot()
    image = host._snapshots[snapshot.id]
    lost = dataclasses.replace(image.services[0], image="reterm-missing")
    host._snapshots[snapshot.id] = dataclasses.replace(image, services=(lost,))
    with pytest.raises(SandboxError, match="No such image: reterm-missing") as raised:
        await host.fork(snapshot, bench.task)
    assert not isinstance(raised.value, SnapshotLost)
