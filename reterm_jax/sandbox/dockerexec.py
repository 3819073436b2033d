"""Commands in a container: which shell runs them, and what it means when that shell ends before it has answered."""

from __future__ import annotations

import threading
import time
from typing import Any

from reterm_jax.sandbox.base import SandboxError, SnapshotLost
from reterm_jax.sandbox.dockerrunner import COMMAND_FD, Call, Ended, Runner
from reterm_jax.sandbox.output import BoundedOutput

__all__ = ["COMMAND_FD", "Broken", "Call", "Runners", "check_runs", "run"]

INCOMPLETE = 97  # exit status of a fork whose state is not complete
_PROBE_SECONDS = 10.0
_SETTLE = 2.0  # in which the daemon notices that a container, or a shell in one, has ended
_PAUSE = 0.05


class Broken(Exception):
    """The container's own files do not let a command run: its image lacks bash, or the agent removed it."""


class Runners:
    """The shells of one container that are kept from one command to the next, one for each user.

    A call takes the shell out while it runs. So one that was given up, and still runs, shares it with no other.
    """

    def __init__(self, api: Any, container: str) -> None:
        self._api, self._container = api, container
        self._idle: dict[str, Runner] = {}
        self._closed = False
        self._lock = threading.Lock()

    def run(self, call: Call) -> tuple[int, BoundedOutput]:
        """As the function `run`, in a kept shell. What runs in the container can kill or confuse it between two
        commands: one that was not begun for that reason is given to a new shell."""
        with self._lock:
            runner = self._idle.pop(call.user, None)
        if runner is not None:
            try:
                return self._kept(runner, call)
            except Ended as ended:
                if ended.begun:
                    return _explained(self._api, self._container, call, runner, ended)
        runner = _opened(self._api, self._container, call.user)
        try:
            return self._kept(runner, call)
        except Ended as ended:
            return _explained(self._api, self._container, call, runner, ended)

    def close(self) -> None:
        with self._lock:
            self._closed = True
            runners = list(self._idle.values())
            self._idle.clear()
        for runner in runners:
            runner.close()

    def _kept(self, runner: Runner, call: Call) -> tuple[int, BoundedOutput]:
        try:
            done = runner.run(call)
        except BaseException:
            runner.close()
            raise
        with self._lock:
            keep = not self._closed and call.user not in self._idle
            if keep:
                self._idle[call.user] = runner
        if not keep:
            runner.close()
        return done


def run(api: Any, container: str, call: Call) -> tuple[int, BoundedOutput]:
    """Runs `call` in a shell of its own and returns (exit status, output). Blocking.

    Raises Broken if the container runs but cannot run commands, SandboxError if it has ended or fails to answer.
    """
    runner = _opened(api, container, call.user)
    try:
        return runner.run(call)
    except Ended as ended:
        return _explained(api, container, call, runner, ended)
    finally:
        runner.close()


def _opened(api: Any, container: str, user: str) -> Runner:
    from docker.errors import APIError

    try:
        return Runner(api, container, user)
    except APIError:
        check_runs(api, container)  # for one that has ended Docker answers 409, or 500 where it ends just then
        raise


def _explained(api: Any, container: str, call: Call, runner: Runner, ended: Ended) -> tuple[int, BoundedOutput]:
    """Has the container ended, has the command killed its shell, or can nothing run any more?"""
    check_runs(api, container)
    probe = _opened(api, container, "")
    try:
        probe.run(Call("", ":", _PROBE_SECONDS, call.processes, "", {}))
    except Ended:
        time.sleep(_SETTLE)
        check_runs(api, container)
        raise Broken(f"no command can run (bash and coreutils are needed): {ended.said}") from None
    finally:
        probe.close()
    if not ended.begun and ended.said:
        raise Broken(ended.said)
    begun = time.monotonic()
    while not runner.ended():
        if time.monotonic() - begun > _SETTLE:
            raise SandboxError(f"container {container}: the connection to its Docker daemon broke while a command ran")
        time.sleep(_PAUSE)
    return 137, BoundedOutput.of("The command and everything else that ran was killed")


def check_runs(api: Any, container: str, what: str = "a command ran") -> None:
    """Raises SandboxError if the container has ended: SnapshotLost if as a fork that found its state not complete."""
    state = api.inspect_container(container)["State"]
    if not state["Running"]:
        if state["ExitCode"] == INCOMPLETE:
            raise SnapshotLost(f"container {container}: the state that it was forked from is not complete")
        memory = ": out of memory" if state.get("OOMKilled") else ""
        raise SandboxError(f"container {container} has ended while {what}{memory}")
