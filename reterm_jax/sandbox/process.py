"""Running one program under asyncio: bounded output, a hard deadline, and no survivor when the caller is cancelled."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from reterm_jax.sandbox.base import SandboxError
from reterm_jax.sandbox.output import BoundedOutput

_CHUNK = 64 * 1024
_FLOOD = 32 * 1024 * 1024  # beyond this much output reading is slowed down, so that `yes` does not take a whole core


@dataclass(frozen=True)
class Finished:
    """A program that ended. `exit_code` is negative after a signal; `late` if it was killed at the deadline."""

    exit_code: int
    output: BoundedOutput
    late: bool


async def run_program(
    argv: Sequence[str],
    *,
    deadline: float,
    pass_fds: Sequence[int] = (),
    stdin: int = asyncio.subprocess.DEVNULL,
    stdout: int | None = None,
) -> Finished:
    """Runs `argv` with an empty environment and waits until its output ends, at most `deadline` seconds.

    stdout and stderr are collected together; with a descriptor `stdout`, only stderr is. The environment is empty
    because a process inside a sandbox can read that of the program that made the sandbox. Raises SandboxError if the
    program cannot be started.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=asyncio.subprocess.PIPE if stdout is None else stdout,
            stderr=asyncio.subprocess.STDOUT if stdout is None else asyncio.subprocess.PIPE,
            pass_fds=tuple(pass_fds),
            env={},
        )
    except OSError as error:
        raise SandboxError(f"cannot start {argv[0]}: {error.strerror or error}") from error
    stream = process.stdout if stdout is None else process.stderr
    assert stream is not None
    output, received, late = BoundedOutput(), 0, False
    try:
        try:
            async with asyncio.timeout(deadline):
                while data := await stream.read(_CHUNK):
                    output.feed(data)
                    received += len(data)
                    if received > _FLOOD:
                        await asyncio.sleep(0.001)
                await process.wait()
        except TimeoutError:
            late = True
            process.kill()
            await process.wait()
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    assert process.returncode is not None
    return Finished(process.returncode, output, late)


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
    """A descriptor of an anonymous file that holds `data`, at offset 0."""
    fd = os.memfd_create("reterm")
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(fd, view) :]
        os.lseek(fd, 0, os.SEEK_SET)
        yield fd
    finally:
        os.close(fd)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turns a full or read-only disk into a SandboxError that names `path`."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise disk_full(path) from error
        raise SandboxError(f"cannot write sandbox files under {path}: {error.strerror or error}") from error


@contextlib.contextmanager
def scratch_file(directory: Path) -> Iterator[BinaryIO]:
    """A file without a name on the disk of `directory`. Raises SandboxError if it cannot be made."""
    with disk_errors(directory):
        file = tempfile.TemporaryFile(dir=directory)
    with file:
        yield file


def disk_full(path: Path) -> SandboxError:
    return SandboxError(f"the disk that holds {path} is full: free space there, or choose a run directory elsewhere")
