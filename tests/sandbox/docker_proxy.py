"""A Docker socket of the tests' own, in front of the daemon's: it can be cut, refuse and be slow."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

DAEMON = "/var/run/docker.sock"


class DockerProxy:
    """Passes bytes between clients of `path` and the daemon. `cut()` drops all connections and refuses new ones."""

    def __init__(self, path: Path) -> None:
        self.path, self.delay = path, 0.0
        self._pairs: list[socket.socket] = []
        self._server: socket.socket | None = None
        self.mend()

    @property
    def url(self) -> str:
        return f"unix://{self.path}"

    def mend(self) -> None:
        self._server = socket.socket(socket.AF_UNIX)
        self._server.bind(str(self.path))
        self._server.listen(64)
        threading.Thread(target=self._accept, args=(self._server,), daemon=True).start()

    def cut(self) -> None:
        assert self._server is not None
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        os.unlink(self.path)
        self.drop()

    def drop(self) -> None:
        """Ends all connections; new ones are served."""
        for end in self._pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def _accept(self, server: socket.socket) -> None:
        while True:
            try:
                client, _ = server.accept()
            except OSError:
                return
            daemon = socket.socket(socket.AF_UNIX)
            daemon.connect(DAEMON)
            self._pairs += [client, daemon]
            for source, target in ((client, daemon), (daemon, client)):
                threading.Thread(target=self._pass, args=(source, target), daemon=True).start()

    def _pass(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                time.sleep(self.delay)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
