"""The episode loop: a policy acts in a sandbox until it submits or a limit ends it, and the verifier judges."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence

from reterm_jax.agent.attempt import AgentLimits, Attempt, Ended, FailureState
from reterm_jax.agent.fork_points import ForkAt, ForkPoints
from reterm_jax.agent.protocol import BASH_SCHEMA, SYSTEM_PROMPT, ParsedTurn, parse_turn, render_turn
from reterm_jax.agent.turns import Turn, observation
from reterm_jax.rollout.samplers.base import Completion, Sampler, SamplerError
from reterm_jax.sandbox.base import Sandbox, SandboxError, Snapshot
from reterm_jax.sandbox.output import shorten
from reterm_jax.tasks.outcome import Outcome
from reterm_jax.tasks.task import Task
from reterm_jax.tasks.verifier import verify
from reterm_jax.tokens.chat import ChatFormat
from reterm_jax.tokens.transcript import Span, Transcript

__all__ = [
    "AgentLimits",
    "Attempt",
    "FailureState",
    "RETRY_MESSAGE",
    "Turn",
    "fixed_texts",
    "run_attempt",
    "start_messages",
]

# Tells a recovery nothing but that it is needed, so that what it does comes from what it sees.
RETRY_MESSAGE = "The task is not solved yet. Continue."
_OUT_OF_TIME = "Error: out of time; nothing was run."
_CUT = "Error: the turn was cut off after {count} tokens; nothing was run."

_FAULTS = (SandboxError, SamplerError)  # expected now and then; others are logged with where they came from


def start_messages(instruction: str, system_prompt: str = SYSTEM_PROMPT) -> list[dict[str, str]]:
    """The messages of a root attempt's prompt."""
    system = [{"role": "system", "content": system_prompt}] if system_prompt else []
    return [*system, {"role": "user", "content": instruction}]


def fixed_texts(system_prompt: str = SYSTEM_PROMPT, retry_message: str = RETRY_MESSAGE) -> list[str]:
    """All that the loop itself ever says to the policy: part of the corpus of a tokenizer made for it."""
    said = [Turn("", "x", "", 1), Turn("", "x", "", 124, 1.0, timed_out=True), Turn("", error=_OUT_OF_TIME)]
    faults = ["", "<tool_call>", "<tool_call>\n<function=x>", "<tool_call>\n<function=bash>"]
    faults += [render_turn("", ""), render_turn("", "x") * 2, render_turn("", "\0"), render_turn("", "x")[:-20]]
    said += [Turn("", error=parse_turn(text).error) for text in faults]
    said += [Turn("", error=_CUT.format(count=1))]
    return [system_prompt, retry_message, *map(observation, said)]


async def run_attempt(
    task: Task,
    sandbox: Sandbox,
    sampler: Sampler,
    chat: ChatFormat,
    limits: AgentLimits,
    *,
    seed: int,
    start: FailureState | None = None,
    retry_message: str | None = None,
    keep_failure: bool = False,
    fork_at: ForkAt = "end",
    attempt_id: str | None = None,
    temperature: float = 1.0,
    system_prompt: str = SYSTEM_PROMPT,
    release: Callable[[Snapshot], Awaitable[None]] | None = None,
) -> tuple[Attempt, Snapshot | None]:
    """Runs one attempt and has it judged. The caller closes the sandbox and ends the sampler's session (`attempt_id`).

    Faults of sampler, sandbox and verifier do not come out as exceptions: they end the attempt with an outcome that is
    not graded, so one of them never takes a whole step along.

    Args:
      sandbox: at the task's start, or forked from `start.snapshot`.
      seed: with the turn's number it gives the seed of each sampling call.
      start: the failed state that this attempt recovers from.
      retry_message: for recoveries, the tool message that follows the failed attempt.
      keep_failure: save a state of a failed attempt, before the verifier runs.
      fork_at: which one, see `fork_points`; `attempt.forked_after` says how many of the turns it comes after.
      release: called with a snapshot that turned out not to be wanted; without it the snapshot stays until its host
        closes.

    Returns:
      The attempt; and the snapshot, where `keep_failure` is set, the attempt was graded and not solved, and the
      limits leave room for a turn.

    Raises:
      ValueError: `fork_at` is unknown; or a recovery of an attempt that was submitted has no `retry_message` to go on.
    """
    if attempt_id is None:
        attempt_id = f"{start.id if start else task.id}/{seed}"
    if start is None:
        opening = chat.prompt_ids(start_messages(task.instruction, system_prompt), [BASH_SCHEMA])
        attempt = Attempt(attempt_id, task.id, Transcript([Span("prompt", tuple(opening))]))
        opening = []
    else:
        opening = _retry_ids(start, retry_message, chat)
        attempt = Attempt(
            attempt_id, task.id, start.transcript.fork(), len(start.transcript), parent=start.id, depth=start.depth + 1
        )
    episode = _Episode(task, sandbox, sampler, chat, limits, attempt, seed, temperature)
    points = ForkPoints(fork_at, episode.save, release, seed) if keep_failure else None
    episode.points = points
    try:
        await episode.act(opening, start.attempt_id if start else None)
        if attempt.outcome is None:
            if points is not None:
                await points.after_turn(attempt.turns, last=True)
            attempt.outcome = await episode.judge()
        if points is None or not attempt.outcome.graded or attempt.outcome.solved:
            return attempt, None
        attempt.forked_after, snapshot = points.take() or (None, None)
        return attempt, snapshot
    finally:
        if points is not None:
            await points.release()


def _retry_ids(start: FailureState, retry_message: str | None, chat: ChatFormat) -> list[int]:
    """Ids between a failed attempt and its recovery: what its last command printed, then the retry message."""
    last = start.turns[-1] if start.turns else None
    # A submit printed nothing: there the retry message itself is the answer.
    unseen = [observation(last)] if last is not None and (last.exit_code is not None or last.error) else []
    texts = [*unseen, retry_message] if retry_message else unseen
    if not texts:
        raise ValueError(f"failure state {start.id} ends with a submit; a recovery needs a retry message to go on")
    return chat.turn_boundary_ids(texts, bool(start.transcript.ids) and start.transcript.ids[-1] == chat.stop_id)


class _Episode:
    """One attempt while it runs."""

    def __init__(
        self,
        task: Task,
        sandbox: Sandbox,
        sampler: Sampler,
        chat: ChatFormat,
        limits: AgentLimits,
        attempt: Attempt,
        seed: int,
        temperature: float,
    ):
        self.task, self.sandbox, self.sampler, self.chat = task, sandbox, sampler, chat
        self.limits, self.attempt, self.seed, self.temperature = limits, attempt, seed, temperature
        self.points: ForkPoints | None = None
        self.max_turns = limits.recovery_turns(attempt.transcript) if attempt.prefix_len else limits.max_turns
        allowed = min(limits.attempt_timeout, task.config.agent.timeout_sec or limits.attempt_timeout)
        self.deadline = time.monotonic() + allowed

    async def act(self, opening: list[int], parent: str | None) -> None:
        """Turns until the end; sets `ended`, and `outcome` where there is nothing to verify."""
        attempt = self.attempt
        try:
            attempt.ended = await self._turns(opening, parent)
        except Exception as error:  # whatever a sampler or sandbox raises; cancellation is no Exception
            logging.warning("attempt %s: %r", attempt.id, error, exc_info=not isinstance(error, _FAULTS))
            attempt.ended = "env_error"
            attempt.outcome = Outcome(None, "env_error", f"turn {len(attempt.turns)}: {type(error).__name__}: {error}")
        if attempt.ended == "overflow":
            size = len(attempt.transcript) + len(opening)
            detail = f"the prompt has {size} tokens, the limit for a transcript is {self.limits.max_tokens}"
            attempt.outcome = Outcome(0.0, "overflow", detail)

    async def _turns(self, between: list[int], parent: str | None) -> Ended:
        """`between` are ids that come before the next turn; they join the transcript with that turn and not before, so
        that a transcript ends with a policy turn whatever ends the attempt."""
        attempt, limits = self.attempt, self.limits
        while True:
            room = limits.max_tokens - len(attempt.transcript) - len(between)
            if room <= 0:
                return "token_limit" if attempt.turns else "overflow"
            completion = await self._sample(between, min(room, limits.max_turn_tokens), parent)
            if completion is None:
                return "time_limit"
            if between:
                attempt.transcript.append(Span("observation", tuple(between)))
            ids, logprobs = tuple(completion.ids), tuple(completion.logprobs)
            attempt.transcript.append(Span("policy", ids, logprobs, completion.version))
            first = not attempt.turns
            attempt.version = completion.version if first else min(attempt.version, completion.version)
            parsed = _read(self.chat.policy_text(ids), completion)
            if parsed.submit:
                attempt.turns.append(Turn(parsed.thought, parsed.command))
                return "submit"
            if time.monotonic() >= self.deadline:
                attempt.turns.append(Turn(parsed.thought, error=_OUT_OF_TIME))
                return "time_limit"
            turn = await self._run(parsed)
            attempt.turns.append(turn)
            if len(attempt.turns) >= self.max_turns:
                return "turn_limit"
            if time.monotonic() >= self.deadline:
                return "time_limit"
            if self.points is not None:
                await self.points.after_turn(attempt.turns)
            between = self.chat.turn_boundary_ids(observation(turn), ids[-1] == self.chat.stop_id)

    async def _sample(self, between: Sequence[int], max_tokens: int, parent: str | None) -> Completion | None:
        """The next turn, or None where the attempt's time ran out first."""
        try:
            with self._timed("sampling"):
                async with asyncio.timeout(max(0.0, self.deadline - time.monotonic())) as limit:
                    completion = await self.sampler.generate(
                        [*self.attempt.transcript.ids, *between],
                        max_tokens=max_tokens,
                        temperature=self.temperature,
                        seed=_turn_seed(self.seed, len(self.attempt.turns)),
                        session=self.attempt.id,
                        parent=parent,
                    )
        except TimeoutError:
            if limit.expired():
                return None
            raise  # the sampler's own
        if not completion.ids or len(completion.ids) > max_tokens:
            raise SamplerError(f"sampler gave {len(completion.ids)} tokens where 1 to {max_tokens} were asked for")
        return completion

    async def _run(self, parsed: ParsedTurn) -> Turn:
        if parsed.command is None:
            return Turn(parsed.thought, error=parsed.error)
        left = self.deadline - time.monotonic()
        with self._timed("commands"):
            result = await self.sandbox.exec(
                parsed.command,
                timeout=max(0.1, min(self.limits.command_timeout, left)),
                user=self.task.config.agent.user,
            )
        return Turn(
            parsed.thought,
            parsed.command,
            shorten(result.output, self.limits.output_limit),
            result.exit_code,
            result.duration,
            result.timed_out,
        )

    @property
    def recoverable(self) -> bool:
        """Whether a recovery could go on from here: there is a turn to answer, and room for that and another turn."""
        attempt = self.attempt
        if not attempt.turns or self.limits.recovery_turns(attempt.transcript) <= 0:
            return False
        answer = self.chat.turn_boundary_ids([observation(attempt.turns[-1]), RETRY_MESSAGE], False)
        return len(attempt.transcript) + len(answer) + self.limits.max_turn_tokens <= self.limits.max_tokens

    async def save(self) -> Snapshot | None:
        """The state as it is now; None where no recovery could go on from it, or where it cannot be saved, which takes
        nothing from the verdict."""
        if not self.recoverable:
            return None
        try:
            with self._timed("snapshot"):
                return await self.sandbox.snapshot()
        except Exception as error:
            logging.warning("attempt %s: its state could not be saved: %r", self.attempt.id, error)
            return None

    async def judge(self) -> Outcome:
        """The verifier's verdict; what ran out of time and is not solved is a `timeout`."""
        try:
            with self._timed("verify"):
                outcome = await verify(self.sandbox, self.task)
        except Exception as error:
            logging.warning("attempt %s: verifier: %r", self.attempt.id, error, exc_info=True)
            return Outcome(None, "verifier_error", f"task {self.task.id}: {type(error).__name__}: {error}")
        if self.attempt.ended == "time_limit" and outcome.graded and not outcome.solved:
            return Outcome(outcome.reward, "timeout", outcome.detail)
        return outcome

    @contextlib.contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            timings = self.attempt.timings
            timings[part] = timings.get(part, 0.0) + time.monotonic() - begun


def _read(text: str, completion: Completion) -> ParsedTurn:
    parsed = parse_turn(text)
    if completion.stop == "length" and parsed.error is not None:
        return ParsedTurn(parsed.thought, error=_CUT.format(count=len(completion.ids)))
    return parsed


def _turn_seed(seed: int, turn: int) -> int:
    """31 bits, unrelated for neighbouring seeds and turns."""
    digest = hashlib.sha256(f"{seed}/{turn}".encode()).digest()
    return int.from_bytes(digest[:4], "big") & 0x7FFFFFFF
