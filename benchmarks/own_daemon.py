"""A Docker daemon of our own, beside the machine's, that may be stopped, killed and started again. Needs root."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType

from reterm_jax.sandbox.base import BASE_IMAGE

_START_SECONDS = 300.0


class OwnDaemon:
    """A daemon with its own files, socket and containers, and a copy of the base image; without networks."""

    def __enter__(self) -> OwnDaemon:
        self.directory = Path(tempfile.mkdtemp(prefix="reterm-daemon-"))
        self.url = f"unix://{self.directory / 'docker.sock'}"
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._start()
            save = subprocess.Popen(["docker", "save", BASE_IMAGE], stdout=subprocess.PIPE)
            self._docker("load", stdin=save.stdout)
            if save.wait() != 0:
                raise RuntimeError(f"the image {BASE_IMAGE} cannot be saved; see third_party/sandbox_base")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None):
        if self._process is not None:
            self._process.terminate()
            self._process.wait()
        for process in self.processes():
            os.kill(process, signal.SIGKILL)
        mounts = [line.split()[1] for line in Path("/proc/mounts").read_text().splitlines()]
        for place in sorted((m for m in mounts if m.startswith(f"{self.directory}/")), reverse=True):
            subprocess.run(["umount", "-l", place], check=False)
        shutil.rmtree(self.directory, ignore_errors=True)

    def restart(self, ending: signal.Signals) -> None:
        """Ends the daemon by this signal and starts it again. Blocking."""
        assert self._process is not None
        self._process.send_signal(ending)
        self._process.wait()
        self._start()

    def processes(self) -> list[int]:
        """Processes that belong to this daemon's containers or are its own, other than the daemon itself."""
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                if str(self.directory).encode() in path.read_bytes():
                    found.append(int(path.parent.name))
            except OSError:
                continue
        return [process for process in found if self._process is None or process != self._process.pid]

    def shims(self) -> int:
        """How many containers have a live shim."""
        count = 0
        for process in self.processes():
            try:
                count += Path(f"/proc/{process}/comm").read_text().startswith("containerd-shim")
            except OSError:
                continue
        return count

    def _start(self) -> None:
        places = {"data-root": "data", "exec-root": "exec", "pidfile": "pid"}
        flags = [f"--{flag}={self.directory / name}" for flag, name in places.items()]
        # In a network of its own: a daemon without a bridge removes the bridge `docker0`, which is another's here.
        command = ["unshare", "--net", "dockerd", f"--host={self.url}", *flags, "--bridge=none", "--iptables=false"]
        begun = time.monotonic()
        self._process = None
        with open(self.directory / "log", "ab") as log:
            while self._process is None or self._docker("info", check=False) != 0:
                if time.monotonic() - begun > _START_SECONDS:
                    tail = (self.directory / "log").read_text(errors="replace")[-2000:]
                    raise RuntimeError(f"dockerd does not start: {tail}")
                # On a busy machine it may give up waiting for its own parts.
                if self._process is None or self._process.poll() is not None:
                    (self.directory / "pid").unlink(missing_ok=True)
                    self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
                time.sleep(0.2)

    def _docker(self, *arguments: str, check: bool = True, stdin: object = subprocess.DEVNULL) -> int:
        command = ["docker", "--host", self.url, *arguments]
        return subprocess.run(command, check=check, stdin=stdin, capture_output=True).returncode
