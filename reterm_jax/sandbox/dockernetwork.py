"""What a container may reach: all, nothing, or chosen hosts; for the verifier it may be something else.

Where Docker's own `none` or `bridge` does for the sandbox's whole life, it gets that. Else it stands on the bridge and
its routes are set by a helper in its network namespace, before any command runs in it and again before the verifier.
Nothing in the sandbox can change routes: it has no capability to. The addresses of chosen hosts are looked up once, on
this machine, and stand in /etc/hosts: the sandbox reaches no name server, through which anything could leak.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from reterm_jax.sandbox.base import BASE_IMAGE, SandboxError
from reterm_jax.tasks.config import Network, Phase

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

_CHANGES_ROUTES = ("NET_ADMIN", "NET_RAW", "SYS_ADMIN", "ALL")


@dataclass(frozen=True)
class Networks:
    """The networks of one task's sandboxes by phase; `addresses` of the hosts that they name."""

    by_phase: Mapping[Phase, Network]
    addresses: Mapping[str, str]

    @property
    def mode(self) -> str:
        """Docker's network mode."""
        return "none" if all(network.mode == "no-network" for network in self.by_phase.values()) else "bridge"

    @property
    def has_routes(self) -> bool:
        """Whether Docker's mode alone does not do."""
        return len(set(self.by_phase.values())) > 1 or any(n.mode == "allowlist" for n in self.by_phase.values())

    @property
    def extra_hosts(self) -> dict[str, str]:
        """For /etc/hosts."""
        return {host: address for host, address in self.addresses.items() if host != address}


def read(task: Task) -> Networks:
    """Blocking: looks names up. Raises SandboxError naming the task and a host that cannot be allowed."""
    networks = Networks({phase: task.config.network(phase) for phase in get_args(Phase)}, {})
    asked = sorted(set(_CHANGES_ROUTES).intersection(task.config.environment.capabilities))
    if networks.has_routes and asked:
        raise SandboxError(
            f"task {task.id}: with environment.capabilities {asked} the agent could undo network_mode; remove one"
        )
    hosts = {host for network in networks.by_phase.values() for host in network.hosts}
    return Networks(networks.by_phase, {host: _address(host, task.id) for host in sorted(hosts)})


def _address(host: str, task_id: str) -> str:
    where = f"task {task_id}: allowed_hosts: {host}"
    if "*" in host or "/" in host:
        raise SandboxError(f"{where}: patterns are not supported; name each host")
    try:
        return socket.gethostbyname(host)  # IPv4, as Docker's bridge
    except (OSError, UnicodeError) as error:
        raise SandboxError(f"{where} cannot be looked up: {error}") from error


def apply(client: Any, container: Any, networks: Networks, phase: Phase) -> None:
    """Lets a running container reach what it may in `phase`. Blocking. Raises SandboxError where that fails."""
    from docker import errors

    container.reload()
    bridge = container.attrs["NetworkSettings"]["Networks"]["bridge"]
    script = "\n".join(
        ["set -e", "ip route flush table main", "ip -6 route flush table main", *_routes(networks, phase, bridge)]
    )
    try:
        client.containers.run(
            BASE_IMAGE,
            ["bash", "-c", script],
            network_mode=f"container:{container.id}",
            cap_drop=["ALL"],
            cap_add=["NET_ADMIN"],
            labels=container.labels,
            remove=True,
            stderr=True,
        )
    except errors.ContainerError as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        raise SandboxError(f"container {container.name}: its network cannot be set: {said}") from error
    except errors.ImageNotFound as error:
        raise SandboxError(
            f"container {container.name}: its network is set by a program of the image {BASE_IMAGE}, which is missing; "
            "build it: bash third_party/sandbox_base/build.sh"
        ) from error


def _routes(networks: Networks, phase: Phase, bridge: Mapping[str, Any]) -> list[str]:
    network, gateway = networks.by_phase[phase], bridge["Gateway"]
    subnet = ipaddress.ip_network(f"{bridge['IPAddress']}/{bridge['IPPrefixLen']}", strict=False)
    if network.mode == "public":
        return [f"ip route add {subnet} dev eth0", f"ip route add default via {gateway}"]
    addresses = sorted({networks.addresses[host] for host in network.hosts})
    outside = [address for address in addresses if ipaddress.ip_address(address) not in subnet]
    near = [f"ip route add {address} dev eth0" for address in addresses if address not in outside]
    # There is no route to the gateway itself: it is the daemon's machine.
    far = [f"ip route add {address} via {gateway} dev eth0 onlink" for address in outside]
    return near + far
