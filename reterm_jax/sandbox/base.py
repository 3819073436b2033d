"""What a sandbox is: the protocol shared by every kind, its results and its errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from reterm_jax.tasks.config import Phase
    from reterm_jax.tasks.task import Task

SandboxKind = Literal["bubblewrap", "docker"]

DEFAULT_WORKDIR = "/app"
BASE_IMAGE = "reterm-sandbox-base"
BASE_HINT = "bash third_party/sandbox_base/build.sh"
# In a task's environment directory: the first of these that is there describes several containers.
COMPOSE_FILES = ("docker-compose.yaml", "docker-compose.yml", "compose.yaml", "compose.yml")
BASE_ENV: Mapping[str, str] = {
    "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
    "HOME": "/home/agent",
    "LANG": "C.UTF-8",
}
# Directories that the Harbor format promises to the agent and the verifier.
LOG_DIRS = ("/logs/agent", "/logs/verifier", "/logs/artifacts")


class SandboxError(RuntimeError):
    """A fault of the environment, never of the agent: an attempt that meets it is not graded."""


class SnapshotLost(SandboxError):
    """A snapshot is not there any more: it went with its daemon, or for newer ones."""


class TamperError(SandboxError):
    """What only private commands may write was written, or put in place, by something else in the sandbox."""


class SandboxUnavailable(SandboxError):
    """No way to isolate commands on this machine; the message names the one command that helps."""


@dataclass(frozen=True)
class ExecResult:
    """One finished command.

    Attributes:
      output: stdout and stderr as one text, cleaned and bounded (see `output.py`).
      exit_code: the shell's exit status; 128 + n after signal n.
      duration: wall-clock seconds.
      timed_out: the command was killed at its time limit; then exit_code is 124 or 137.
      truncated: bytes left out of the middle of `output` (0: nothing).
    """

    output: str
    exit_code: int
    duration: float
    timed_out: bool
    truncated: int = 0


@dataclass(frozen=True)
class Snapshot:
    """A saved filesystem state. `owner` is the host that made it and the only one that can fork or release it.

    `live_processes` are the command lines of processes that were alive in it and are not part of the state, and
    `service NAME` for each of the task's sidecars.
    """

    id: str
    kind: SandboxKind
    owner: str
    live_processes: tuple[str, ...] = ()


class Sandbox(Protocol):
    """A running isolated environment. Its calls are serialised; all raise SandboxError once it is closed."""

    workdir: str
    lingers: bool  # processes may outlive the command that started them

    async def exec(
        self,
        command: str,
        *,
        timeout: float,
        user: str | None = None,
        env: Mapping[str, str] | None = None,
        fresh: bool = False,
        private: bool = False,
    ) -> ExecResult:
        """Runs `command` in bash with empty standard input and waits at most `timeout` seconds (> 0) for it.

        Working directory, umask, exported variables and functions persist from one command to the next, into
        snapshots and forks. `fresh=True` uses and changes none of that: a new shell at `workdir` (for verifiers).
        `env` holds for this command only. A command that fails or times out is a result, not an error.
        `private=True` lets it into private directories (see `upload`).
        """
        ...

    async def upload(self, source: Path, target: str, *, private: bool = False) -> None:
        """Copies a file to the path `target`, or a directory's contents into the directory `target` (absolute).

        A `private` directory can be read and written by private commands alone, not by processes that an agent left
        running. Capabilities that a task asks for weaken this.
        """
        ...

    async def download(self, source: str, target: Path, *, private: bool = False) -> None:
        """Copies a file to `target`, or a directory's regular files and directories into `target`.

        Raises FileNotFoundError if `source` does not exist in the sandbox; where `private` is set, TamperError if
        `source` is no private directory any more or holds a file that no private command wrote.
        """
        ...

    async def set_network(self, phase: Phase) -> None:
        """Lets it reach what the task allows in that phase; it begins in the agent's. Needed where the two differ.

        Processes that the agent left running live on, and reach what that phase may.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Saves the filesystem (with the shell state) as it is now; the sandbox goes on."""
        ...

    async def close(self) -> None:
        """Ends every process and removes the sandbox; a second call does nothing."""
        ...


class SandboxHost(Protocol):
    """Makes sandboxes, at most `max_concurrent` alive at once: `start` and `fork` wait until another one closes."""

    async def start(self, task: Task) -> Sandbox:
        """A sandbox in the task's environment, which is built once per `task.content_hash`."""
        ...

    async def fork(self, snapshot: Snapshot, task: Task) -> Sandbox:
        """A new sandbox in the state of `snapshot`, independent of it and of all other forks."""
        ...

    async def release(self, snapshot: Snapshot) -> None:
        """Forgets a snapshot; a second call does nothing."""
        ...

    async def close(self) -> None:
        """Removes everything this host made: sandboxes, snapshots, environments."""
        ...
