"""Task directories out of git repositories, at a pinned commit, each fetched once."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

_SECONDS = 600
_COMMIT = re.compile(r"[0-9a-f]{7,64}\Z")


class FetchError(ValueError):
    """A repository, or a commit of it, that cannot be had; the message tells why."""


def cache_directory() -> Path:
    """Where checkouts are kept: `reterm/tasks` in $XDG_CACHE_HOME, or else in ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "reterm" / "tasks"


def checkout(url: str, commit: str) -> Path:
    """The directory of `url`'s files at `commit` (hexadecimal, 7 digits or more). Raises FetchError.

    A checkout that is there is complete, as it is renamed into place: several processes may ask for one at once.
    """
    if not _COMMIT.match(commit):
        raise FetchError(f"{commit!r} is no commit: only one that is pinned by its hexadecimal id gives the same tasks")
    if url.startswith("-"):
        raise FetchError(f"{url!r} is no address")
    place = cache_directory() / f"{hashlib.sha256(url.encode()).hexdigest()[:16]}-{commit}"
    if place.is_dir():
        return place
    place.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".fetch-", dir=place.parent))
    try:
        _git(made, "init", "--quiet")
        try:
            _git(made, "fetch", "--quiet", "--depth=1", url, commit)
        except FetchError:  # a short id, or a server that gives branches only
            _git(made, "fetch", "--quiet", url, "+refs/heads/*:refs/heads/fetched/*", "+refs/tags/*:refs/tags/*")
        _git(made, "checkout", "--quiet", "--detach", commit)
        try:
            made.rename(place)
        except OSError:
            if not place.is_dir():  # else another process was faster
                raise
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return place


def _git(directory: Path, *arguments: str) -> None:
    # Nothing that the user's configuration adds, and no question to nobody.
    quiet = {"GIT_TERMINAL_PROMPT": "0", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_LFS_SKIP_SMUDGE": "1"}
    command = ["git", "-C", str(directory), "-c", f"core.hooksPath={os.devnull}", *arguments]
    try:
        done = subprocess.run(
            command,
            env={**os.environ, **quiet},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    except FileNotFoundError:
        raise FetchError("git is not installed") from None
    except subprocess.TimeoutExpired:
        raise FetchError(f"git {arguments[0]} took over {_SECONDS} s") from None
    if done.returncode != 0:
        raise FetchError(f"git {arguments[0]}: {done.stderr.strip()[-300:]}")
