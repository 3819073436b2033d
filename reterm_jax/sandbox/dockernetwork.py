"""What a container may reach: all, nothing, or chosen hosts; for the verifier it may be something else.

Where Docker's own `none` or `bridge` does for the sandbox's whole life, it gets that. Else it is made on `none`, so
that even its process 1, which an agent may have replaced in the state that a fork starts from, finds no network; then
it is connected to the bridge while a phase has a network, and to nothing while it has none. For an allowlist a helper
sets packet filters in its network namespace before that. Nothing in the sandbox can change them: it has no capability
to.

Routes would not do: a process without any capability can bind a socket to a device and needs no route then. Each chosen
host has one IPv4 address, looked up once, on this machine, and written to /etc/hosts: a sandbox with an allowlist
reaches no name server, through which anything could leak, and no second address of a host that has several. Processes
live on when the phase changes, as tasks may need a server that the agent has started: they get the verifier's network.
"""

from __future__ import annotations

import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, get_args

from reterm_jax.sandbox import dockerexec
from reterm_jax.sandbox.base import BASE_HINT, BASE_IMAGE, SandboxError
from reterm_jax.tasks.config import Network, Phase

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

# With one of these a process gets around the filters; raw frames do not pass them.
_UNFENCING = ("NET_ADMIN", "NET_RAW", "SYS_ADMIN", "SYS_MODULE", "ALL")
# `inet` is IPv4 and IPv6. To reject, not only to drop, spares the agent a wait for each time limit.
_FILTERS = """
table inet reterm {
  chain output {
    type filter hook output priority 0; policy drop;
    oif lo accept
    ip daddr { @ADDRESSES@ } accept
    reject with icmpx type no-route
  }
  chain input {
    type filter hook input priority 0; policy drop;
    iif lo accept
    ct state established,related accept
  }
}
"""
_NO_FILTERS = "add table inet reterm; delete table inet reterm;"
_NOT_FOUND = 127  # exit status of bash


@dataclass(frozen=True)
class Networks:
    """The networks of one task's sandboxes by phase; `addresses` of the hosts that they name."""

    by_phase: Mapping[Phase, Network]
    addresses: Mapping[str, str]

    @property
    def mode(self) -> str:
        """Docker's network mode."""
        return "bridge" if self._modes == {"public"} else "none"

    @property
    def fenced(self) -> bool:
        """Whether Docker's mode alone does not do."""
        return self._modes not in ({"public"}, {"no-network"})

    @property
    def filtered(self) -> bool:
        """Whether there is an allowlist."""
        return "allowlist" in self._modes

    @property
    def dropped(self) -> tuple[str, ...]:
        """The capabilities that sidecars, which share the network, must not have from Docker's defaults."""
        return ("NET_ADMIN", "NET_RAW") if self.fenced else ()

    @property
    def extra_hosts(self) -> dict[str, str]:
        """For /etc/hosts."""
        return {host: address for host, address in self.addresses.items() if host != address}

    @property
    def _modes(self) -> set[str]:
        return {network.mode for network in self.by_phase.values()}


def read(task: Task, capabilities: Mapping[str, Iterable[str]]) -> Networks:
    """Blocking: looks names up. `capabilities` are those that the task asks for, by the field that asks.

    Raises SandboxError naming the task and a host that cannot be allowed, or a field whose capabilities undo a network.
    """
    networks = Networks({phase: task.config.network(phase) for phase in get_args(Phase)}, {})
    for field, names in capabilities.items():
        asked = sorted({name.upper().removeprefix("CAP_") for name in names}.intersection(_UNFENCING))
        if networks.fenced and asked:
            raise SandboxError(f"task {task.id}: with {field} {asked} the agent could undo network_mode; remove one")
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
    """Lets a running container with `fenced` networks reach what it may in `phase`. Blocking.

    Raises SandboxError, or an error of Docker's, where that fails; then the container may be without any network.
    """
    dockerexec.check_runs(client.api, container.name, "its network was set")  # Docker connects what has ended too
    container.reload()
    # `none` too: Docker connects nothing that is on it.
    for name in container.attrs["NetworkSettings"]["Networks"]:
        client.api.disconnect_container_from_network(container.id, name)
    network = networks.by_phase[phase]
    if network.mode == "no-network":
        return
    if networks.filtered:
        addresses = ", ".join(sorted({networks.addresses[host] for host in network.hosts}))
        _filter(client, container, "" if network.mode == "public" else _FILTERS.replace("@ADDRESSES@", addresses))
    client.api.connect_container_to_network(container.id, "bridge")


def _filter(client: Any, container: Any, filters: str) -> None:
    """Puts `filters` in the place of those that the container has."""
    from docker import errors

    failed = f"container {container.name}: its network cannot be limited"
    try:
        helper = client.containers.create(  # unlike `run` it asks no registry for an image that is missing
            BASE_IMAGE,
            ["bash", "-c", 'nft "$0"', _NO_FILTERS + filters],
            network_mode=f"container:{container.id}",
            cap_drop=["ALL"],
            cap_add=["NET_ADMIN"],
            labels=container.labels,
        )
    except errors.ImageNotFound as error:
        raise SandboxError(
            f"{failed}: that is done in the image {BASE_IMAGE}, which is missing: {BASE_HINT}"
        ) from error
    try:
        helper.start()
        status = helper.wait()["StatusCode"]
        said = helper.logs().decode(errors="replace").strip()
    finally:
        helper.remove(force=True)
    if status == _NOT_FOUND:
        raise SandboxError(f"{failed}: the image {BASE_IMAGE} is an old one, without nft; make it again: {BASE_HINT}")
    if status != 0:
        raise SandboxError(f"{failed}; does the kernel of the Docker daemon have netfilter (nf_tables)? {said}")
