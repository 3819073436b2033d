"""One command in a container through Docker's exec interface.

Docker has three traps here. A client that gives up leaves the command running; so the time limit is kept inside, and
after it everything started since is killed. An exec ends only when the last process that holds its output does, even a
background job; so the command writes to a file. And an argument may not be long; so all text goes through the input.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from reterm_jax.sandbox import shell
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.output import KEEP_BYTES, BoundedOutput

COMMAND_FD = 9
_STDOUT = 1
_ERROR_BYTES = 1000
_LATE = 30.0  # seconds after which a container that does not answer is given up

_OUTPUT_FD = 8  # of a file without a name: whatever kills this shell, nothing is left
_OOM_SCORE = 500

# Arguments: time limit, bytes to keep of each end of the output, shell line, process limit. Standard input: this text,
# a NUL, the command, a NUL. Prints "STATUS SIZE" and a newline, then the output: all SIZE bytes, or its two ends.
# What must work in a container that has no process left uses builtins only.
_RUNNER = rf"""
IFS= read -r -d '' _command
_stat() {{ local s; read -r s 2>/dev/null < "/proc/$1/stat" || return 1; s=${{s##*) }}; set -- $s; _started=${{20}}; }}
_relieve() {{
  local all=(/proc/[0-9]*) wait
  [ $(( ${{#all[@]}} + 16 )) -gt "$1" ] || return 0
  kill -9 -1
  _relieved='The sandbox had no process left: everything that ran in the background was killed'
  for wait in {{1..50}}; do
    all=(/proc/[0-9]*)
    [ $(( ${{#all[@]}} + 16 )) -gt "$1" ] || return 0
    read -r -t 0.1
  done
}}
_relieved=
_relieve "$4"
for _dir in {shell.STATE_DIR} /dev/shm /tmp; do
  _out=$_dir/output.$$
  {{ printf %s "$_command" > "$_out.in"; }} 2>/dev/null && break
done
exec {COMMAND_FD}< "$_out.in"
exec {_OUTPUT_FD}>> "$_out"
rm -f "$_out.in" "$_out"
_out=/proc/$$/fd/{_OUTPUT_FD}
[ -z "$_relieved" ] || printf '%s\n' "$_relieved" >&{_OUTPUT_FD}
_begin=${{EPOCHREALTIME/[.,]/}}
# What a memory bomb meets first must not be this shell nor process 1. A process may only make itself likelier to go.
(
  printf {_OOM_SCORE} > /proc/self/oom_score_adj
  exec timeout -k {shell.GRACE:g} "$1" bash -c "$3" bash {_OUTPUT_FD}>&-
) >&{_OUTPUT_FD} 2>&1 </dev/null
_status=$?
_limit=${{1/./}}000
if [ $_status = 124 -o $_status = 137 ] && [ $(( ${{EPOCHREALTIME/[.,]/}} - _begin )) -ge $(( 10#$_limit )) ]; then
  _stat $$; _mine=$_started
  for _pass in 1 2 3; do
    for _process in /proc/[0-9]*; do
      _process=${{_process##*/}}
      [ "$_process" != $$ ] && _stat "$_process" && [ "$_started" -ge "$_mine" ] && kill -9 "$_process" 2>/dev/null
    done
  done
fi
exec {COMMAND_FD}<&-
_relieve "$4"
# Where the output ends is told without a program; one that is short is sent whole, however long it is by now.
read -r _ _size < "/proc/$$/fdinfo/{_OUTPUT_FD}"
[ "$_size" -le $(( 2 * $2 )) ] || _size=$(stat -L -c %s "$_out")
printf '%s %s\n' "$_status" "$_size"
if [ "$_size" -le $(( 2 * $2 )) ]; then cat "$_out"; else head -c "$2" "$_out"; tail -c "$2" "$_out"; fi
"""
_PROBE_SECONDS = 10.0
_SETTLE = 2.0
_LOADER = "IFS= read -r -d '' _runner; eval \"$_runner\""


class Broken(Exception):
    """The container's own files do not let a command run: its image lacks bash, or the agent removed it."""


@dataclass(frozen=True)
class Call:
    """A command, the shell line that reads it from COMMAND_FD, its limits and its surroundings.

    `processes` is the container's process limit.
    """

    command: str
    line: str
    timeout: float
    processes: int
    user: str
    env: Mapping[str, str]


def run(api: Any, container: str, call: Call) -> tuple[int, BoundedOutput]:
    """Runs `call` and returns (exit status, output). Blocking.

    Raises Broken if the container runs but cannot run commands, SandboxError if it has ended or fails to answer.
    """
    done = _run(api, container, call)
    if isinstance(done, tuple):
        return done
    # Nothing was reported. Has the container ended, has the command killed its runner, or can nothing run any more?
    _check_runs(api, container)
    probe = Call("", ":", _PROBE_SECONDS, call.processes, "", {})
    if not isinstance(_run(api, container, probe), tuple):
        time.sleep(_SETTLE)  # the daemon notices the end of a container later than its streams break off
        _check_runs(api, container)
        raise Broken(f"no command can run (bash and coreutils are needed): {done}")
    return 137, BoundedOutput.of("The command and everything else that ran was killed")


def _check_runs(api: Any, container: str) -> None:
    """Raises SandboxError if the container has ended."""
    state = api.inspect_container(container)["State"]
    if not state["Running"]:
        memory = ": out of memory" if state.get("OOMKilled") else ""
        raise SandboxError(f"container {container} has ended while a command ran{memory}")


def _run(api: Any, container: str, call: Call) -> tuple[int, BoundedOutput] | str:
    """(exit status, output), or what the runner said where it did not come to report a status."""
    created = api.exec_create(
        container,
        ["bash", "-c", _LOADER, "bash", shell.seconds(call.timeout), str(KEEP_BYTES), call.line, str(call.processes)],
        stdin=True,
        user=call.user,
        environment=dict(call.env),
        workdir="/",
    )
    stream = api.exec_start(created["Id"], socket=True)
    connection: socket.socket = getattr(stream, "_sock", stream)
    deadline = time.monotonic() + call.timeout + shell.GRACE + _LATE
    head, errors, output = b"", b"", BoundedOutput()
    status, size, received = None, 0, 0
    try:
        connection.settimeout(call.timeout + shell.GRACE + _LATE)
        connection.sendall(_RUNNER.encode() + b"\0" + shell.payload(call.command) + b"\0")
        for channel, data in _frames(connection, deadline):
            if channel != _STDOUT:  # of the runner: the command's own goes to the file
                errors = (errors + data)[-_ERROR_BYTES:]
                continue
            if status is None:
                head += data
                if b"\n" not in head:
                    continue
                first, _, data = head.partition(b"\n")
                status, size = (int(word) for word in first.split())
            output.feed(data)
            received += len(data)
    except TimeoutError as error:
        raise SandboxError(f"container {container} did not answer within the command's time limit") from error
    except ValueError:
        errors += head[:_ERROR_BYTES]
    finally:
        stream.close()
    if status is None:
        return errors.decode("utf-8", "replace").strip()
    if size > 2 * KEEP_BYTES:
        output.skip(size - received)
    return status, output


def _frames(connection: socket.socket, deadline: float) -> Iterator[tuple[int, bytes]]:
    """(channel, payload) of Docker's multiplexed stream: 8 bytes of header (channel, 3 zeros, length), then payload."""
    buffer = b""
    while True:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        data = connection.recv(65536)
        if not data:
            return
        buffer += data
        while len(buffer) >= 8:
            channel, length = struct.unpack(">BxxxI", buffer[:8])
            if len(buffer) < 8 + length:
                break
            yield channel, buffer[8 : 8 + length]
            buffer = buffer[8 + length :]
