"""Isolated environments in which agents act: the Sandbox protocol, bubblewrap and Docker."""

from reterm_jax.sandbox.base import (
    ExecResult,
    Sandbox,
    SandboxError,
    SandboxHost,
    SandboxUnavailable,
    Snapshot,
    SnapshotLost,
)
from reterm_jax.sandbox.hosts import make_host

__all__ = [
    "ExecResult",
    "Sandbox",
    "SandboxError",
    "SandboxHost",
    "SandboxUnavailable",
    "Snapshot",
    "SnapshotLost",
    "make_host",
]
