"""Samples through vLLM servers: sessions stay where their prefix is cached, and weights are updated in place.

A turn that a server could not finish is sampled again on another one, so that no attempt is lost with a server. In an
update each server is paused with its requests kept, loads the published weights, forgets its caches and goes on; then
its logprobs of the manifest's probe are compared with the trainer's own. Until that comparison has passed no answer of
the server is accepted: what a stale or partly loaded one gives is thrown away, and sampled again by one that passed.

The probe tells weights apart that differ by more than rounding. After a very small step the weights before it may pass
as well; what they sample then differs no more than rounding does, and a server that stays behind is found as soon as
the difference has grown.
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np

from reterm_jax.rollout.samplers.base import Completion, SamplerError
from reterm_jax.rollout.samplers.vllm_server import Answer, Limits, ServerFailed, VllmServer
from reterm_jax.serving.published import Manifest, read_manifest

# First prompts whose server is remembered: many more than groups that run at one time.
_HOMES = 4096

# Turns in a row that fail before a server counts as lost, and failures of one turn before it is given up: it may be the
# turn that breaks servers.
_FAILURES, _TRIES = 3, 8


class _Replica:
    """A server and what is known about it.

    `serves` is set while it serves probed weights; `lost` is set, and replaced, when everything that it was asked is to
    be asked elsewhere. While it is updated neither is set.
    """

    def __init__(self, server: VllmServer) -> None:
        self.server = server
        self.serves, self.lost = asyncio.Event(), asyncio.Event()
        self.down = True
        self.problem = "has not been given weights yet"
        self.sessions = 0
        self.failures = 0  # turns in a row
        self.lock = asyncio.Lock()

    def up(self) -> None:
        self.down, self.problem, self.failures, self.lost = False, "", 0, asyncio.Event()
        self.serves.set()

    def fail(self, problem: str) -> None:
        self.down, self.problem = True, problem
        self.serves.clear()
        self.lost.set()


class VllmSampler:
    """Implements `rollout.samplers.base.Sampler` over one or more vLLM servers; see `vllm_server` for how they run.

    Use it as an async context manager, and call `update` before the first turn.

    Args:
      urls: of the servers.
      stop_id: id of the token that ends a turn.
      on_failure: what an update does about a server that fails it. "stop": raises. "exclude": goes on without it, if
        another one is there; it is tried again every `retry_after` seconds.
      restart: called with the url of a server that failed, before it is tried again; returns when it runs.
      tolerance: largest mean |Δ logprob| of the probe, in nats: above the noise of bfloat16, below other weights.
      patience: seconds for which a turn waits for a server when none is there.
      retry_after: seconds between two attempts to take a failed server back.
      turns: sampled by a server at once, at most.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        stop_id: int,
        limits: Limits = Limits(),  # noqa: B008 (frozen)
        on_failure: Literal["stop", "exclude"] = "exclude",
        restart: Callable[[str], Awaitable[None]] | None = None,
        tolerance: float = 0.05,
        patience: float = 600.0,
        retry_after: float = 10.0,
        turns: int = 256,
    ) -> None:
        if not urls or len(set(urls)) != len(urls):
            raise SamplerError(f"urls = {list(urls)}: name each vLLM server once, and one at least")
        self._stop_id, self._on_failure, self._restart = stop_id, on_failure, restart
        self._tolerance, self._patience, self._retry_after = tolerance, patience, retry_after
        self._replicas = [_Replica(VllmServer(url, limits, turns)) for url in urls]
        self._sessions: dict[str, _Replica] = {}
        self._homes: collections.OrderedDict[tuple[int, ...], _Replica] = collections.OrderedDict()
        self._published: tuple[str, Manifest] | None = None
        self._max_len = 0
        self._changed = asyncio.Event()
        self._watch: asyncio.Task | None = None
        self.retried = 0  # turns that were sampled again elsewhere
        self._away, self._away_since = 0.0, time.monotonic()

    @property
    def version(self) -> int | None:
        """Of the weights that are served; None before the first update."""
        return self._published[1].version if self._published else None

    @property
    def problems(self) -> dict[str, str]:
        """Servers that serve nothing now, with the reason."""
        return {replica.server.url: replica.problem for replica in self._replicas if replica.down}

    @property
    def serving(self) -> bool:
        """Whether any server serves probed weights."""
        return any(replica.serves.is_set() for replica in self._replicas)

    @property
    def away_seconds(self) -> float:
        """Time in which no server served."""
        return self._away + (0.0 if self.serving else time.monotonic() - self._away_since)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._watch is not None:
            self._watch.cancel()
            await asyncio.gather(self._watch, return_exceptions=True)
        await asyncio.gather(*(replica.server.close() for replica in self._replicas))

    async def generate(
        self,
        ids: Sequence[int],
        *,
        max_tokens: int,
        temperature: float,
        seed: int,
        session: str,
        parent: str | None = None,
    ) -> Completion:
        """Continues `ids`. See `Sampler.generate`; `version` is that of the oldest weights that sampled a token.

        Raises:
          SamplerError: `ids` leave no room within the servers' context, the request is refused, or no server was there
            within `patience`.
        """
        deadline = asyncio.get_running_loop().time() + self._patience
        for _ in range(_TRIES):
            replica = await self._replica(session, parent, ids, deadline)
            room = self._max_len - len(ids)
            if room < 1 or not ids:
                raise SamplerError(f"session {session}: {len(ids)} prompt tokens do not fit {self._max_len}")
            call = replica.server.generate(
                ids, max_tokens=min(max_tokens, room), temperature=temperature, seed=seed, stop_id=self._stop_id
            )
            try:
                answer = await self._accepted(replica, call)
                completion = Completion(answer.ids, answer.logprobs, answer.stop, _version(replica.server.url, answer))
                replica.failures = 0
                return completion
            except ServerFailed as error:
                problem = str(error)
            self.retried += 1
            if not replica.down and not replica.lock.locked():
                replica.failures += 1
                if replica.failures >= _FAILURES:
                    self._fail(replica, problem)
                else:
                    self._leave(session, replica)
            # What this server took must not be missing when the others are waited for.
            deadline = asyncio.get_running_loop().time() + self._patience
        raise SamplerError(f"session {session}: given up after {_TRIES} failures, the last one: {problem}")

    async def end(self, session: str) -> None:
        """Forgets where the session was."""
        replica = self._sessions.pop(session, None)
        if replica is not None:
            replica.sessions -= 1

    async def update(self, directory: str | Path) -> None:
        """Has every server serve a published directory. Turns that run are continued with the new weights.

        Raises:
          PublishedError: the directory is none; nothing was changed.
          SamplerError: a server failed and `on_failure` is "stop", or all of them did. Servers that passed serve.
        """
        directory = str(Path(directory).absolute())
        self._published = directory, read_manifest(directory)
        await asyncio.gather(*(self._bring_up(replica) for replica in self._replicas))
        failed = self.problems
        if failed and (self._on_failure == "stop" or len(failed) == len(self._replicas)):
            reasons = "; ".join(f"{url}: {problem}" for url, problem in failed.items())
            raise SamplerError(f"{len(failed)} of {len(self._replicas)} servers do not serve {directory}: {reasons}")

    async def _bring_up(self, replica: _Replica) -> None:
        """Pause, load, forget, go on, probe. Leaves the server serving, or down with nothing running on it."""
        async with replica.lock:
            assert self._published is not None
            directory, manifest = self._published
            self._leaves(replica.serves.clear)
            server = replica.server
            try:
                self._max_len = await server.max_len()
                await server.pause("keep")
                await server.load(directory)
                await server.reset_caches()
                await server.set_version(str(manifest.version))
                # A paused server computes nothing, the probe included.
                await server.resume()
                check_probe(server.url, manifest, await server.prompt_logprobs(manifest.probe.ids), self._tolerance)
            except (ServerFailed, SamplerError) as error:
                self._fail(replica, str(error))
                # Requests that are kept would run with weights that nobody vouches for.
                await _tried(server.pause("abort"))
                return
            except BaseException:
                self._fail(replica, "an update was cancelled half-way")
                raise
            if not self.serving:
                self._away += time.monotonic() - self._away_since
            replica.up()
            self._notify()

    async def _accepted(self, replica: _Replica, call: Coroutine[Any, Any, Answer]) -> Answer:
        """The server's answer once it serves probed weights. Raises ServerFailed if it is lost meanwhile."""
        lost = replica.lost

        async def answered() -> Answer:
            answer = await call
            await replica.serves.wait()
            return answer

        tasks = [asyncio.ensure_future(answered()), asyncio.ensure_future(lost.wait())]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if lost.is_set() or not tasks[0].done():
                raise ServerFailed(f"{replica.server.url}: {replica.problem}")
            return tasks[0].result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _replica(self, session: str, parent: str | None, ids: Sequence[int], deadline: float) -> _Replica:
        """Where the session is, or its parent, or others that began with these ids; else where least goes on."""
        if self._published is None:
            raise SamplerError("no weights were given to the servers yet; call update first")
        loop = asyncio.get_running_loop()
        while True:
            replica = self._sessions.get(session)
            if replica is None or replica.down:
                replica = self._place(session, parent, ids)
            if replica is not None:
                if await _within(replica.serves.wait(), deadline - loop.time()):
                    if not replica.down:
                        return replica
                    continue
            changed = self._changed
            if loop.time() >= deadline or not await _within(changed.wait(), deadline - loop.time()):
                raise SamplerError(f"session {session}: no server within {self._patience:g} s: {self.problems}")

    def _place(self, session: str, parent: str | None, ids: Sequence[int]) -> _Replica | None:
        there = [replica for replica in self._replicas if not replica.down]
        if not there:
            return None
        first = tuple(ids)
        known = (self._sessions.get(parent) if parent else None, self._homes.get(first))
        chosen = next((replica for replica in known if replica in there), None)
        chosen = chosen or min(there, key=lambda replica: replica.sessions)
        self._homes[first] = chosen
        self._homes.move_to_end(first)
        if len(self._homes) > _HOMES:
            self._homes.popitem(last=False)
        before = self._sessions.get(session)
        if before is not None:
            before.sessions -= 1
        chosen.sessions += 1
        self._sessions[session] = chosen
        return chosen

    def _leave(self, session: str, replica: _Replica) -> None:
        """Moves a session to the emptiest of the other servers that serve, if there are others."""
        others = [other for other in self._replicas if other is not replica and not other.down]
        if others and session in self._sessions:
            chosen = min(others, key=lambda other: other.sessions)
            replica.sessions -= 1
            chosen.sessions += 1
            self._sessions[session] = chosen

    def _leaves(self, leave: Callable[[], None]) -> None:
        """Does what takes a server out of service, which may have been the last one."""
        served = self.serving
        leave()
        if served and not self.serving:
            self._away_since = time.monotonic()

    def _fail(self, replica: _Replica, problem: str) -> None:
        self._leaves(lambda: replica.fail(problem))
        self._notify()
        if self._watch is None or self._watch.done():
            self._watch = asyncio.create_task(self._take_back())

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _take_back(self) -> None:
        """Restarts (if so configured) and brings up what is down, until nothing is."""
        while down := [replica for replica in self._replicas if replica.down]:
            await asyncio.sleep(self._retry_after)
            if self._restart is not None:
                still = [replica.server.url for replica in down if replica.down]
                await asyncio.gather(*(_tried(self._restart(url)) for url in still))
            await asyncio.gather(*(self._bring_up(replica) for replica in down if replica.down))


def check_probe(url: str, manifest: Manifest, served: Sequence[float], tolerance: float) -> None:
    """Raises SamplerError where the served logprobs are not those of the manifest, but for rounding."""
    differences_T = np.abs(np.asarray(served, np.float64) - np.asarray(manifest.probe.logprobs))
    mean = float(differences_T.mean())
    if not mean <= tolerance:
        raise SamplerError(
            f"{url}: does not serve version {manifest.version}: its logprobs of the probe differ by {mean:.3f} nats in "
            f"the mean and {differences_T.max():.3f} at most (tolerance {tolerance:g}): stale or partly loaded, or "
            "another model; restart it with the published directory"
        )


def _version(url: str, answer: Answer) -> int:
    if not answer.version.isdecimal():
        raise ServerFailed(
            f"{url}: answered with weights {answer.version!r}, which nobody published; was it restarted?"
        )
    return int(answer.version)


async def _within(awaitable: Coroutine[Any, Any, Any], seconds: float) -> bool:
    try:
        await asyncio.wait_for(awaitable, max(0.0, seconds))
    except TimeoutError:
        return False
    return True


async def _tried(action: Awaitable[Any]) -> None:
    """For what may be done to a server that is down already, and whose failure says nothing new."""
    try:
        await action
    except (ServerFailed, SamplerError, OSError):
        pass
