"""What trainer and rollout service say to each other: messages as JSON over HTTP, and groups as `wire` makes them.

| request | body → answer |
|---|---|
| `POST /v1/open` | `Opening` → `Opened`; a trainer says who it is, and from which step it goes on |
| `POST /v1/weights?wait=S` | `Weights` → `Served` when all samplers serve them, or 202 after S seconds: ask again |
| `GET /v1/batches/STEP?wait=S` | → `Ready` when the batch is whole, or 202 after S seconds |
| `GET /v1/batches/STEP/groups/KEY` | → a group's bytes |
| `POST /v1/acknowledge` | `Acknowledgement` → `{}`; a checkpoint is on disk |
| `POST /v1/validate` | `Validation` → the bytes of a group that nothing is trained on |

Every request names the protocol in the header `Reterm-Protocol`, and a token as `Authorization: Bearer TOKEN` where the
service asks for one. What is refused is answered with a status of 400 or more and `{"error": MESSAGE}`.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

PROTOCOL = 1
HEADER = "Reterm-Protocol"

# What of a Hugging Face directory says how text becomes ids.
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


@dataclasses.dataclass(frozen=True)
class Opening:
    """
    Attributes:
      identity: what the groups depend on beside weights and tasks; must equal the service's own.
      tasks: those of root groups, in the trainer's order: id to `Task.fingerprint`.
      validation: those of validation, likewise.
      tokenizer: its `tokenizer_digest`.
      first_step: of the checkpoint that the trainer goes on from.
    """

    identity: dict[str, Any]
    tasks: dict[str, str]
    validation: dict[str, str]
    tokenizer: str
    first_step: int


@dataclasses.dataclass(frozen=True)
class Opened:
    """
    Attributes:
      version: that samplers serve; None where they have no weights yet.
    """

    version: int | None


@dataclasses.dataclass(frozen=True)
class Weights:
    """
    Attributes:
      version: training step.
      directory: published, on a disk that service and samplers see by the same name.
    """

    version: int
    directory: str


@dataclasses.dataclass(frozen=True)
class Served:
    """
    Attributes:
      problems: samplers that do not serve the weights, with the reason; others do.
      seconds: that the update took.
    """

    problems: dict[str, str]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Ready:
    """
    Attributes:
      groups: keys, in order.
      facts: metrics about the batch.
    """

    step: int
    groups: list[str]
    facts: dict[str, float]


@dataclasses.dataclass(frozen=True)
class Acknowledgement:
    """
    Attributes:
      step: batches before it are in a checkpoint.
    """

    step: int


@dataclasses.dataclass(frozen=True)
class Validation:
    """A group of `attempts` on one of the validation tasks; see `Roller.root_group` for `seed`."""

    task: str
    attempts: int
    seed: str


def tokenizer_digest(directory: str | Path) -> str:
    """A hash of the tokenizer's files in a Hugging Face or published directory."""
    digest = hashlib.sha256()
    for name in _TOKENIZER_FILES:
        path = Path(directory) / name
        if path.exists():
            digest.update(name.encode() + b"\0" + hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:16]


def first_difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str | None:
    """The first field, by name, in which two flat mappings differ."""
    return next((key for key in sorted({*ours, *theirs}) if ours.get(key) != theirs.get(key)), None)
