"""Where the trainer's groups come from: a rollout service, which is given weights as published directories.

Process 0 talks to it; groups are broadcast. Publishing goes on while the trainer saves and waits, and the next batch is
fetched while it updates, so that with `max_staleness` of 1 or more neither side need wait for the other.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any, Self

import jax

from reterm_jax.checkpoint.publish import Publisher
from reterm_jax.rollout.client import ServiceClient
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.protocol import Opening, Ready, Validation, Weights
from reterm_jax.rollout.scheduler import Batch
from reterm_jax.rollout.wire import decode_group, encode_group
from reterm_jax.tasks.task import Task
from reterm_jax.training.broadcast import from_process_0

_VALIDATIONS = 16  # groups at once


class RemoteRollouts:
    """Implements `Rollouts`. Raises ServiceError and PublishError.

    Args:
      client, publisher: closed in the end.
      opening: names the step that training goes on from.
      steps: of the whole training.
    """

    def __init__(self, client: ServiceClient, publisher: Publisher, opening: Opening, steps: int) -> None:
        self._client, self._publisher, self._opening, self._steps = client, publisher, opening, steps
        self._talks = jax.process_index() == 0
        self._publishing: concurrent.futures.Future[dict[str, float]] | None = None
        self._fetched: dict[int, concurrent.futures.Future[bytes]] = {}
        # One thread each, and those of validation: a publication must not wait behind a batch that needs it.
        self._threads = concurrent.futures.ThreadPoolExecutor(2 + _VALIDATIONS, thread_name_prefix="rollouts")
        self._facts: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        if self._talks:
            await asyncio.to_thread(self._client.open, self._opening)
        # What a run published that was killed after this checkpoint is published again.
        self._publisher.discard_from(self._opening.first_step)
        return self

    async def __aexit__(self, kind: type | None, *_: object) -> None:
        try:
            if kind is None:
                await self._served()
        finally:
            self._client.close()
            self._threads.shutdown(cancel_futures=True)
            self._publisher.close()

    async def publish(self, step: int, params: Any) -> None:
        await self._served()
        begun = time.monotonic()
        self._publisher.publish(step, params)
        self._publishing = self._threads.submit(self._serve, step, begun)

    async def batch(self, step: int) -> Batch:
        payload = await from_process_0(lambda: self._payload(step))
        ready, blobs = _unpack(payload)
        if self._talks and step + 1 < self._steps:
            self._fetch(step + 1)
        return Batch(step, [decode_group(blob) for blob in blobs], {**ready.facts, **self._facts})

    async def validate(self, tasks: Sequence[Task], attempts: int, seed: str) -> list[Group]:
        await self._served()
        names = [task.id for task in tasks]

        async def one(name: str) -> bytes:
            message = Validation(name, attempts, f"{seed}/{name}")
            future = self._threads.submit(self._client.validate, message)
            return encode_group(await asyncio.wrap_future(future))

        async def every() -> bytes:
            return _pack({}, await asyncio.gather(*map(one, names)))

        _, blobs = _split(await from_process_0(every))
        return [decode_group(blob) for blob in blobs]

    def acknowledge(self, step: int) -> None:
        if self._talks:
            self._client.acknowledge(step)

    def record(self) -> dict[str, Any]:
        return {}  # what a service must remember is in its own store

    def _serve(self, step: int, begun: float) -> dict[str, float]:
        """Runs beside training: waits for the disk, then for the samplers."""
        self._publisher.wait()
        written = time.monotonic()
        facts = {"rollout/publish_seconds": written - begun}
        if self._talks:
            served = self._client.weights(Weights(step, str(self._publisher.path(step))))
            facts["rollout/update_seconds"] = time.monotonic() - written
            facts["rollout/samplers_down"] = len(served.problems)
        return facts

    async def _served(self) -> None:
        """Waits for the last publication, and raises what became of it."""
        if self._publishing is not None:
            self._facts = await asyncio.wrap_future(self._publishing)
            self._publishing = None

    def _fetch(self, step: int) -> concurrent.futures.Future[bytes]:
        if step not in self._fetched:
            self._fetched[step] = self._threads.submit(self._download, step)
        return self._fetched[step]

    def _download(self, step: int) -> bytes:
        ready, blobs = self._client.batch(step)
        return _pack(dataclasses.asdict(ready), blobs)

    async def _payload(self, step: int) -> bytes:
        fetching = asyncio.wrap_future(self._fetch(step))
        if self._publishing is not None:
            # The batch may need these weights: where they are refused it would be waited for in vain.
            serving = asyncio.ensure_future(self._served())
            await asyncio.wait({fetching, serving}, return_when=asyncio.FIRST_COMPLETED)
            if serving.done() and serving.exception() is not None:
                fetching.cancel()
                serving.result()
        try:
            return await fetching
        finally:
            self._fetched.pop(step, None)


def _pack(head: dict[str, Any], blobs: Sequence[bytes]) -> bytes:
    text = json.dumps({"head": head, "sizes": [len(blob) for blob in blobs]}).encode()
    return b"%d\n" % len(text) + text + b"".join(blobs)


def _split(payload: bytes) -> tuple[dict[str, Any], list[bytes]]:
    length, _, rest = payload.partition(b"\n")
    record, start, blobs = json.loads(rest[: int(length)]), int(length), []
    for size in record["sizes"]:
        blobs.append(rest[start : start + size])
        start += size
    return record["head"], blobs


def _unpack(payload: bytes) -> tuple[Ready, list[bytes]]:
    head, blobs = _split(payload)
    return Ready(**head), blobs
