"""A shell in a container that runs commands one after the other, over one exec call of Docker's that is kept open.

Docker has four traps here. An exec call takes longer than most commands; so one serves many. A client that gives up
leaves the command running; so the time limit is kept inside, and after it everything started since is killed. An exec
ends only when the last process that holds its output does, even a background job; so the command writes to a file. And
an argument may not be long; so all text goes through the input.
"""

from __future__ import annotations

import re
import secrets
import shlex
import socket
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reterm_jax.sandbox import shell
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.output import KEEP_BYTES, BoundedOutput

COMMAND_FD = 9
_OUTPUT_FD = 8
_STDOUT = 1
_ERROR_BYTES = 1000
_LATE = 30.0  # seconds after which a container that does not answer is given up
_OOM_SCORE = 500
_SHORT = 4096  # bytes of output that are sent without a program

# Standard input: this text; then for each command a token, its time limit, the container's process limit, the bytes to
# keep of each end of the output, exports, the shell line, the command; a NUL after each. Prints the token once it has
# read all of that, then the output (all of it, or its two ends), then "TOKEN STATUS SIZE".
# The command and its output are in files without a name: whatever kills this shell, nothing is left. What must work in
# a container that has no process left uses builtins only.
_TEXT = rf"""
_stat() {{ local s; read -r s 2>/dev/null < "/proc/$1/stat" || return 1; s=${{s##*) }}; set -- $s; _started=${{20}}; }}
_relieve() {{
  local all=(/proc/[0-9]*) wait
  [ $(( ${{#all[@]}} + 16 )) -gt "$_processes" ] || return 0
  kill -9 -1
  _relieved='The sandbox had no process left: everything that ran in the background was killed'
  for wait in {{1..50}}; do
    all=(/proc/[0-9]*)
    [ $(( ${{#all[@]}} + 16 )) -gt "$_processes" ] || return 0
    read -r -t 0.1
  done
}}
_open() {{
  local directory file
  for directory in {shell.STATE_DIR} /dev/shm /tmp; do
    file=$directory/output.$$
    if printf %s "$_command" > "$file.in" && exec {COMMAND_FD}< "$file.in" && exec {_OUTPUT_FD}>> "$file"; then
      rm -f "$file.in" "$file"
      return
    fi
  done
  return 1
}}
_send() {{
  local LC_ALL=C text
  if [ "$_size" -le {_SHORT} ]; then
    IFS= read -r -N "$_size" text < "$_out"
    if [ ${{#text}} = "$_size" ]; then printf %s "$text"; return; fi
  fi
  if [ "$_size" -le $(( 2 * _keep )) ]; then
    head -c "$_size" "$_out"
  else
    head -c "$_keep" "$_out"; tail -c "$_keep" "$_out"
  fi
}}
_out=/proc/$$/fd/{_OUTPUT_FD}
_last=
trap : HUP INT TERM  # `pkill bash` is for the command's own; a trap, unlike a signal ignored, is not passed on
while IFS= read -r -d '' _token; do
  for _field in _limit _processes _keep _exports _line _command; do
    IFS= read -r -d '' "$_field" || exit
  done
  _relieved=
  _relieve
  _open || exit
  unset -v _command
  [ -z "$_relieved" ] || printf '%s\n' "$_relieved" >&{_OUTPUT_FD}
  printf %s "$_token"
  # Start times are told to a hundredth of a second: what the last command left running must be older than this one.
  read -r _mine _ < /proc/uptime
  while [ -n "$_mine" -a "$_mine" = "$_last" ]; do read -r _mine _ < /proc/uptime; done
  _begin=${{EPOCHREALTIME/[.,]/}}
  # What a memory bomb meets first must not be this shell nor process 1. A process may only make itself likelier to go.
  (
    printf {_OOM_SCORE} > /proc/self/oom_score_adj
    eval "$_exports"
    exec timeout -k {shell.GRACE:g} "$_limit" bash -c "$_line" bash {_OUTPUT_FD}>&-
  ) >&{_OUTPUT_FD} 2>&1 </dev/null
  _status=$?
  _least=${{_limit/./}}000
  if [ $_status = 124 -o $_status = 137 ] && [ $(( ${{EPOCHREALTIME/[.,]/}} - _begin )) -ge $(( 10#$_least )) ]; then
    for _pass in 1 2 3; do
      for _process in /proc/[0-9]*; do
        _process=${{_process##*/}}
        [ "$_process" != $$ ] && _stat "$_process" && [ "$_started" -ge "${{_mine/./}}" ] &&
          kill -9 "$_process" 2>/dev/null
      done
    done
  fi
  exec {COMMAND_FD}<&-
  _relieve
  # Where the output ends is told without a program; one that is short is sent whole, however long it is by now.
  read -r _ _size < "/proc/$$/fdinfo/{_OUTPUT_FD}"
  [ "$_size" -le $(( 2 * _keep )) ] || _size=$(stat -L -c %s "$_out")
  _send
  exec {_OUTPUT_FD}>&-
  read -r _last _ < /proc/uptime
  printf '%s %s %s\n' "$_token" "$_status" "$_size"
done
"""
_LOADER = "IFS= read -r -d '' _runner; eval \"$_runner\""


class Ended(Exception):
    """The runner ended without a status. `begun`: after it had read the command; `said`: what it said."""

    def __init__(self, begun: bool, said: str) -> None:
        super().__init__(said)
        self.begun, self.said = begun, said


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


class Runner:
    """One such shell. Its calls block, one at a time; after an error it is of no further use."""

    def __init__(self, api: Any, container: str, user: str) -> None:
        self._api, self._container = api, container
        command = ["bash", "-c", _LOADER, "bash"]
        self._id: str = api.exec_create(container, command, stdin=True, user=user, workdir="/")["Id"]
        self._stream = api.exec_start(self._id, socket=True)
        self._connection: socket.socket = getattr(self._stream, "_sock", self._stream)
        if self._connection.family != socket.AF_UNIX:
            self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._unsent = _TEXT.encode() + b"\0"
        self._received = b""

    def close(self) -> None:
        """Ends the shell, unless a command runs in it."""
        self._stream.close()
        self._connection.close()

    def ended(self) -> bool:
        """Whether the daemon has seen the shell end."""
        return not self._api.exec_inspect(self._id)["Running"]

    def run(self, call: Call) -> tuple[int, BoundedOutput]:
        """Exit status and output of a command. Raises Ended; SandboxError if there is no answer in time."""
        token = secrets.token_hex(8).encode()
        exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in call.env.items())
        limits = shell.seconds(call.timeout), str(call.processes), str(KEEP_BYTES)
        fields = [token, *(field.encode() for field in (*limits, exports, call.line)), shell.payload(call.command)]
        deadline = time.monotonic() + call.timeout + shell.GRACE + _LATE
        status_line = re.compile(re.escape(token) + rb" (\d+) (\d+)\n\Z")
        output, errors = bytearray(), b""
        try:
            self._connection.settimeout(call.timeout + shell.GRACE + _LATE)
            self._connection.sendall(self._unsent + b"\0".join(fields) + b"\0")
            self._unsent = b""
            while (found := status_line.search(output, max(0, len(output) - 100))) is None:
                channel, data = self._frame(deadline)
                if channel == _STDOUT:
                    output += data
                else:  # of the runner: the command's own goes to the file
                    errors = (errors + data)[-_ERROR_BYTES:]
                if len(output) > 3 * KEEP_BYTES:
                    raise EOFError  # not its own words
        except TimeoutError as error:
            raise SandboxError(f"container {self._container} did not answer within the command's time limit") from error
        except (EOFError, ConnectionError) as error:
            said = (errors + output[:_ERROR_BYTES]).decode("utf-8", "replace").strip()
            raise Ended(token in output, said) from error
        # What comes before the token is of a process that can write where the shell does.
        return int(found[1]), _bounded(bytes(output[output.find(token) + len(token) : found.start()]), int(found[2]))

    def _frame(self, deadline: float) -> tuple[int, bytes]:
        """The next (channel, payload) of Docker's multiplexed stream: a header (channel, 3 zeros, length), then
        the payload. Raises EOFError at its end."""
        needed = 8
        while True:
            if len(self._received) >= 8:
                channel, length = struct.unpack(">BxxxI", self._received[:8])
                needed = 8 + length
                if len(self._received) >= needed:
                    data, self._received = self._received[8:needed], self._received[needed:]
                    return channel, data
            self._connection.settimeout(max(0.001, deadline - time.monotonic()))
            received = self._connection.recv(65536)
            if not received:
                raise EOFError
            self._received += received


def _bounded(data: bytes, size: int) -> BoundedOutput:
    """Output of which all `size` bytes are there, or KEEP_BYTES of each end."""
    output = BoundedOutput()
    output.feed(data)
    if size > 2 * KEEP_BYTES:
        output.skip(size - len(data))
    return output
