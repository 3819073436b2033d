"""What to do with failure states in which processes were alive: a snapshot does not hold them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from reterm_jax.sandbox.base import Sandbox, SandboxError, Snapshot

Mode = Literal["skip", "keep", "restart-listed"]
_SECONDS = 30.0


@dataclass(frozen=True)
class LiveProcesses:
    """The policy for such states.

    Attributes:
      mode: `skip`: no recovery starts from them. `keep`: recoveries start without the processes. `restart-listed`:
        each recovery starts with the processes started again, and a state with one that is not listed is skipped.
      programs: the names (`nginx`, `redis-server`) that may be started again.
    """

    mode: Mode = "keep"
    programs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ValueError(f"live_processes is {self.mode!r}; it must be one of {', '.join(get_args(Mode))}")
        if bool(self.programs) != (self.mode == "restart-listed"):
            raise ValueError("restart names programs for live_processes='restart-listed', and only for it")

    def usable(self, snapshot: Snapshot) -> bool:
        """Whether recoveries may start from this state."""
        if self.mode == "skip":
            return not snapshot.live_processes
        return self.mode == "keep" or all(_program(line) in self.programs for line in snapshot.live_processes)

    async def restore(self, sandbox: Sandbox, processes: Sequence[str], user: str | None) -> None:
        """Starts the recorded processes again in a fork, where the mode says so.

        They get the directory and variables that the state's shell had. Raises SandboxError if one cannot be started.
        """
        if self.mode != "restart-listed" or not processes:
            return
        lines = [f"setsid nohup {line} > /dev/null 2>&1 < /dev/null &" for line in processes]
        checks = [f"pgrep -x {shlex.quote(_program(line)[:15])} > /dev/null" for line in processes]
        command = "\n".join([*lines, "sleep 0.2", " && ".join(checks)])
        result = await sandbox.exec(command, timeout=_SECONDS, user=user)
        if result.exit_code != 0:
            raise SandboxError(f"cannot start again what was alive in the state ({'; '.join(processes)})")


def _program(line: str) -> str:
    """The name of the program in a recorded command line: `/usr/sbin/nginx -g x` is `nginx`."""
    return shlex.split(line)[0].rsplit("/", 1)[-1]
