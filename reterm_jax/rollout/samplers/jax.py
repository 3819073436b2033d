"""The in-process sampler: continuous batching over a fixed number of cache slots, on the trainer's own parameters.

Each session (an attempt) holds one slot whose cache survives between turns, so a turn costs only its new tokens. What
a first prompt leaves in the cache is kept for a while: attempts of one group begin with the same ids, so the prompt of
a task is computed once for all G attempts, and the history of a failed attempt once for all K forks.

What is sampled does not depend on which requests happen to run together: every device call has one of a few fixed
shapes, rows do not interact, and the noise of a token is a function of the request's seed and the token's index alone.
"""

import asyncio
import collections
import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from reterm_jax.policy import decode
from reterm_jax.policy.config import QwenConfig
from reterm_jax.rollout.samplers.base import Completion, SamplerError

# Rows of a decode call, token widths of a prefill call (of one row), and cache lengths of both. Most of the time most
# attempts wait for a command, so few rows are ready at once, with prompts of unlike lengths: padding them to one shape
# costs more than it saves. Few shapes keep compilations few; those of a row's call depend on its own length only,
# which keeps its numerics independent of its neighbours.
_ROWS = 8
_WIDTHS = (16, 32, 64, 256)
_LENGTHS = (256, 512, 1024, 4096)


@dataclasses.dataclass
class _Session:
    slot: int
    ids: list[int]  # the tokens that the slot's cache holds
    last_used: int = 0
    busy: bool = False
    ended: bool = False  # to be freed as soon as it is no longer busy


@dataclasses.dataclass
class _Request:
    ids: list[int]
    max_tokens: int
    temperature: float
    seed: int
    session: str
    future: asyncio.Future
    out_ids: list[int] = dataclasses.field(default_factory=list)
    out_logprobs: list[float] = dataclasses.field(default_factory=list)


def _sample(logits_BV: jax.Array, temperature_B: jax.Array, seed_B: jax.Array, index_B: jax.Array):
    """Draws one token a row. Returns ids [B] and their float32 logprobs [B] at that temperature.

    Temperature 0 is greedy; its logprobs are those of temperature 1.
    """
    greedy_B = temperature_B <= 0
    scaled_BV = logits_BV / jnp.where(greedy_B, 1.0, temperature_B)[:, None]
    logprobs_BV = jax.nn.log_softmax(scaled_BV, axis=-1)

    def noise(seed, index):
        return jax.random.gumbel(jax.random.fold_in(jax.random.key(seed), index), logits_BV.shape[1:], jnp.float32)

    noise_BV = jax.vmap(noise)(seed_B, index_B)
    ids_B = jnp.argmax(jnp.where(greedy_B[:, None], logprobs_BV, logprobs_BV + noise_BV), axis=-1)
    return ids_B.astype(jnp.int32), jnp.take_along_axis(logprobs_BV, ids_B[:, None], axis=-1)[:, 0]


@functools.partial(jax.jit, static_argnames=("config", "room"), donate_argnames=("cache", "logits_SV"))
def _prefill(params, config, cache, logits_SV, slot, tokens_T, length, *, room: int):
    """Appends the first `length` tokens to one slot's cache. `room` bounds the tokens that it may hold at the end."""
    row = decode.fork(cache, slot[None], room)
    logits_1V, row = decode.extend(params, config, row, tokens_T[None], length[None])
    return decode.write(cache, slot[None], row), logits_SV.at[slot].set(logits_1V[0])


@functools.partial(
    jax.jit, static_argnames=("config", "stop_id", "steps", "room"), donate_argnames=("cache", "logits_SV")
)
def _decode(
    params, config, cache, logits_SV, slots_R, temperature_R, seed_R, index_R, left_R, *, stop_id, steps: int, room: int
):
    """Samples up to `steps` tokens in each of these slots with `left` > 0. Stops a row at the stop token.

    Returns cache, logits, ids [steps, R] (-1 where a row had stopped) and logprobs [steps, R]. The last token of a row
    is appended to its cache too, so that the cache holds the transcript when the turn ends. `room` bounds the tokens
    that any of the rows may hold at the end; attention reads no more than that.
    """

    def step(carry, _):
        rows, logits_RV, index_R, left_R = carry
        live_R = left_R > 0
        ids_R, logprobs_R = _sample(logits_RV, temperature_R, seed_R, index_R)
        ids_R = jnp.where(live_R, ids_R, 0)
        next_RV, rows = decode.extend(params, config, rows, ids_R[:, None], live_R.astype(jnp.int32))
        logits_RV = jnp.where(live_R[:, None], next_RV, logits_RV)
        left_R = jnp.where(live_R, jnp.where(ids_R == stop_id, 0, left_R - 1), left_R)
        out = (jnp.where(live_R, ids_R, -1), jnp.where(live_R, logprobs_R, 0.0))
        return (rows, logits_RV, index_R + live_R, left_R), out

    # Padding rows name a slot past the end: they read another's, and their write is dropped.
    rows = decode.fork(cache, jnp.minimum(slots_R, logits_SV.shape[0] - 1), room)
    logits_RV = logits_SV[jnp.minimum(slots_R, logits_SV.shape[0] - 1)]
    (rows, logits_RV, _, _), (ids_NR, logprobs_NR) = jax.lax.scan(
        step, (rows, logits_RV, index_R, left_R), length=steps
    )
    cache = decode.write(cache, slots_R, rows)
    return cache, logits_SV.at[slots_R].set(logits_RV, mode="drop"), ids_NR, logprobs_NR


@jax.jit
def _take_slot(cache, logits_SV, slot):
    return decode.fork(cache, slot[None]), logits_SV[slot]


@functools.partial(jax.jit, donate_argnames=("cache", "logits_SV"))
def _put_slot(cache, logits_SV, slot, row, logits_V):
    return decode.write(cache, slot[None], row), logits_SV.at[slot].set(logits_V)


@functools.partial(jax.jit, donate_argnames=("cache",))
def _clear_slot(cache, slot):
    return jax.tree.map(lambda x: x.at[slot].set(jnp.zeros_like(x[0])), cache)


class JaxSampler:
    """Samples with the given parameters. Implements `rollout.samplers.base.Sampler`.

    Args:
      params: the policy's parameters; replaced by `update`.
      config: the policy's config.
      stop_id: id of the token that ends a turn; it is part of the completion.
      slots: sessions whose caches are held at once; more sessions than slots wait for a free one.
      max_len: longest transcript in tokens, completion included.
      version: training step of `params`.
      steps: tokens per device call; requests join and leave between calls.
    """

    def __init__(
        self,
        params: Any,
        config: QwenConfig,
        *,
        stop_id: int,
        slots: int,
        max_len: int,
        version: int = 0,
        steps: int = 8,
    ):
        self.config, self.stop_id, self.max_len, self.steps, self.slots = config, stop_id, max_len, steps, slots
        self.params, self.version = params, version
        self._cache = decode.init_cache(config, slots, max_len)
        self._logits_SV = jnp.zeros((slots, config.vocab_size), jnp.float32)
        self._sessions: dict[str, _Session] = {}
        self._free = list(range(slots))[::-1]
        self._prefixes: collections.OrderedDict[tuple[int, ...], Any] = collections.OrderedDict()
        self._waiting: list[_Request] = []
        self._running: dict[int, _Request] = {}
        self._engine: asyncio.Task | None = None
        self._clock = 0
        self.tokens_sampled = self.tokens_prefilled = 0

    def update(self, params: Any, version: int) -> None:
        """Serves other parameters from now on. Cached states of the old ones are forgotten.

        Raises:
          SamplerError: requests are running; in-process updates happen between steps.
        """
        if self._running or self._waiting:
            raise SamplerError(f"cannot update to version {version} while {len(self._running)} requests run")
        self.params, self.version = params, version
        self._sessions.clear()
        self._prefixes.clear()
        self._free = list(range(self.slots))[::-1]

    async def idle(self) -> None:
        """Returns when no device call is under way; one whose requests were cancelled ends by itself."""
        if self._engine is not None:
            await asyncio.wait({self._engine})

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
        """Continues `ids`. See `Sampler.generate`; `parent` is not needed here, equal prompts are found by themselves.

        Raises:
          SamplerError: `ids` leave no room for a token within `max_len`.
        """
        del parent
        room = self.max_len - len(ids)
        if room < 1 or not ids:
            raise SamplerError(f"session {session}: {len(ids)} prompt tokens do not fit a context of {self.max_len}")
        request = _Request(
            list(ids), min(max_tokens, room), temperature, seed, session, asyncio.get_running_loop().create_future()
        )
        self._waiting.append(request)
        if self._engine is None or self._engine.done():
            self._engine = asyncio.create_task(self._run())
        try:
            return await request.future
        except asyncio.CancelledError:
            # Waiting: forgotten. Running: its slot is in a device call; it ends with that call.
            self._waiting = [other for other in self._waiting if other is not request]
            request.max_tokens = 0
            raise

    async def end(self, session: str) -> None:
        """Frees the session's slot, or has it freed when its running request is over."""
        held = self._sessions.get(session)
        if held is not None:
            held.ended = True
            self._release(session)

    def _release(self, session: str) -> None:
        held = self._sessions[session]
        if held.ended and not held.busy:
            self._free.append(self._sessions.pop(session).slot)

    async def _run(self) -> None:
        try:
            while self._waiting or self._running:
                await asyncio.sleep(0)  # lets episodes that became ready hand in their requests first
                admitted = self._admit()
                await asyncio.to_thread(self._advance, admitted)
                self._finish()
        except BaseException as error:
            for request in [*self._waiting, *self._running.values()]:
                if not request.future.done():
                    request.future.set_exception(SamplerError(f"sampler failed: {error!r}"))
            self._waiting, self._running = [], {}
            raise

    def _admit(self) -> list[_Request]:
        """Gives waiting requests a slot, in order of arrival, as far as there are slots."""
        admitted, still = [], []
        for request in self._waiting:
            held = self._sessions.get(request.session) or self._open(request)
            if held is None:
                still.append(request)
                continue
            self._clock += 1
            held.last_used, held.busy = self._clock, True
            self._running[held.slot] = request
            admitted.append(request)
        self._waiting = still
        return admitted

    def _open(self, request: _Request) -> _Session | None:
        if not self._free:
            # A session that is between turns gives up its slot; it is prefilled again when it comes back.
            idle = [name for name, held in self._sessions.items() if not held.busy]
            if not idle:
                return None
            victim = min(idle, key=lambda name: self._sessions[name].last_used)
            self._free.append(self._sessions.pop(victim).slot)
        held = _Session(self._free.pop(), [])
        self._reset(held.slot)
        self._sessions[request.session] = held
        return held

    def _reset(self, slot: int) -> None:
        self._cache = _clear_slot(self._cache, np.int32(slot))

    def _advance(self, admitted: list[_Request]) -> None:
        """Device work of one round: prefill of the admitted requests, then a few tokens of every running one."""
        new_prompts: dict[tuple[int, ...], list[int]] = {}  # to the slots that begin with it
        for request in admitted:
            held = self._sessions[request.session]
            if request.ids[: len(held.ids)] != held.ids or len(held.ids) >= len(request.ids):
                # Not an extension of what the slot holds (or no new token, hence no logits of its own): start over.
                self._reset(held.slot)
                held.ids = []
            known = len(held.ids)
            held.ids = list(request.ids)
            if not known:
                key = tuple(request.ids)
                if key in self._prefixes or key in new_prompts:
                    new_prompts.setdefault(key, []).append(held.slot)
                    continue
                new_prompts[key] = [held.slot]
            self._prefill(held.slot, request.ids, known)
        self._share(new_prompts)

        by_room: dict[int, list[int]] = {}
        for slot, request in self._running.items():
            held = len(self._sessions[request.session].ids)
            by_room.setdefault(self._room(held + self.steps), []).append(slot)
        for room, slots in by_room.items():
            for start in range(0, len(slots), _ROWS):
                self._decode(slots[start : start + _ROWS], room)

    def _decode(self, slots: list[int], room: int) -> None:
        """A few tokens of the requests that run in these slots."""
        slots_R = np.full(_ROWS, self.slots, np.int32)
        temperature_R = np.ones(_ROWS, np.float32)
        seed_R, index_R, left_R = (np.zeros(_ROWS, np.int32) for _ in range(3))
        for row, slot in enumerate(slots):
            request = self._running[slot]
            slots_R[row], temperature_R[row], seed_R[row] = slot, request.temperature, request.seed & 0x7FFFFFFF
            index_R[row] = len(request.out_ids)
            left_R[row] = request.max_tokens - len(request.out_ids)
        self._cache, self._logits_SV, ids_NR, logprobs_NR = _decode(
            self.params, self.config, self._cache, self._logits_SV, slots_R, temperature_R, seed_R, index_R, left_R,
            stop_id=self.stop_id, steps=self.steps, room=room,
        )  # fmt: skip
        ids_NR, logprobs_NR = np.asarray(ids_NR), np.asarray(logprobs_NR)
        for row, slot in enumerate(slots):
            request = self._running[slot]
            live_N = ids_NR[:, row] >= 0
            ids = ids_NR[live_N, row].tolist()
            request.out_ids += ids
            request.out_logprobs += logprobs_NR[live_N, row].tolist()
            self._sessions[request.session].ids += ids
            self.tokens_sampled += len(ids)

    def _share(self, new_prompts: dict[tuple[int, ...], list[int]]) -> None:
        """Copies what a prompt left in one slot to the other slots that begin with it, and keeps it for later ones."""
        for key, slots in new_prompts.items():
            if key not in self._prefixes:
                self._prefixes[key] = _take_slot(self._cache, self._logits_SV, np.int32(slots.pop(0)))
            self._prefixes.move_to_end(key)
            for slot in slots:
                self._cache, self._logits_SV = _put_slot(
                    self._cache, self._logits_SV, np.int32(slot), *self._prefixes[key]
                )
        while len(self._prefixes) > self.slots:
            self._prefixes.popitem(last=False)

    def _prefill(self, slot: int, ids: list[int], known: int) -> None:
        """Appends `ids` to a slot that holds the first `known` of them."""
        self.tokens_prefilled += len(ids) - known
        for start in range(known, len(ids), _WIDTHS[-1]):
            part = ids[start : start + _WIDTHS[-1]]
            tokens_T = np.zeros(next(width for width in _WIDTHS if len(part) <= width), np.int32)
            tokens_T[: len(part)] = part
            self._cache, self._logits_SV = _prefill(
                self.params, self.config, self._cache, self._logits_SV, np.int32(slot), tokens_T, np.int32(len(part)),
                room=self._room(start + len(part)),
            )  # fmt: skip

    def _room(self, tokens: int) -> int:
        """The shortest cache length of a device call that has room for so many tokens."""
        return min(next((length for length in _LENGTHS if tokens <= length), self.max_len), self.max_len)

    def _finish(self) -> None:
        for slot, request in list(self._running.items()):
            stopped = bool(request.out_ids) and request.out_ids[-1] == self.stop_id
            if not stopped and len(request.out_ids) < request.max_tokens:
                continue
            del self._running[slot]
            self._sessions[request.session].busy = False
            self._release(request.session)
            if not request.future.done():
                request.future.set_result(
                    Completion(request.out_ids, request.out_logprobs, "stop" if stopped else "length", self.version)
                )
