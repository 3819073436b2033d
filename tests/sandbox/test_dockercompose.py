"""Tasks of several containers: what a compose file may say, and that its sidecars serve the agent and go with it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from sandbox_bench import Bench, make_task

from reterm_jax.sandbox import SandboxError, dockercompose
from reterm_jax.sandbox.dockercompose import Compose

WEB = """
services:
  main:
    depends_on:
      web: {condition: service_healthy}
      setup: {condition: service_completed_successfully}
    environment: ["GREETING=a $$b"]
  web:
    build: web
    command: python3 /srv/serve.py ${NO_SUCH_PORT:-8000}
    user: "1000"
    volumes: ["data:/data"]
    healthcheck:
      test: ["CMD", "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000"]
      interval: 100ms
      timeout: 1m
      retries: 100
    depends_on: [setup]
  setup:
    image: reterm-sandbox-base
    command: ["true"]
volumes: {data: {}}
"""
SERVE = """
import socket, sys
server = socket.create_server(("", int(sys.argv[1])))
while True:
    server.accept()[0].sendall(b"served\\n")
"""
FETCH = "cat < /dev/tcp/web/8000"


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Reads a compose file without the tool."""
    monkeypatch.setattr(dockercompose, "_resolve", lambda file, where: yaml.safe_load(file.read_text()))

    def read(text: str) -> Compose:
        task = make_task(tmp_path, {"compose.yaml": text})
        return Compose.read(task.path / "environment" / "compose.yaml", task)

    return read


def test_what_sidecars_are_made_of(read: Any) -> None:
    compose = read(WEB)
    assert list(compose.services) == ["setup", "web", "main"]
    setup, web = compose.sidecars(lambda name: f"image of {name}")
    assert (setup.name, setup.image, setup.completes, web.completes) == ("setup", "image of setup", True, False)
    assert web.options["healthcheck"] == {
        "test": ["CMD", "bash", "-c", "exec 3<>/dev/tcp/127.0.0.1/8000"],
        "interval": 100_000_000,
        "timeout": 60_000_000_000,
        "retries": 100,
    }
    assert (
        web.options["user"] == "1000" and web.options["volumes"] == ["/data"] and web.options["command"][0] == "python3"
    )
    assert compose.build_options("web") == {"path": str(compose.file.parent / "web")}
    assert compose.build_options("setup") is None


@pytest.mark.parametrize(
    ("services", "problem"),
    [
        ({"main": {"privileged": True}}, "services.main.privileged is not supported"),
        ({"main": {}, "db": {"network_mode": "host"}}, "services.db.network_mode is not supported"),
        (
            {"main": {}, "db": {"volumes": ["/var/run/docker.sock:/x"]}},
            "services.db.volumes: /x is a path of this machine",
        ),
        ({"main": {}, "db": {"volumes": [{"type": "bind", "source": "a", "target": "/x"}]}}, "/x is a path of this"),
        ({"main": {"volumes": ["a:/x"]}}, "services.main.volumes is not supported"),
        ({"main": {}, "a": {"volumes": ["d:/x"]}, "b": {"volumes": ["d:/y"]}}, "/y: a volume that two services share"),
        ({"main": {"depends_on": ["a"]}, "a": {"depends_on": ["main"]}}, "depends_on goes in a circle"),
    ],
)
def test_what_is_not_supported_is_named(read: Any, services: dict[str, Any], problem: str) -> None:
    with pytest.raises(SandboxError, match=f"task example: .*compose.yaml: .*{problem}"):
        read(yaml.safe_dump({"services": services}))


def test_contexts_lie_in_the_task(read: Any) -> None:
    compose = read("services: {main: {build: ../..}, a: {build: {context: ., ssh: x}}}")
    with pytest.raises(SandboxError, match=r"services.main.build.context .* is outside of"):
        compose.build_options("main")
    with pytest.raises(SandboxError, match=r"services.a.build.ssh is not supported"):
        compose.build_options("a")


@pytest.mark.parametrize(
    ("text", "problem"),
    [("services: {db: {image: x}}", "services.main is missing"), ("a: [", "not valid YAML"), ("", "main is missing")],
)
def test_broken_files(tmp_path: Path, text: str, problem: str) -> None:
    task = make_task(tmp_path, {"compose.yaml": text})
    with pytest.raises(SandboxError, match=f"task example: .*compose.yaml: .*{problem}"):
        Compose.read(task.path / "environment" / "compose.yaml", task)


def test_a_missing_tool_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    task = make_task(tmp_path, {"compose.yaml": "services: {main: {}}"})
    with pytest.raises(SandboxError, match=r"task example.*compose plugin.*apt-get install -y docker-compose"):
        Compose.read(task.path / "environment" / "compose.yaml", task)


def has_tool() -> bool:
    plugin = (
        shutil.which("docker") and subprocess.run(["docker", "compose", "version"], capture_output=True).returncode == 0
    )
    return bool(plugin or shutil.which("docker-compose"))


@pytest.mark.skipif(not has_tool(), reason="docker compose: as root run: apt-get install -y docker-compose")
@pytest.mark.parametrize("bench", ["docker"], indirect=True)
async def test_sidecars_serve_the_agent_and_its_forks_and_go_with_them(bench: Bench) -> None:
    host: Any = bench.host
    filters = {"label": f"reterm.owner={host.directory.id}"}

    def containers() -> int:
        return len(host.client.containers.list(all=True, filters=filters))

    bench.set_task(
        {
            "docker-compose.yaml": WEB,
            "web/Dockerfile": "FROM reterm-sandbox-base\nCOPY serve.py /srv/serve.py\n",
            "web/serve.py": SERVE,
            "Dockerfile": "FROM reterm-sandbox-base\nWORKDIR /work\n",
        }
    )
    box = await bench.start()
    assert await bench.sh(box, f'{FETCH}; pwd; ls /srv; echo "$GREETING"') == "served\n/work\na $b\n"
    assert await bench.sh(box, "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '") == "lo\n"
    snapshot = await box.snapshot()
    assert snapshot.live_processes == ("service setup", "service web") and containers() == 3
    fork = await host.fork(snapshot, bench.task)
    await box.close()
    assert await bench.sh(fork, FETCH) == "served\n" and containers() == 3
    await fork.close()
    assert containers() == 0
    broken = WEB.replace('command: ["true"]', 'command: ["bash", "-c", "echo no luck; exit 3"]')
    bench.set_task({"docker-compose.yaml": broken})
    with pytest.raises(SandboxError, match="service setup ended with status 3: no luck"):
        await bench.start()
    assert containers() == 0
