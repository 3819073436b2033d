"""`task.toml` of the Harbor task format, parsed into frozen dataclasses.

Both spellings that exist in the wild are read: the present one (`schema_version`, `memory_mb`, `network_mode`) and the
older one (`version`, `memory = "2G"`, `allow_internet`). Keys that are not known here are left alone: task sets carry
keys for other harnesses. A key that is known and has a wrong type or value is an error.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

NetworkMode = Literal["public", "no-network", "allowlist"]
Phase = Literal["agent", "verifier"]

_EMPTY: Mapping[str, str] = MappingProxyType({})
_MEGABYTES = {"": 1.0, "K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}


class TaskError(ValueError):
    """A task directory that cannot be used.

    Attributes:
      file: the file or directory at fault.
      field: the key (`verifier.timeout_sec`) or None where the whole file is at fault.
      remedy: what to do about it.
    """

    def __init__(self, file: Path, field: str | None, problem: str, remedy: str):
        where = f"{file}: {field}" if field else str(file)
        super().__init__(f"{where}: {problem}; {remedy}")
        self.file, self.field, self.remedy = file, field, remedy


@dataclass(frozen=True)
class Network:
    """What a sandbox may reach: all, nothing, or the chosen `hosts` (an allowlist without any is "no-network").

    A host is reached at one IPv4 address, however many it has.
    """

    mode: NetworkMode = "no-network"
    hosts: tuple[str, ...] = ()


@dataclass(frozen=True)
class AgentConfig:
    timeout_sec: float | None = None  # None: the run's own limit applies
    user: str | None = None
    network: Network | None = None  # None: that of the environment


@dataclass(frozen=True)
class VerifierConfig:
    timeout_sec: float = 600.0
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    user: str | None = None  # None: root
    network: Network | None = None  # None: that of the environment


@dataclass(frozen=True)
class Healthcheck:
    """A command that tells that a started environment is ready, by exit status 0.

    `retries` failures after the first `start_period_sec` seconds mean that it never will be.
    """

    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    retries: int = 3


@dataclass(frozen=True)
class EnvironmentConfig:
    """What the sandbox is made of. Without a word on the network the sandbox has none: tasks must ask for it.

    `capabilities` is an extension of the format: sandboxes have none but those named here (`["CHOWN"]`).
    """

    build_timeout_sec: float = 600.0
    docker_image: str | None = None
    workdir: str | None = None  # None: the image's WORKDIR
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    network: Network = Network()
    healthcheck: Healthcheck | None = None
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True)
class SolutionConfig:
    env: Mapping[str, str] = field(default_factory=lambda: _EMPTY)


@dataclass(frozen=True)
class TaskConfig:
    schema_version: str = "1.0"
    metadata: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    agent: AgentConfig = AgentConfig()
    verifier: VerifierConfig = VerifierConfig()
    environment: EnvironmentConfig = EnvironmentConfig()
    solution: SolutionConfig = SolutionConfig()

    def network(self, phase: Phase) -> Network:
        """What the sandbox may reach while the agent works, and while the verifier judges."""
        return getattr(self, phase).network or self.environment.network

    @classmethod
    def load(cls, file: Path) -> TaskConfig:
        """Reads `task.toml`; raises TaskError naming file, field and remedy."""
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise TaskError(file, None, "missing", "a Harbor task directory needs a task.toml") from None
        except UnicodeDecodeError:
            raise TaskError(file, None, "not UTF-8", "save it as UTF-8") from None
        except OSError as error:
            raise TaskError(file, None, f"cannot be read ({error.strerror})", "it must be a readable file") from None
        try:
            document = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise TaskError(file, None, f"not valid TOML ({error})", "correct the syntax") from None
        return cls.parse(document, file)

    @classmethod
    def parse(cls, document: Mapping[str, Any], file: Path) -> TaskConfig:
        top = _Table(file, "", document)
        agent, verifier, environment = (top.table(name) for name in ("agent", "verifier", "environment"))
        # Whatever is left alone must not change what the task is.
        top.refuse("steps", "multi-step tasks are not supported", "split it into one task per step")
        for key in ("environment", *(["environment_mode"] if verifier.text("environment_mode") != "shared" else [])):
            verifier.refuse(key, "a verifier with a sandbox of its own is not supported", "let it share the agent's")
        environment.refuse("mcp_servers", "tools beside bash are not supported", "give what they do as commands")
        environment.refuse("gpu_types", "a kind of GPU cannot be asked for", "remove it; gpus says how many")
        environment.refuse("tpu", "TPUs in sandboxes are not supported", "remove it")
        if environment.text("os") not in (None, "linux"):
            environment.refuse("os", "only Linux sandboxes are supported", 'set it to "linux"')
        return cls(
            schema_version=top.text("schema_version") or top.text("version") or cls.schema_version,
            metadata=MappingProxyType(dict(top.table("metadata").values)),
            agent=AgentConfig(
                timeout_sec=agent.number("timeout_sec", above=0), user=agent.user("user"), network=agent.network()
            ),
            verifier=VerifierConfig(
                timeout_sec=verifier.number("timeout_sec", above=0) or VerifierConfig.timeout_sec,
                env=verifier.env("env"),
                user=verifier.user("user"),
                network=verifier.network(),
            ),
            environment=_environment(environment),
            solution=SolutionConfig(env=top.table("solution").env("env")),
        )


def _environment(table: _Table) -> EnvironmentConfig:
    workdir = table.text("workdir")
    if workdir is not None and not workdir.startswith("/"):
        raise table.error("workdir", f"{workdir!r} is not absolute", 'give a path such as "/app"')
    return EnvironmentConfig(
        build_timeout_sec=table.number("build_timeout_sec", above=0) or EnvironmentConfig.build_timeout_sec,
        docker_image=table.text("docker_image"),
        workdir=workdir,
        env=table.env("env"),
        cpus=table.number("cpus", above=0),
        memory_mb=table.megabytes("memory_mb", legacy="memory"),
        storage_mb=table.megabytes("storage_mb", legacy="storage"),
        gpus=table.whole("gpus", least=0) or 0,
        network=table.network() or EnvironmentConfig.network,
        healthcheck=_healthcheck(table.table("healthcheck")),
        capabilities=table.names("capabilities"),
    )


def _healthcheck(table: _Table) -> Healthcheck | None:
    if not table.values:
        return None
    command = table.text("command")
    if command is None:
        raise table.error("command", "is missing", "give the command that tells that the environment is ready")
    numbers = {
        name: table.number(name, above=above)
        for name, above in (("interval_sec", 0), ("timeout_sec", 0), ("start_period_sec", -1), ("retries", 0))
    }
    given = {name: value for name, value in numbers.items() if value is not None}
    return Healthcheck(command, **given)  # type: ignore[arg-type]


@dataclass(frozen=True)
class _Table:
    """A TOML table with its place, so that every complaint can name the key."""

    file: Path
    name: str
    values: Mapping[str, Any]

    def error(self, key: str, problem: str, remedy: str) -> TaskError:
        return TaskError(self.file, f"{self.name}.{key}" if self.name else key, problem, remedy)

    def refuse(self, key: str, problem: str, remedy: str) -> None:
        """Raises TaskError where the key says anything."""
        if self.values.get(key):
            raise self.error(key, problem, remedy)

    def _typed(self, key: str, types: tuple[type, ...], expected: str) -> Any:
        value = self.values.get(key)
        # bool is an int in Python, and `timeout_sec = true` is a mistake.
        if value is not None and (not isinstance(value, types) or (isinstance(value, bool) and bool not in types)):
            raise self.error(key, f"is {value!r}", f"it must be {expected}")
        return value

    def table(self, key: str) -> _Table:
        return _Table(self.file, f"{self.name}.{key}".lstrip("."), self._typed(key, (dict,), f"a table: [{key}]") or {})

    def text(self, key: str) -> str | None:
        value = self._typed(key, (str,), "a string")
        if value is not None and not value.strip():
            raise self.error(key, "is empty", "give a value or remove the key")
        return value

    def user(self, key: str) -> str | None:
        value = self._typed(key, (str, int), "a user name or a uid")
        return None if value is None else str(value)

    def number(self, key: str, *, above: float) -> float | None:
        value = self._typed(key, (int, float), "a number")
        if value is not None and not above < value < float("inf"):
            raise self.error(key, f"is {value!r}", f"it must be finite and above {above:g}")
        return value

    def whole(self, key: str, *, least: int) -> int | None:
        expected = f"a whole number of at least {least}"
        value = self._typed(key, (int, float), expected)
        if value is None:
            return None
        if not (value >= least and float(value).is_integer()):
            raise self.error(key, f"is {value!r}", f"it must be {expected}")
        return int(value)

    def env(self, key: str) -> Mapping[str, str]:
        values = self._typed(key, (dict,), "a table of strings") or {}
        for name, value in values.items():
            if isinstance(value, bool) or not isinstance(value, str | int | float):
                raise self.error(f"{key}.{name}", f"is {value!r}", "it must be a string")
        return MappingProxyType({name: self._filled(f"{key}.{name}", str(value)) for name, value in values.items()})

    def _filled(self, key: str, value: str) -> str:
        """Puts in `${VAR}` and `${VAR:-default}` from this process's environment."""

        def one(match: re.Match[str]) -> str:
            found = os.environ.get(match["name"]) or match["default"]
            if found is None:
                raise self.error(key, f"needs {match['name']}", f"set it, or give ${{{match['name']}:-a default}}")
            return found

        return re.sub(r"\$\{(?P<name>[A-Za-z_]\w*)(?::-(?P<default>[^}]*))?\}", one, value)

    def names(self, key: str) -> tuple[str, ...]:
        values = self._typed(key, (list,), 'a list of names such as ["CHOWN"]') or []
        if not all(isinstance(value, str) and re.fullmatch(r"[A-Z_]+", value) for value in values):
            raise self.error(key, f"is {values!r}", 'it must be a list of names such as ["CHOWN"]')
        return tuple(value.removeprefix("CAP_") for value in values)

    def megabytes(self, key: str, *, legacy: str) -> int | None:
        if key in self.values:
            return self.whole(key, least=1)
        value = self._typed(legacy, (str, int), 'a size such as "2G"')
        if value is None:
            return None
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)I?B?", str(value).strip().upper())
        if not match or float(match[1]) == 0:
            raise self.error(legacy, f"is {value!r}", 'it must be a size such as "2G"')
        return max(1, round(float(match[1]) * _MEGABYTES[match[2]]))

    def network(self) -> Network | None:
        """None where the table says nothing of it."""
        mode, hosts = self.text("network_mode"), self._typed("allowed_hosts", (list,), "a list of host names") or []
        if not all(isinstance(host, str) and host for host in hosts):
            raise self.error("allowed_hosts", f"is {hosts!r}", "it must be a list of host names")
        if hosts and mode != "allowlist":
            raise self.error("allowed_hosts", "has no effect", 'set network_mode = "allowlist", or remove it')
        allowed = self._typed("allow_internet", (bool,), "true or false")
        if mode is None:
            return None if allowed is None else Network("public" if allowed else "no-network")
        if mode not in get_args(NetworkMode):
            raise self.error("network_mode", f"is {mode!r}", f"it must be one of {', '.join(get_args(NetworkMode))}")
        if allowed is not None and allowed == (mode == "no-network"):
            problem = f"is {mode!r}, but allow_internet is {'true' if allowed else 'false'}"
            raise self.error(
                "network_mode", problem, "remove allow_internet, which is the older spelling, or correct it"
            )
        return Network(mode, tuple(hosts)) if hosts or mode != "allowlist" else Network()
