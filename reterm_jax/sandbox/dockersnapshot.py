"""Saving a container's state as an image, and proving in each fork that the state is all there.

A commit leaves out mounts and processes. What lies in mounts (`/dev/shm`, volumes of the image) is copied into the
container's own files before the commit and back in each fork; what cannot be copied refuses the snapshot. Processes are
recorded. A sentinel written just before the commit must be found in each fork: its process 1 looks for it, and ends
with the container where it is not there, so that no command runs in a state that is not complete.
"""

from __future__ import annotations

import dataclasses
import secrets
import shlex
from typing import Any

from reterm_jax.sandbox import dockerexec, shell
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.dockerimage import Image

REPOSITORY = "reterm-snapshot"
# overlay2 stacks 128 directories at most, and some are the daemon's own: beyond this a state becomes one layer.
MAX_LAYERS = 100
# Process 1 of each container; unlike `sleep` alone, bash collects processes whose parents are gone. The odd number of
# seconds tells its own child from an agent's.
IDLE_SECONDS = "86397"
_IDLE = f"while :; do sleep {IDLE_SECONDS} & wait $!; done"

_SENTINEL = f"{shell.STATE_DIR}/sentinel"
_KEPT = f"{shell.STATE_DIR}/mounts"
_SECONDS = 300.0
# Runs as `timeout`'s child. What has no parent in the container is ours: process 1 and the shells that run commands.
# Prints "mount PATH" and "process COMMAND" lines.
_SAVE = rf"""
shopt -s nullglob dotglob
[ ! -e {_KEPT} ] || rm -rf {_KEPT} || exit
for file in /dev/*; do
  [ ! -f "$file" ] || [ -L "$file" ] || {{ echo "$file is a file in /dev, which a snapshot leaves out"; exit 1; }}
done
keep() {{ mkdir -p "{_KEPT}$1" && cp -a -- "$1/." "{_KEPT}$1/" && echo "mount $1"; }}
for place in @VOLUMES@; do keep "$place" || exit; done
found=(/dev/shm/*)
[ ${{#found[@]}} = 0 ] || keep /dev/shm || exit
parent() {{ local line; read -r line < "/proc/$1/stat" && line=${{line##*) }} && set -- $line && parent=$2; }}
mapfile -d '' -t idle < /proc/1/cmdline
for process in /proc/[0-9]*; do
  id=${{process##*/}}
  case $id in $$ | $PPID) continue ;; esac
  {{ parent "$id" && mapfile -d '' -t words < "$process/cmdline"; }} 2>/dev/null || continue
  [ ${{#words[@]}} -gt 0 ] && [ "$parent" != 0 ] || continue
  # The child of process 1, which looks like that until it has become a `sleep`.
  [ "$parent" = 1 ] && [[ ${{words[*]}} = "sleep {IDLE_SECONDS}" || ${{words[*]}} = "${{idle[*]}}" ]] && continue
  printf -v line '%q ' "${{words[@]}}"
  echo "process ${{line% }}"
done
echo @SENTINEL@ > {_SENTINEL}
"""
_RESTORE = rf"""
shopt -s nullglob dotglob
for place in @MOUNTS@; do
  old=("$place"/*)
  [ ${{#old[@]}} = 0 ] || rm -rf -- "${{old[@]}}" || exit
  cp -a -- "{_KEPT}$place/." "$place/" || exit
done
rm -rf {_KEPT}
"""


def save(client: Any, container: Any, image: Image, name: str) -> tuple[Image, tuple[str, ...]]:
    """Saves `container`, which runs from `image`, as the image REPOSITORY:name. Blocking.

    Returns what forks start from, and the command lines of the processes that are not part of it. Raises SandboxError
    where something cannot be saved.
    """
    volumes = [mount["Destination"] for mount in container.attrs["Mounts"]]
    sentinel = secrets.token_hex(8)
    script = _SAVE.replace("@SENTINEL@", sentinel).replace("@VOLUMES@", shlex.join(volumes))
    lines = _script(client, container, image, script, "its state cannot be saved").splitlines()
    if image.layers < MAX_LAYERS:
        container.commit(repository=REPOSITORY, tag=name)
    else:
        _flatten(client, container, name)
    made = client.api.inspect_image(f"{REPOSITORY}:{name}")
    mounts = tuple(line.removeprefix("mount ") for line in lines if line.startswith("mount "))
    processes = tuple(line.removeprefix("process ") for line in lines if line.startswith("process "))
    saved = dataclasses.replace(
        image,
        name=f"{REPOSITORY}:{name}",
        layers=len(made["RootFS"]["Layers"]),
        size=made["Size"],
        mounts=mounts,
        sentinel=sentinel,
        skeleton=False,
    )
    return saved, processes + tuple(f"service {service.name}" for service in image.services)


def idle(image: Image) -> list[str]:
    """Process 1 of a container of `image`; in a fork it first proves that the state is there."""
    proof = f'[ "$(< {_SENTINEL})" = {image.sentinel} ] || exit {dockerexec.INCOMPLETE}; ' if image.sentinel else ""
    return ["bash", "-c", f"{proof}{_IDLE}"]


def restore(client: Any, container: Any, image: Image) -> None:
    """Puts back what a started fork's mounts held. Blocking. Raises SandboxError where it cannot."""
    if image.mounts:
        script = _RESTORE.replace("@MOUNTS@", shlex.join(image.mounts))
        _script(client, container, image, script, f"the state of {image.name} cannot be completed")


def _script(client: Any, container: Any, image: Image, script: str, problem: str) -> str:
    """Output of a script run as root, with none of the agent's shell state."""
    line = shell.shell_line(dockerexec.COMMAND_FD, workdir="/", fresh=True)
    path = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
    call = dockerexec.Call(script, line, _SECONDS, image.limits.processes, "root", path)
    try:
        status, output = dockerexec.run(client.api, container.name, call)
    except dockerexec.Broken as error:
        raise SandboxError(f"container {container.name}: {problem}: {error}") from error
    if status != 0:
        raise SandboxError(f"container {container.name}: {problem}: {output.text().strip()[-500:]}")
    return output.text()


def _flatten(client: Any, container: Any, name: str) -> None:
    """Saves a container's files as an image of one layer, with the configuration that a commit would have kept."""
    config = client.api.inspect_container(container.name)["Config"]
    changes = [f"ENV {key}={_quoted(value)}" for key, _, value in (entry.partition("=") for entry in config["Env"])]
    changes += [f"LABEL {key}={_quoted(value)}" for key, value in config["Labels"].items()]
    changes += [f"VOLUME {path}" for path in config.get("Volumes") or ()]
    changes += [f"WORKDIR {config['WorkingDir']}"] if config["WorkingDir"] else []
    changes += [f"USER {config['User']}"] if config["User"] else []
    client.api.import_image_from_stream(container.export(), repository=REPOSITORY, tag=name, changes=changes)


def _quoted(value: str) -> str:
    for character in '\\"$':
        value = value.replace(character, f"\\{character}")
    return f'"{value}"'
