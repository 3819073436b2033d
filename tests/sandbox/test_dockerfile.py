"""The Dockerfile subset that bubblewrap understands, and the errors for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from reterm_jax.sandbox import SandboxError, dockerfile
from reterm_jax.sandbox.environment import Recipe
from reterm_jax.tasks.config import EnvironmentConfig, TaskConfig


def parse(tmp_path: Path, text: str) -> list[tuple[str, str, int]]:
    (tmp_path / "Dockerfile").write_text(text)
    return [(i.name, i.text, i.line) for i in dockerfile.parse(tmp_path / "Dockerfile", "t")]


def test_parse(tmp_path: Path) -> None:
    text = "# c\nfrom reterm-sandbox-base:1\n\nRUN a && \\\n  # note\n\n  b\nENV A=1 \\\n"
    assert parse(tmp_path, text) == [
        ("FROM", "reterm-sandbox-base:1", 2),
        ("RUN", "a &&   b", 4),
        ("ENV", "A=1", 8),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "USER agent",
        "ADD x /x",
        "ARG A=1",
        "EXPOSE 80",
        "FROM reterm-sandbox-base",
        "COPY --chown=1 a b",
        "RUN --mount=type=cache,target=/x true",
        "RUN <<EOF",
        "CMD bash",
    ],
)
def test_other_instructions_need_docker(tmp_path: Path, line: str) -> None:
    with pytest.raises(
        SandboxError, match=r"task t: .*Dockerfile:2: .*needs Docker: set config.sandbox.kind=docker"
    ) as e:
        parse(tmp_path, f"FROM reterm-sandbox-base\n{line}\n")
    assert line.split()[0] in str(e.value)


@pytest.mark.parametrize("image", ["ubuntu:24.04", "reterm-sandbox-base AS build", "--platform=x reterm-sandbox-base"])
def test_other_images_need_docker(tmp_path: Path, image: str) -> None:
    with pytest.raises(SandboxError, match="FROM .* needs Docker"):
        parse(tmp_path, f"FROM {image}\n")


@pytest.mark.parametrize(("text", "message"), [("", "must be FROM"), ("RUN x\n", "must be FROM")])
def test_from_comes_first(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(SandboxError, match=message):
        parse(tmp_path, text)


def test_env() -> None:
    env = {"HOME": "/h"}
    assert dockerfile.env_pairs('A=1 B="x y" C=$HOME/z D=${HOME} E=a\\ b F=$NONE', env) == {
        "A": "1",
        "B": "x y",
        "C": "/h/z",
        "D": "/h",
        "E": "a b",
        "F": "",
    }
    assert dockerfile.env_pairs("A some words", env) == {"A": "some words"}
    assert dockerfile.env_pairs(r"A=\$HOME", env) == {"A": "$HOME"}
    with pytest.raises(ValueError, match="NAME=VALUE"):
        dockerfile.env_pairs("A=1 b", env)


def test_run_command() -> None:
    assert dockerfile.run_command("echo 'a' | cat") == "exec /bin/sh -c 'echo '\"'\"'a'\"'\"' | cat'"
    assert dockerfile.run_command('["ls", "a b"]') == "exec ls 'a b'"
    assert dockerfile.run_command("[ -d /x ]") == "exec /bin/sh -c '[ -d /x ]'"


def test_copy_sources(tmp_path: Path) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("")
    assert dockerfile.copy_sources(tmp_path, ["*.txt"], "/d/") == [
        (tmp_path / "a.txt", "/d/"),
        (tmp_path / "b.txt", "/d/"),
    ]
    assert dockerfile.copy_sources(tmp_path, ["/a.txt"], "/d") == [(tmp_path / "a.txt", "/d")]
    for patterns, target, message in [
        (["none"], "/d", "does not exist"),
        (["*.none"], "/d/", "does not exist"),
        (["a.txt", "b.txt"], "/d", "must end with '/'"),
        ([".."], "/d", "outside"),
    ]:
        with pytest.raises(ValueError, match=message):
            dockerfile.copy_sources(tmp_path, patterns, target)


def test_recipe(task: Any) -> None:
    environment = task.path / "environment"
    (environment / "Dockerfile").write_text(
        "FROM reterm-sandbox-base\nENV A=1\nWORKDIR x\nRUN one\nENV A=2\nCOPY Dockerfile sub/\nWORKDIR ..\n"
    )
    task.config = TaskConfig(environment=EnvironmentConfig(env={"B": "3"}))
    recipe = Recipe.of(task)
    assert [(step.command, step.target) for step in recipe.steps] == [
        ("mkdir -p -- /app/x", ""),
        ("exec /bin/sh -c one", ""),
        ("", "/app/x/sub/"),
        ("mkdir -p -- /app", ""),
    ]
    assert recipe.steps[1].environment.env["A"] == "1" and recipe.steps[1].environment.workdir == "/app/x"
    assert recipe.environment.workdir == "/app"
    assert recipe.environment.env["A"] == "2" and recipe.environment.env["B"] == "3"


@pytest.mark.parametrize(
    ("name", "message"), [("docker-compose.yaml", "compose"), (".dockerignore", "dockerignore needs Docker")]
)
def test_other_files(task: Any, name: str, message: str) -> None:
    (task.path / "environment" / "Dockerfile").write_text("FROM reterm-sandbox-base\nCOPY . .\n")
    (task.path / "environment" / name).write_text("")
    with pytest.raises(SandboxError, match=message):
        Recipe.of(task)
