"""Restarting a vLLM server that failed, by a command of the user's."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal

import httpx2

_POLL = 0.5  # seconds


class RestartCommand:
    """Runs a command that restarts one server, and returns once that server answers `/health` (or does not in time).

    What goes wrong is a warning in the log: the server stays out of use, and is restarted again later.

    Args:
      command: for bash. It finds the URL of the server in $RETERM_SERVER, and must end: the server outlives it.
      patience: seconds for the command, and again for the server to answer.
    """

    def __init__(self, command: str, patience: float) -> None:
        self._command, self._patience = command, patience

    async def __call__(self, url: str) -> None:
        logging.warning("%s: restarted by %r", url, self._command)
        problem = await self._run(url)
        if problem:
            logging.warning("%s: rollout.restart %s: %r", url, problem, self._command)
        elif not await self._answers(url):
            logging.warning("%s: restarted, but does not answer after %g s", url, self._patience)

    async def _run(self, url: str) -> str:
        """What went wrong, or nothing."""
        environment = {**os.environ, "RETERM_SERVER": url}
        process = await asyncio.create_subprocess_exec(
            "bash", "-c", self._command, env=environment, stdin=asyncio.subprocess.DEVNULL, start_new_session=True
        )
        try:
            async with asyncio.timeout(self._patience):
                status = await process.wait()
            return f"ended with status {status}" if status else ""
        except TimeoutError:
            return f"did not end within {self._patience:g} s"
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                await process.wait()

    async def _answers(self, url: str) -> bool:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._patience), httpx2.AsyncClient(trust_env=False) as client:
                while True:
                    with contextlib.suppress(httpx2.TransportError):
                        if (await client.get(f"{url.rstrip('/')}/health")).status_code == 200:
                            return True
                    await asyncio.sleep(_POLL)
        return False
