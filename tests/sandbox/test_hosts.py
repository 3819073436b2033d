"""The choice of a kind, and what it says where none works."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from reterm_jax.sandbox import SandboxUnavailable, make_host


@pytest.fixture
def bare_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No bubblewrap, and no Docker daemon."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")


@pytest.mark.usefixtures("bare_machine")
@pytest.mark.parametrize("kind", ["auto", "bubblewrap"])
def test_nothing_to_isolate_with(tmp_path: Path, kind: str) -> None:
    with pytest.raises(SandboxUnavailable, match="apt-get install -y bubblewrap"):
        make_host(kind, tmp_path / "run", max_concurrent=1, run_id="r")  # type: ignore[arg-type]
    assert not (tmp_path / "run" / "sandboxes").exists()


@pytest.mark.usefixtures("bare_machine")
def test_no_daemon(tmp_path: Path) -> None:
    pytest.importorskip("docker")
    with pytest.raises(SandboxUnavailable, match="dockerd"):
        make_host("docker", tmp_path / "run", max_concurrent=1, run_id="r")


def test_bad_arguments(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'podman'"):
        make_host("podman", tmp_path, max_concurrent=1, run_id="r")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_concurrent"):
        make_host("auto", tmp_path, max_concurrent=0, run_id="r")


def test_docker_is_imported_only_when_used() -> None:
    code = "import sys, reterm_jax.sandbox; sys.exit('docker' in sys.modules or 'requests' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0
