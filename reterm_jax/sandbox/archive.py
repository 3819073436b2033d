"""Tar streams between this machine and sandboxes. What comes out was written by a model: it is not trusted."""

from __future__ import annotations

import shutil
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from reterm_jax.sandbox.base import SandboxError, TamperError

MAX_DOWNLOAD = 256 * 1024 * 1024
# Of private directories. A process without capabilities can neither take these ids nor give them to a file; a command
# that is given the group by the daemon can enter what the group may enter.
PRIVATE_UID, PRIVATE_GID = 54321, 54322


def pack(entries: Iterable[tuple[Path, str]], out: BinaryIO) -> None:
    """Writes each `(source, name)` to `out` as a tar stream; directories with their contents.

    Modes, times and symbolic links are kept; owners become 0. A name of "" puts a directory's contents at the top.
    """

    def anonymous(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid = info.gid = 0
        info.uname = info.gname = ""
        return info

    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for source, name in entries:
            if name:
                tar.add(source, name, filter=anonymous)
            else:
                for child in sorted(source.iterdir()):
                    tar.add(child, child.name, filter=anonymous)


def pack_private(source: Path, target: str, out: BinaryIO) -> None:
    """Writes directory `source` to `out` as a tar stream for `/`, as the private directory `target`.

    Only its top is out of reach of others: what is in it belongs to root, so that tests may change modes.
    """

    def grouped(info: tarfile.TarInfo) -> tarfile.TarInfo:
        info.uid, info.gid, info.uname, info.gname = 0, PRIVATE_GID, "", ""
        info.mode |= 0o110 if info.isdir() or info.name.endswith(".sh") else 0
        return info

    *parents, last = [str(path).lstrip("/") for path in reversed(PurePosixPath(target).parents)][1:] + [target[1:]]
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for name in (*parents, last):
            info = tarfile.TarInfo(name)
            info.type, info.mtime = tarfile.DIRTYPE, int(time.time())
            info.uid, info.gid, info.mode = PRIVATE_UID, PRIVATE_GID, 0o2770 if name == last else 0o775
            tar.addfile(info)
        for child in sorted(source.iterdir()):
            tar.add(child, f"{last}/{child.name}", filter=grouped)


def unpack(stream: BinaryIO, name: str, target: Path, *, private: bool = False) -> None:
    """Extracts the member `name` of a tar stream to `target`: a file, or a directory's files and directories.

    Links, devices and anything outside `name` are left out; modes are not taken over. Raises SandboxError for a
    malformed stream or more than MAX_DOWNLOAD bytes; with `private`, TamperError for what is not private.
    """
    total = 0
    try:
        with tarfile.open(fileobj=stream, mode="r|") as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if ".." in path.parts or path.parts[:1] != (name,):
                    continue
                if private and not _is_private(member, top=len(path.parts) == 1):
                    raise TamperError(f"{path} was put there by a process that the agent left running")
                place = target.joinpath(*path.parts[1:])
                if member.isdir():
                    place.mkdir(parents=True, exist_ok=True)
                elif member.isreg():
                    total += member.size
                    if total > MAX_DOWNLOAD:
                        raise SandboxError(f"download of {name} is over {MAX_DOWNLOAD} bytes")
                    place.parent.mkdir(parents=True, exist_ok=True)
                    data = tar.extractfile(member)
                    assert data is not None
                    with open(place, "wb") as file:
                        shutil.copyfileobj(data, file)
    except tarfile.TarError as error:
        raise SandboxError(f"cannot read the archive of {name}: {error}") from error


def _is_private(member: tarfile.TarInfo, *, top: bool) -> bool:
    if member.isdir():
        return not top or member.uid == PRIVATE_UID
    return member.gid == PRIVATE_GID


def split_target(source: Path, target: str) -> tuple[str, str]:
    """Where an upload goes: (directory inside, name in it; "" for a directory's contents).

    Raises FileNotFoundError for a missing source, ValueError for a target that is not absolute.
    """
    if not target.startswith("/"):
        raise ValueError(f"upload target {target!r} must be an absolute path inside the sandbox")
    if source.is_dir():
        return target, ""
    if not source.exists():
        raise FileNotFoundError(f"upload source {source} does not exist")
    if target.endswith("/"):
        return target, source.name
    path = PurePosixPath(target)
    return str(path.parent), path.name
