"""How a command enters a bubblewrap sandbox: namespaces, mounts, users.

Inside, `/` is the sandbox's private directory, writable; the host's system directories are mounted over it read-only.
There is no network, no capability, one user (`agent`, uid 1000) and no way to another. Everything a command started
dies with it, because its process namespace does.

On the host, the files of sandboxes belong to one user. That is the user who runs us, except for root: then it is
HOST_UID, an id that owns nothing else, so that a command which broke out would still not be root, and so that the
kernel enforces the process limit (which it does not for root). That user may not be able to reach a run directory
inside, say, /root; therefore a mount namespace, made once per host, shows the directory under /mnt.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from reterm_jax.sandbox import shell
from reterm_jax.sandbox.base import SandboxUnavailable
from reterm_jax.sandbox.process import Finished, memory_file, run_program

INSTALL_HINT = "apt-get install -y bubblewrap"
HOST_UID = 59999
_GUEST_UID = "1000"
_SYSTEM_DIRS = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/alternatives", "/etc/ld.so.cache")
# Made by whoever set up this machine, and different on the next one.
_HIDDEN_DIRS = ("/usr/local",)


def find_bwrap() -> str:
    """Path of `bwrap`. Raises SandboxUnavailable with the command that installs it."""
    path = shutil.which("bwrap")
    if path is None:
        raise SandboxUnavailable(f"bubblewrap is not installed; as root run: {INSTALL_HINT}")
    return path


@dataclass(frozen=True)
class Jail:
    """Runs programs inside sandbox directories below `outside`. Made by `open_jail`; `close` after use.

    Attributes:
      outside: the directory as this process sees it; `inside`: as bwrap sees it.
      enter: the command prefix that becomes the files' owner and sees `inside`.
      as_owner: the command prefix under which the owner's files can be read and removed whatever their modes.
      owner: uid and gid of sandbox files if they differ from this process's.
    """

    bwrap: str
    outside: Path
    inside: str
    enter: tuple[str, ...]
    as_owner: tuple[str, ...]
    owner: int | None
    namespace_fd: int | None
    system: tuple[str, ...] = field(default_factory=lambda: tuple(d for d in _SYSTEM_DIRS if os.path.exists(d)))

    def arguments(self, root: Path, env: Mapping[str, str]) -> list[str]:
        """bwrap's options for a sandbox whose `/` is `root`, a directory below `outside`."""
        source = f"{self.inside}/{root.relative_to(self.outside)}"
        options = ["--unshare-all", "--unshare-user", "--disable-userns", "--die-with-parent", "--new-session"]
        options += ["--cap-drop", "ALL", "--uid", _GUEST_UID, "--gid", _GUEST_UID, "--hostname", "sandbox"]
        options += ["--bind", source, "/"]
        for directory in self.system:
            options += ["--ro-bind", directory, directory]
        for directory in _HIDDEN_DIRS:
            options += ["--tmpfs", directory, "--remount-ro", directory]
        options += ["--ro-bind", f"{self.inside}/shell", shell.SCRIPT]
        options += ["--proc", "/proc", "--dev", "/dev", "--clearenv"]
        for name, value in env.items():
            options += ["--setenv", name, value]
        return [*options, "--chdir", "/"]

    async def run(
        self,
        root: Path,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        deadline: float,
        fds: Sequence[int] = (),
        stdin: int = subprocess.DEVNULL,
        stdout: int | None = None,
    ) -> Finished:
        """Runs `argv` (absolute path of a program inside) in the sandbox `root`; see `run_program`."""
        options = "\0".join(self.arguments(root, env)) + "\0"
        # The options travel on a descriptor: process 1 of the sandbox shows its arguments to everyone inside.
        with memory_file(os.fsencode(options)) as options_fd:
            passed = [options_fd, *fds]
            if self.namespace_fd is not None:
                passed.append(self.namespace_fd)
            command = [*self.enter, self.bwrap, "--args", str(options_fd), "--", *argv]
            return await run_program(command, deadline=deadline, pass_fds=passed, stdin=stdin, stdout=stdout)

    def probe(self) -> str:
        """Empty if a program runs in a new sandbox directory, else what went wrong. Blocking."""
        root = Path(tempfile.mkdtemp(prefix="probe-", dir=self.outside))
        try:
            root.chmod(0o755)
            if self.owner is not None:
                os.chown(root, self.owner, self.owner)
            fds = () if self.namespace_fd is None else (self.namespace_fd,)
            command = [*self.enter, self.bwrap, *self.arguments(root, {}), "--", "/bin/true"]
            done = subprocess.run(
                command, pass_fds=fds, env={}, stdin=subprocess.DEVNULL, capture_output=True, timeout=30
            )
            if done.returncode == 0:
                return ""
            return done.stderr.decode("utf-8", "replace").strip() or f"exit status {done.returncode}"
        except subprocess.TimeoutExpired:
            return "a program that does nothing did not end within 30 s"
        except OSError as error:
            return str(error)
        finally:
            shutil.rmtree(root, ignore_errors=True)

    def close(self) -> None:
        if self.namespace_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self.namespace_fd)


def open_jail(directory: Path) -> Jail:
    """A jail for sandboxes below `directory` (which exists, mode 0711).

    Raises SandboxUnavailable if bubblewrap is missing or this kernel does not let it work.
    """
    bwrap = find_bwrap()
    directory = directory.resolve()
    (directory / "shell").write_text(shell.SCRIPT_TEXT)
    (directory / "shell").chmod(0o644)
    problem = ""
    candidates = [_as_other_user, _as_root] if os.geteuid() == 0 else [_as_self]
    for candidate in candidates:
        jail = candidate(bwrap, directory)
        if jail is None:
            continue
        problem = jail.probe()
        if not problem:
            return jail
        jail.close()
    raise SandboxUnavailable(
        f"bubblewrap does not work on this machine ({problem}): it needs user namespaces. "
        "Allow them (sysctl -w kernel.unprivileged_userns_clone=1 kernel.apparmor_restrict_unprivileged_userns=0), "
        "or use Docker with config.sandbox.kind=docker"
    )


def _as_self(bwrap: str, directory: Path) -> Jail:
    # Files whose owner took away his own permissions are within reach of root in a user namespace of the owner.
    unshare = shutil.which("unshare")
    as_owner = (unshare, "--user", "--map-root-user") if unshare else ()
    return Jail(bwrap, directory, str(directory), (), as_owner, None, None)


def _as_root(bwrap: str, directory: Path) -> Jail:
    return Jail(bwrap, directory, str(directory), (), (), None, None)


def _as_other_user(bwrap: str, directory: Path) -> Jail | None:
    unshare, nsenter = shutil.which("unshare"), shutil.which("nsenter")
    if unshare is None or nsenter is None:
        return None
    script = 'mount --bind "$0" /mnt && echo ready && read -r _'
    command = [unshare, "--mount", "--propagation", "private", "sh", "-c", script, str(directory)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None and process.stdout is not None
        if process.stdout.readline() != b"ready\n":
            return None
        namespace = os.open(f"/proc/{process.pid}/ns/mnt", os.O_RDONLY | os.O_CLOEXEC)
        process.stdin.close()
    enter = (nsenter, f"--mount=/proc/self/fd/{namespace}", "--setuid", str(HOST_UID), "--setgid", str(HOST_UID))
    return Jail(bwrap, directory, "/mnt", enter, (), HOST_UID, namespace)
