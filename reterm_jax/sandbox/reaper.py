"""Directories and labels that say who made a sandbox, and the removal of what a dead process left behind.

Each host keeps its files in RUN_DIR/sandboxes/HOST and holds a lock on RUN_DIR/sandboxes/HOST/lock. The kernel releases
the lock when the process dies, however it dies; a host directory that nobody holds is garbage. Hosts that are alive are
left alone, as is everything of other run directories.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.process import disk_errors

_REMOVAL_SECONDS = 60.0  # for a container whose removal has begun
_PAUSE = 0.2


@dataclass(frozen=True)
class HostDir:
    """The directory of one live host, with the descriptor of its lock."""

    path: Path
    lock_fd: int

    @property
    def id(self) -> str:
        return self.path.name

    def remove(self) -> None:
        """Removes the directory and, if it was the last one, its parent. A second call does nothing."""
        if not self.path.exists():
            return
        remove_tree(self.path)
        os.close(self.lock_fd)
        with contextlib.suppress(OSError):
            self.path.parent.rmdir()


def claim(run_dir: Path) -> HostDir:
    """Removes what dead hosts of `run_dir` left and makes the directory of a new one."""
    with disk_errors(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        with _exclusive(run_dir):
            parent = run_dir.resolve() / "sandboxes"
            parent.mkdir(exist_ok=True)
            for path in parent.iterdir():
                if not is_alive(path):
                    remove_tree(path)
            path = parent / f"host-{secrets.token_hex(4)}"
            path.mkdir()
            path.chmod(0o711)  # whatever the umask: sandboxes may run as another user
            lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return HostDir(path, lock_fd)


def is_alive(host_dir: Path) -> bool:
    """Whether a process holds the lock of this host directory."""
    try:
        fd = os.open(host_dir / "lock", os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(fd)
    return False


def run_label(run_dir: Path) -> str:
    """Identifies a run directory of this machine in the labels of containers and images."""
    place = f"{socket.gethostname()}:{run_dir.resolve()}"
    return hashlib.sha256(place.encode()).hexdigest()[:24]


def remove_tree(path: Path) -> None:
    """Removes a directory whatever modes a command left on it. Raises SandboxError naming what could not be removed."""
    command = ["/bin/rm", "-rf", "--", str(path)]
    if os.geteuid() != 0 and shutil.which("unshare"):
        # Root of our own user namespace may enter our own unreadable directories.
        command = ["unshare", "--user", "--map-root-user", *command]
    for _ in range(3):  # processes of a killed run may still be ending, and writing, in there
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
        if not path.exists():
            return
        time.sleep(0.2)
    if path.exists():
        reason = done.stderr.decode("utf-8", "replace").strip()[:400]
        raise SandboxError(f"cannot remove the leftover sandbox directory {path}: {reason}")


@contextlib.contextmanager
def _exclusive(directory: Path) -> Iterator[None]:
    """Serialises the claims of several processes on one run directory."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def docker_labels(run_dir: Path, run_id: str, host: HostDir) -> dict[str, str]:
    """The labels of every container and image of a host."""
    return {
        "reterm.run": run_id,
        "reterm.run_dir": run_label(run_dir),
        "reterm.owner": host.id,
        "reterm.machine": _machine(),
        "reterm.directory": str(host.path),
    }


def reap_docker(client: Any, run_dir: Path | None = None) -> list[str]:
    """Removes containers and images of dead hosts: those of `run_dir`, or without it all of this machine.

    What another machine made on the same daemon is left alone, as its locks cannot be seen. Returns the hosts removed.
    """
    label = {"reterm.run_dir": run_label(run_dir)} if run_dir else {"reterm.machine": _machine()}
    owners = {
        str(item.labels["reterm.owner"]): Path(item.labels["reterm.directory"])
        for item in _labelled(client, label)
        if {"reterm.owner", "reterm.directory"} <= item.labels.keys()
    }
    dead = sorted(owner for owner, directory in owners.items() if not is_alive(directory))
    for owner in dead:
        remove_docker(client, {**label, "reterm.owner": owner})
    return dead


def reap_directory(run_dir: Path) -> list[str]:
    """Removes the directories of dead hosts of `run_dir`; returns their names."""
    parent = run_dir.resolve() / "sandboxes"
    if not parent.is_dir():
        return []
    with _exclusive(run_dir):
        dead = sorted(path for path in parent.iterdir() if not is_alive(path))
        for path in dead:
            remove_tree(path)
        with contextlib.suppress(OSError):
            parent.rmdir()
    return [path.name for path in dead]


def _machine() -> str:
    return hashlib.sha256(socket.gethostname().encode()).hexdigest()[:24]


def remove_docker(client: Any, labels: Mapping[str, str]) -> None:
    """Removes containers, then images, that carry all of `labels`; what another process removes meanwhile is fine."""
    from docker import errors

    filters = {"label": [f"{name}={value}" for name, value in labels.items()]}
    begun = time.monotonic()
    while containers := client.containers.list(all=True, filters=filters, ignore_removed=True):
        for container in containers:
            try:
                container.remove(force=True, v=True)
            except errors.NotFound:
                pass
            except errors.APIError as error:  # 409: its removal is already in progress
                if error.status_code != 409 or time.monotonic() - begun > _REMOVAL_SECONDS:
                    raise
                time.sleep(_PAUSE)
    # Images can depend on each other (a snapshot of a fork on a snapshot): some may go only in a later round.
    for _ in range(3):
        images = client.images.list(all=False, filters=filters)
        for image in images:
            for tag in image.tags or [image.id]:
                with contextlib.suppress(errors.NotFound, errors.APIError):
                    client.images.remove(tag, force=True)
        if not images:
            return


def _labelled(client: Any, labels: Mapping[str, str]) -> list[Any]:
    filters = {"label": [f"{name}={value}" for name, value in labels.items()]}
    containers = client.containers.list(all=True, filters=filters, ignore_removed=True)
    return [*containers, *client.images.list(filters=filters)]
