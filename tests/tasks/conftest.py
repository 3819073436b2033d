"""A minimal task directory to bend and break."""

from __future__ import annotations

from pathlib import Path

import pytest

FILES = {
    "task.toml": 'schema_version = "1.0"\n[metadata]\nauthor = "nobody"\n',
    "instruction.md": "do it\n",
    "environment/Dockerfile": "FROM reterm-sandbox-base\nWORKDIR /app\n",
    "tests/test.sh": "#!/bin/bash\necho 1 > /logs/verifier/reward.txt\n",
}


@pytest.fixture
def make_task(tmp_path):
    """Writes a task directory; keyword `files` replaces files, or leaves them out where the text is None."""

    def make(name: str = "example", files: dict[str, str | None] | None = None) -> Path:
        for file, text in (FILES | (files or {})).items():
            if text is not None:
                path = tmp_path / name / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
        return tmp_path / name

    return make
