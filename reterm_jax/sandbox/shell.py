"""The shell in which commands run, the same in every kind of sandbox.

Each command is a new bash process. What an agent expects to persist between commands (working directory, umask,
exported variables, functions) is kept in the file STATE inside the sandbox, so that a snapshot carries it. The command
itself arrives on a file descriptor: as an argument it would meet the kernel's length limit, and `pkill -f NAME` would
find, and kill, the very shell that runs it.
"""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

STATE_DIR = "/var/lib/reterm"
STATE = f"{STATE_DIR}/state"
SCRIPT = f"{STATE_DIR}/shell"
GRACE = 2.0  # seconds between SIGTERM and SIGKILL when a command reaches its time limit
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")

# Sourced before an agent's command; `_reterm_env` names the variables that hold for this one command only.
# The state is written to a new file and renamed, so a kill at any moment leaves the old or the new state. It is also
# written when the shell ends by `exit`, `set -e` or SIGTERM; not after `exec` or SIGKILL, which keep the old state.
SCRIPT_TEXT = rf"""
_reterm_save() {{
  set +eux +o noclobber +o posix
  [ -z "$_reterm_saved" ] || return 0
  _reterm_saved=1
  local IFS=$' \t\n'
  [ -d {STATE_DIR} ] || command -p mkdir -p {STATE_DIR}
  (
    trap - EXIT DEBUG ERR RETURN TERM
    builtin printf 'builtin cd -- %q || _reterm_lost=%q\n' "$PWD" "$PWD"
    builtin umask -p
    if [ -n "$_reterm_env" ]; then
      builtin unset -v $_reterm_env
      builtin eval "$_reterm_kept"
    fi
    builtin export -n PWD SHLVL _
    builtin declare -px
    builtin unset -f _reterm_save _reterm_end
    builtin declare -f
    builtin declare -Fx
  ) > {STATE}.new && (
    # Exported variables may be too long for a new program to start with.
    builtin export -n $(builtin compgen -e)
    command -p mv -f {STATE}.new {STATE}
  )
}}
_reterm_end() {{ _reterm_save; builtin exit "$1"; }}
_reterm_saved=
_reterm_lost=
_reterm_kept=
_reterm_given=
[ -z "$_reterm_env" ] || _reterm_given=$(declare -px $_reterm_env 2>/dev/null)
if [ -r {STATE} ]; then
  _reterm_here=$PWD
  unset -v $(compgen -e)
  export PWD=$_reterm_here
  . {STATE} 2>/dev/null
  [ -z "$_reterm_env" ] || _reterm_kept=$(builtin declare -px $_reterm_env 2>/dev/null)
  builtin eval "$_reterm_given"
  [ -z "$_reterm_lost" ] ||
    builtin printf 'The working directory %s cannot be entered; now in %s\n' "$_reterm_lost" "$PWD" >&2
fi
trap '{{ _reterm_save; }} 2>/dev/null' EXIT
# `timeout` signals twice (the shell, then its group), and bash without a trap dies at once at the second.
trap 'exit 143' TERM
"""


@dataclass(frozen=True)
class Limits:
    """Resource limits of a command: per process, but `processes` and `disk_mb` count all of the sandbox's."""

    processes: int = 512
    memory_mb: int = 4096
    file_mb: int = 2048
    disk_mb: int = 10_240
    cpus: float = 1.0


def shell_line(fd: int, *, workdir: str, fresh: bool = False, env_names: Iterable[str] = (), ulimits: str = "") -> str:
    """The argument of `bash -c` that runs the command found on descriptor `fd`.

    All is on one line and the command runs by `eval` there, so bash's messages count lines as the agent does and
    begin with `bash: line N`.
    """
    read = f"IFS= read -r -d '' -u {fd} _reterm_command; exec {fd}<&-"
    enter = f"cd -- {shlex.quote(workdir)} 2>/dev/null"
    if fresh:
        return f'{ulimits}{read}; {enter}; eval "$_reterm_command"'
    names = shlex.quote(" ".join(env_names))
    return (
        f"{ulimits}{read}; {enter}; _reterm_env={names}; . {SCRIPT}; "
        'eval "$_reterm_command"; { _reterm_end $?; } 2>/dev/null'
    )


def seconds(timeout: float) -> str:
    """A time limit as the program `timeout` takes it; raises ValueError unless 0 < timeout < infinity.

    The limit is kept by that program inside the sandbox: SIGTERM at `timeout` seconds, SIGKILL GRACE seconds later.
    """
    if not 0 < timeout < math.inf:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout}")
    return f"{max(timeout, 0.001):.3f}"


def ulimits(limits: Limits, timeout: float) -> str:
    """Shell text that applies `limits`, for use in front of a command line."""
    cpu_seconds = math.ceil(timeout * max(limits.cpus, 1.0)) + 5
    values = {
        "c": 0,
        "u": limits.processes,
        "d": limits.memory_mb * 1024,
        "f": limits.file_mb * 1024,
        "t": cpu_seconds,
    }
    # One by one: a limit that is already lower than ours cannot be raised, and must not stop the others.
    return "{ " + "".join(f"ulimit -{key} {value}; " for key, value in values.items()) + "} 2>/dev/null; "


def check_env(env: Mapping[str, str]) -> dict[str, str]:
    """Returns `env` as a dict; raises ValueError for a name that a shell cannot hold or a NUL in a value."""
    for name, value in env.items():
        if not _NAME.match(name):
            raise ValueError(f"environment variable name {name!r} is not a shell name")
        if "\0" in value:
            raise ValueError(f"environment variable {name} holds a NUL character")
    return dict(env)


def payload(command: str) -> bytes:
    """The bytes of a command as the shell reads them: no NUL, valid UTF-8, ended by a newline."""
    return command.replace("\0", "").encode("utf-8", "replace") + b"\n"


def hit_time_limit(exit_code: int, duration: float, timeout: float) -> bool:
    """Whether the limit, not the command itself, ended it: a command may return 124 on its own."""
    return exit_code in (124, 137) and duration >= timeout
