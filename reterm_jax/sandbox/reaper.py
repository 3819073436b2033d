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
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.process import disk_errors


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
    command = ["rm", "-rf", "--", str(path)]
    if os.geteuid() != 0 and shutil.which("unshare"):
        # Root of our own user namespace may enter our own unreadable directories.
        command = ["unshare", "--user", "--map-root-user", *command]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True)
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
