"""Tasks of several containers: a compose file's service `main`, in which the agent works, and its sidecars.

`docker compose` resolves the file; the containers are made as all others are, with the labels and limits of the task.
They share one network, as in a pod: the name of a service leads to the sandbox itself. So there are no networks that
could run out or be left behind, and no way out where the task asks for none; but two services cannot use one port. A
snapshot holds `main` alone: the sidecars of a fork are started anew, which is recorded with the live processes.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.shell import Limits

if TYPE_CHECKING:
    from reterm_jax.tasks.task import Task

MAIN = "main"
_HINT = "as root run: apt-get install -y docker-compose"
_SECONDS = 120.0  # for the compose tool to read a file
_READY_SECONDS = 300.0  # for a service to become healthy, or to complete
_PAUSE = 0.2
_NO_IMAGE = "reterm-none"
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}

# What has no meaning here: networks are one, ports are not published, limits are those of task.toml.
_WITHOUT_MEANING = {
    *("networks", "ports", "expose", "hostname", "container_name", "restart", "labels", "logging", "stdin_open", "tty"),
    *("deploy", "cpus", "mem_limit", "memswap_limit", "mem_reservation", "pids_limit", "stop_grace_period", "links"),
    *("attach", "pull_policy", "platform", "profiles"),
}
_OF_ALL = {"build", "image", "environment", "working_dir", "command", "entrypoint", "depends_on", "cap_add", "init"}
_OF_SIDECARS = {"user", "healthcheck", "tmpfs", "volumes"}


@dataclass(frozen=True)
class Service:
    """A sidecar: its image, the options of Docker's `create`, and whether others wait until it has completed."""

    name: str
    image: str
    options: Mapping[str, Any]
    completes: bool


@dataclass(frozen=True)
class Compose:
    """A resolved compose file. `services` are as it describes them, by name and in an order in which they can start."""

    file: Path
    task_id: str
    services: Mapping[str, Mapping[str, Any]]

    @staticmethod
    def read(file: Path, task: Task) -> Compose:
        """Raises SandboxError, naming the task, the file and the field, for what is missing, wrong or not supported."""
        where = f"task {task.id}: {file}"
        services = {name: service or {} for name, service in _resolve(file, where)["services"].items()}
        known = {name: _OF_ALL if name == MAIN else _OF_ALL | _OF_SIDECARS for name in services}
        for name, service in services.items():
            for field, value in service.items():
                if field not in known[name] | _WITHOUT_MEANING and not field.startswith("x-") and value:
                    raise SandboxError(f"{where}: services.{name}.{field} is not supported")
        _check_volumes(services, where)
        return Compose(file, task.id, {name: services[name] for name in _order(services, where)})

    @property
    def main(self) -> Mapping[str, Any]:
        return self.services[MAIN]

    def build_options(self, name: str) -> dict[str, Any] | None:
        """How the image of a service is built: options of docker-py's `build`; None: it is not."""
        build = self.services[name].get("build")
        if not build:
            return None
        build = {"context": build} if isinstance(build, str) else build
        field = f"task {self.task_id}: {self.file}: services.{name}.build"
        for key in build.keys() - {"context", "dockerfile", "args", "target"}:
            raise SandboxError(f"{field}.{key} is not supported")
        context = (self.file.parent / build.get("context", ".")).resolve()
        if not context.is_relative_to(self.file.parent.resolve()):
            raise SandboxError(f"{field}.context {context} is outside of {self.file.parent}")
        options = {"path": str(context), "buildargs": _mapping(build.get("args")), "target": build.get("target")}
        options["dockerfile"] = build.get("dockerfile")
        return {key: value for key, value in options.items() if value}

    def sidecars(self, image_of: Callable[[str], str]) -> tuple[Service, ...]:
        """All but `main`; `image_of` gives the image of a service by its name."""
        awaited = {
            name
            for service in self.services.values()
            for name, condition in _depends(service).items()
            if condition == "service_completed_successfully"
        }
        return tuple(
            Service(name, image_of(name), _options(service), name in awaited)
            for name, service in self.services.items()
            if name != MAIN
        )


def environment(service: Mapping[str, Any]) -> dict[str, str]:
    return _mapping(service.get("environment"))


def container_names(sandbox: str, services: tuple[Service, ...]) -> list[str]:
    """The containers of a sandbox's sidecars."""
    return [f"{sandbox}-{service.name}" for service in services]


def start(
    client: Any,
    container: Any,
    services: tuple[Service, ...],
    limits: Limits,
    labels: Mapping[str, str],
    cpus: float,
    cap_drop: Iterable[str] = (),
) -> None:
    """Starts the sidecars of `container` one after the other, each when those before it are ready. Blocking.

    They have Docker's usual capabilities and those that they ask for, but for `cap_drop`.

    Raises SandboxError naming a service that does not become ready; the caller then removes what was started.
    """
    for service, name in zip(services, container_names(container.name, services), strict=True):
        made = client.containers.create(
            service.image,
            name=name,
            labels=dict(labels),
            network_mode=f"container:{container.id}",
            cap_drop=list(cap_drop),
            security_opt=["no-new-privileges:true"],
            pids_limit=limits.processes,
            mem_limit=f"{limits.memory_mb}m",
            memswap_limit=f"{limits.memory_mb}m",
            nano_cpus=int(cpus * 1e9),
            **service.options,
        )
        made.start()
        _wait(made, service)


def _wait(container: Any, service: Service) -> None:
    begun = time.monotonic()
    while True:
        container.reload()
        state = container.attrs["State"]
        health = state.get("Health", {}).get("Status")
        ended = state["Status"] in ("exited", "dead")
        if service.completes and ended and state["ExitCode"] == 0:
            return
        if not service.completes and not ended and health in (None, "healthy"):
            return
        if ended or health == "unhealthy" or time.monotonic() - begun > _READY_SECONDS:
            said = container.logs(tail=20).decode("utf-8", "replace").strip()[-500:]
            what = f"ended with status {state['ExitCode']}" if ended else f"is not ready ({health or 'still running'})"
            raise SandboxError(f"service {service.name} {what}: {said}")
        time.sleep(_PAUSE)


def _resolve(file: Path, where: str) -> Mapping[str, Any]:
    """What the compose tool makes of the file: variables, defaults, `extends` and `env_file` are put in."""
    import yaml

    try:
        text = file.read_text()
        document = yaml.safe_load(text)
        main = document["services"][MAIN] or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SandboxError(f"{where}: not valid YAML ({error})") from error
    except (KeyError, TypeError):
        raise SandboxError(f"{where}: services.{MAIN} is missing: the agent works in that service") from None
    if not main.keys() & {"image", "build", "extends"}:  # then it is that of the Dockerfile; the tool insists on one
        document["services"][MAIN] = {**main, "image": _NO_IMAGE}
        text = yaml.safe_dump(document)
    command = [*_tool(where), "--project-directory", str(file.parent), "--file", "-", "config"]
    done = subprocess.run(
        command, cwd=file.parent, input=text, capture_output=True, text=True, timeout=_SECONDS, check=False
    )
    if done.returncode != 0:
        raise SandboxError(f"{where}: {shlex.join(command[:-3])} refuses it: {done.stderr.strip()[-500:]}")
    resolved = _unescaped(yaml.safe_load(done.stdout))
    if resolved["services"][MAIN].get("image") == _NO_IMAGE:
        del resolved["services"][MAIN]["image"]
    return resolved


def _tool(where: str) -> list[str]:
    if shutil.which("docker"):
        done = subprocess.run(["docker", "compose", "version"], capture_output=True, timeout=_SECONDS, check=False)
        if done.returncode == 0:
            return ["docker", "compose"]
    if shutil.which("docker-compose"):
        return ["docker-compose"]
    raise SandboxError(f"{where}: a task of several containers needs the compose plugin of Docker; {_HINT}")


def _unescaped(value: Any) -> Any:
    """The tool writes `$$` for `$`, as a compose file does."""
    if isinstance(value, str):
        return value.replace("$$", "$")
    if isinstance(value, list):
        return [_unescaped(item) for item in value]
    return {key: _unescaped(item) for key, item in value.items()} if isinstance(value, dict) else value


def _check_volumes(services: Mapping[str, Mapping[str, Any]], where: str) -> None:
    owners: dict[str, str] = {}
    for name, service in services.items():
        for source, target in map(_volume, service.get("volumes") or ()):
            field = f"{where}: services.{name}.volumes: {target}"
            if source.startswith(("/", ".", "~")):
                raise SandboxError(f"{field} is a path of this machine, which no sandbox gets: copy it into the image")
            if source and owners.setdefault(source, name) != name:
                raise SandboxError(f"{field}: a volume that two services share is not supported")


def _volume(volume: Any) -> tuple[str, str]:
    """(source, target) in either spelling; the source of an anonymous volume is empty."""
    if isinstance(volume, Mapping):
        bind = volume.get("type", "volume") != "volume"
        return ("/" if bind else "") + str(volume.get("source") or ""), str(volume.get("target"))
    source, _, rest = str(volume).partition(":")
    return (source, rest.split(":")[0]) if rest else ("", source)


def _order(services: Mapping[str, Mapping[str, Any]], where: str) -> list[str]:
    order: list[str] = []
    while len(order) < len(services):
        ready = [name for name in services if name not in order and _depends(services[name]).keys() <= set(order)]
        if not ready:
            raise SandboxError(f"{where}: depends_on goes in a circle")
        order += ready
    return order


def _depends(service: Mapping[str, Any]) -> Mapping[str, str]:
    """The condition by the name of the service that is waited for."""
    found = service.get("depends_on") or {}
    if isinstance(found, Mapping):
        return {name: (detail or {}).get("condition", "service_started") for name, detail in found.items()}
    return dict.fromkeys(found, "service_started")


def _options(service: Mapping[str, Any]) -> dict[str, Any]:
    tmpfs = service.get("tmpfs") or []
    options = {
        "command": _words(service.get("command")),
        "entrypoint": _words(service.get("entrypoint")),
        "environment": environment(service),
        "user": None if service.get("user") is None else str(service["user"]),
        "working_dir": service.get("working_dir"),
        "cap_add": service.get("cap_add"),
        "init": service.get("init"),
        "tmpfs": dict(entry.partition(":")[::2] for entry in ([tmpfs] if isinstance(tmpfs, str) else tmpfs)),
        "volumes": [_volume(volume)[1] for volume in service.get("volumes") or ()],
        "healthcheck": _healthcheck(service.get("healthcheck") or {}),
    }
    return {key: value for key, value in options.items() if value}


def _healthcheck(check: Mapping[str, Any]) -> dict[str, Any]:
    """As Docker's API takes it, with times in nanoseconds."""
    if check.get("disable"):
        return {"test": ["NONE"]}
    made: dict[str, Any] = {
        key: int(_seconds(check[key]) * 1e9) for key in ("interval", "timeout", "start_period") if check.get(key)
    }
    if check.get("retries"):
        made["retries"] = int(check["retries"])
    if test := check.get("test"):
        made["test"] = ["CMD-SHELL", test] if isinstance(test, str) else test
    return made


def _seconds(duration: Any) -> float:
    """`1m30s`, `500ms`, or a number of seconds."""
    text = str(duration)
    parts = re.findall(r"([\d.]+)(us|ms|s|m|h)", text)
    return sum(float(number) * _UNITS[unit] for number, unit in parts) if parts else float(text)


def _words(command: Any) -> list[str] | None:
    if command is None:
        return None
    return shlex.split(command) if isinstance(command, str) else [str(word) for word in command]


def _mapping(value: Any) -> dict[str, str]:
    """Pairs given as a table or as a list of NAME=VALUE; a name without a value is left out."""
    if isinstance(value, list):
        value = {name: text for name, equals, text in (entry.partition("=") for entry in value) if equals}
    return {name: str(text) for name, text in (value or {}).items() if text is not None}
