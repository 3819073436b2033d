"""The rollout service, without HTTP: sandboxes and samplers that roll the batches of one run for its trainer.

A trainer opens a session, publishes weights, fetches batches and acknowledges them. What must survive a kill is in the
store: the session, which weights are served, and every finished group. A service that is started again therefore goes
on by itself, and its trainer sees no more than a pause.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol

from reterm_jax.evaluation.json_codec import decode
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.pool import FailurePool, PoolConfig
from reterm_jax.rollout.protocol import (
    Acknowledgement,
    Opened,
    Opening,
    Ready,
    Served,
    Validation,
    Weights,
    first_difference,
    tokenizer_digest,
)
from reterm_jax.rollout.samplers.base import Sampler, SamplerError
from reterm_jax.rollout.samplers.metered import MeteredSampler
from reterm_jax.rollout.scheduler import Schedule, ScheduleError, Scheduler
from reterm_jax.rollout.service_metrics import ServiceMetrics
from reterm_jax.rollout.store import GroupStore, StoreError
from reterm_jax.rollout.wire import encode_group
from reterm_jax.serving.published import PublishedError, read_manifest
from reterm_jax.tasks.task import Task
from reterm_jax.tokens.chat import ChatFormat

_SESSION, _WEIGHTS = "session", "weights"
_VALIDATION = -1  # the priority of its attempts: before those of any step


class Refused(Exception):
    """A request that is not served. `status` is that of HTTP; the message is for whoever asked."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class ServingSampler(Sampler, AbstractAsyncContextManager, Protocol):
    """A sampler that reads published weights; see `VllmSampler`."""

    @property
    def problems(self) -> dict[str, str]: ...

    @property
    def serving(self) -> bool: ...

    async def update(self, directory: str | Path) -> None: ...


@dataclasses.dataclass(frozen=True)
class ServiceParts:
    """What a service is made from.

    Attributes:
      identity: what the groups depend on beside weights and tasks, flat; the trainer's must equal it.
      tasks: all that a trainer may ask for.
      new_chat: the chat format of a published directory.
      new_sampler: a sampler whose turns end with this id.
      new_roller: what rolls groups with these.
      patience: seconds for which an update waits where all samplers failed it, in case one is started again.
    """

    identity: Mapping[str, Any]
    schedule: Schedule
    pool: PoolConfig
    tasks: Sequence[Task]
    store: GroupStore
    new_chat: Callable[[str], ChatFormat]
    new_sampler: Callable[[int], ServingSampler]
    new_roller: Callable[[Sampler, ChatFormat], Roller]
    patience: float = 0.0


class RolloutService:
    """Use it as an async context manager. Every method but `group_data` runs on its event loop; all raise Refused."""

    def __init__(self, parts: ServiceParts) -> None:
        self.parts, self.store = parts, parts.store
        self.version: int | None = None
        self.sampler: ServingSampler | None = None
        self.meter: MeteredSampler | None = None
        self.scheduler: Scheduler | None = None
        self.roller: Roller | None = None
        self.metrics = ServiceMetrics(self)
        self._by_id = {task.id: task for task in parts.tasks}
        self._fingerprints: dict[str, str] = {}
        self._session: Opening | None = None
        self._updating = asyncio.Lock()
        self._update_of: tuple[Weights, asyncio.Task[Served]] | None = None
        self._scheduling = asyncio.Event()
        self._idle: dict[int, dict[str, float]] = {}
        self._mark = (0.0, 0.0)
        self._resuming: asyncio.Task[None] | None = None
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> RolloutService:
        session, weights = self.store.note(_SESSION), self.store.note(_WEIGHTS)
        if session is not None:
            self._session = decode(Opening, session, str(self.store.path))
        if session is not None and weights is not None:
            self._resuming = asyncio.create_task(self._resume(decode(Weights, weights, str(self.store.path))))
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        running = [task for task in (self._resuming, self._update_of and self._update_of[1]) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        await self._stack.aclose()

    async def open(self, opening: Opening) -> Opened:
        """Begins a session, or takes up the one that was there."""
        field = first_difference(self.parts.identity, opening.identity)
        if field is not None:
            ours, theirs = self.parts.identity.get(field), opening.identity.get(field)
            raise Refused(
                409,
                f"the service was started with {field} = {ours!r}, the trainer has {theirs!r}; start both with the "
                "same config",
            )
        await asyncio.to_thread(self._check_tasks, {**opening.tasks, **opening.validation})
        known = self._session
        if known is not None and (known.tasks, known.validation) != (opening.tasks, opening.validation):
            raise Refused(409, "the service holds groups on other tasks; start it with another --workdir")
        if known is not None and known.tokenizer != opening.tokenizer:
            raise Refused(
                409,
                f"the trainer's tokenizer is {opening.tokenizer}, that of the groups here {known.tokenizer}; start the "
                "service with another --workdir, or the trainer with the tokenizer that it had",
            )
        try:
            self.store.acknowledge(opening.first_step)
        except StoreError as error:
            raise Refused(409, str(error)) from error
        self._session = opening
        self._update_of = None  # what is published again under a known name is loaded again
        self.store.set_note(_SESSION, dataclasses.asdict(opening))
        return Opened(self.version)

    async def weights(self, weights: Weights, wait: float) -> Served | None:
        """Has the samplers serve published weights, then begins what may be rolled with them.

        None where that takes longer than `wait` seconds: it goes on, and is asked for again with the same weights.
        """
        if self._update_of is None or self._update_of[0] != weights:
            self._update_of = weights, asyncio.create_task(self._take(weights))
        task = self._update_of[1]
        try:
            async with asyncio.timeout(wait):
                return await asyncio.shield(task)
        except TimeoutError:
            return None
        except Refused:
            self._update_of = None  # another request tries again
            raise

    async def _take(self, weights: Weights) -> Served:
        session = self._opened()
        try:
            manifest = await asyncio.to_thread(read_manifest, weights.directory)
        except PublishedError as error:
            raise Refused(422, str(error)) from error
        if manifest.version != weights.version:
            raise Refused(
                422, f"{weights.directory} holds version {manifest.version}, not {weights.version}; publish it anew"
            )
        found = tokenizer_digest(weights.directory)
        if found != session.tokenizer:
            raise Refused(
                409,
                f"{weights.directory} has tokenizer {found}, but the trainer's is {session.tokenizer}; publish from "
                "the model directory that the trainer was started with",
            )
        begun = time.monotonic()
        try:
            await self._serve(weights)
        except (SamplerError, PublishedError) as error:
            raise Refused(502, str(error)) from error
        assert self.sampler is not None
        return Served(self.sampler.problems, time.monotonic() - begun)

    async def batch(self, step: int, wait: float) -> Ready | None:
        """The batch of a step, or None where it is not whole within `wait` seconds."""
        self._opened()
        try:
            async with asyncio.timeout(wait):
                await self._scheduling.wait()
                assert self.scheduler is not None
                keys, facts = await self.scheduler.whole(step)
        except TimeoutError:
            return None
        except (ScheduleError, StoreError) as error:
            raise Refused(410, str(error)) from error
        return Ready(step, keys, {**facts, **self._idle_since(step)})

    def group_data(self, step: int, key: str) -> bytes:
        """The bytes of a group; from any thread."""
        data = self.store.data(step, key)
        if data is None:
            raise Refused(410, f"no group {key} of step {step}: a checkpoint consumed it, or it was never finished")
        return data

    async def acknowledge(self, acknowledgement: Acknowledgement) -> None:
        """A checkpoint holds what batches before the step taught."""
        self._opened()
        try:
            self.store.acknowledge(acknowledgement.step)
        except StoreError as error:
            raise Refused(409, str(error)) from error

    async def validate(self, validation: Validation) -> bytes:
        """A group that nothing is trained on, by the weights that are served."""
        session = self._opened()
        if validation.task not in session.validation:
            raise Refused(422, f"task {validation.task!r} is none of the session's validation tasks")
        if self.roller is None or self.scheduler is None:
            raise Refused(409, "no weights are served yet; publish some first")
        gate = self.scheduler.gate.at(_VALIDATION)
        task = self._by_id[validation.task]
        group, _ = await self.roller.root_group(task, validation.attempts, validation.seed, gate, False)
        return encode_group(group)

    async def _serve(self, weights: Weights) -> None:
        async with self._updating:
            if self.sampler is None:
                await self._build(weights.directory)
            assert self.sampler is not None and self.scheduler is not None
            await self._update(weights.directory)
            self.version = weights.version
            self.store.set_note(_WEIGHTS, dataclasses.asdict(weights))
            self.scheduler.serve(weights.version)
            self._scheduling.set()

    async def _update(self, directory: str) -> None:
        """Where all samplers fail, the sampler itself goes on trying to bring them up with the same weights."""
        assert self.sampler is not None
        deadline = time.monotonic() + self.parts.patience
        try:
            await self.sampler.update(directory)
        except SamplerError as error:
            if not self.parts.patience:
                raise
            logging.warning("%s; waiting %g s for a server", error, self.parts.patience)
            while not self.sampler.serving:
                if time.monotonic() > deadline:
                    raise SamplerError("; ".join(self.sampler.problems.values()) or str(error)) from error
                await asyncio.sleep(0.2)

    async def _build(self, directory: str) -> None:
        """What needs a tokenizer, which comes with the first weights."""
        parts, session = self.parts, self._opened()
        chat = await asyncio.to_thread(parts.new_chat, directory)
        self.sampler = await self._stack.enter_async_context(parts.new_sampler(chat.stop_id))
        self.meter = MeteredSampler(self.sampler)
        self.roller = parts.new_roller(self.meter, chat)
        self.scheduler = await self._stack.enter_async_context(
            Scheduler(
                parts.schedule,
                [self._by_id[name] for name in session.tasks],
                self.roller,
                FailurePool(parts.pool, self.roller.release),
                self.store,
                first_step=self.store.acknowledged,
                on_group=self.metrics.take,
            )
        )

    async def _resume(self, weights: Weights) -> None:
        try:
            await self._serve(weights)
            logging.info("resumed with version %d", weights.version)
        except (SamplerError, PublishedError, OSError) as error:
            logging.warning("cannot resume with version %d (%s); waiting for the trainer", weights.version, error)

    def _opened(self) -> Opening:
        if self._session is None:
            raise Refused(409, "no trainer has opened a session; start the trainer again")
        return self._session

    def _check_tasks(self, wanted: Mapping[str, str]) -> None:
        unknown = [name for name in wanted if name not in self._by_id]
        if unknown:
            raise Refused(
                422,
                f"{len(unknown)} tasks are unknown to the service, the first one {unknown[0]!r}; start it with the "
                "trainer's config and the same tasks",
            )
        for name, fingerprint in wanted.items():
            if name not in self._fingerprints:
                self._fingerprints[name] = self._by_id[name].fingerprint()
            if self._fingerprints[name] != fingerprint:
                raise Refused(
                    422, f"task {name!r} is another one here ({self._by_id[name].path}); give both the same tasks"
                )

    def _idle_since(self, step: int) -> dict[str, float]:
        """Time without requests since the batch before was ready; the same whenever it is asked for again."""
        assert self.meter is not None
        if step not in self._idle:
            before, self._mark = self._mark, (self.meter.seconds, self.meter.idle_seconds)
            seconds, idle = (now - then for now, then in zip(self._mark, before, strict=True))
            self._idle = {
                step: {
                    "rollout/sampler_idle_seconds": idle,
                    "rollout/sampler_busy_fraction": 1 - idle / max(seconds, 1e-9),
                }
            }
        return self._idle[step]
