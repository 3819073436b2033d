"""What the cold start learns from: scripted first attempts (for a model without pretraining) and expert recoveries.

Both run through the same episode loop, sandboxes and verifier as the policy's own attempts, and are kept on disk.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from reterm_jax.agent.attempt import AgentLimits, Attempt
from reterm_jax.agent.episode import RETRY_MESSAGE, fixed_texts
from reterm_jax.agent.scripted import ScriptedPolicy
from reterm_jax.recovery.collect import Collector, FailureSource, scripted_failures
from reterm_jax.recovery.dataset import DatasetError, Row, read_rows, row_transcript, write_rows
from reterm_jax.rollout.groups import Roller
from reterm_jax.sandbox.base import SandboxHost
from reterm_jax.tasks import families
from reterm_jax.tasks.families import names
from reterm_jax.tasks.task import Task
from reterm_jax.tokens.chat import ChatFormat
from reterm_jax.tokens.packing import Example

Progress = Callable[[int, int], None]


async def corpus(host: SandboxHost, tasks: Sequence[Task], *, seed: int, retry_message: str) -> list[str]:
    """Texts for the tiny tokenizer: all that is said in these families, and what terminals answer.

    One failed attempt and its recovery are played for two tasks of each family and obstacle.
    """

    pools = (names.NOUNS, names.PLACES, names.COLORS, names.KEYS, names.TOOLS, names.SCRIPTS)
    texts = [" ".join(pool) for pool in (*pools, names.EXTENSIONS, names.SUFFIXES)]
    texts += [RETRY_MESSAGE, *fixed_texts(retry_message=retry_message)]
    kinds: dict[tuple[str, str], list[Task]] = {}
    for task in tasks:
        kinds.setdefault((task.metadata["family"], task.metadata["obstacle"]), []).append(task)
    for task in (task for kind in kinds.values() for task in kind[:2]):
        texts.append(task.instruction)
        rng = random.Random(f"{seed}/corpus/{task.id}")
        sandbox = await host.start(task)
        try:
            history: list[tuple[str, str]] = []
            for play in (lambda: families.failure(task, rng), lambda: families.expert(task, history, rng)):  # noqa: B023
                for action in play():
                    texts += [action.thought, action.command]
                    if action == families.SUBMIT:
                        break
                    result = await sandbox.exec(action.command, timeout=10)
                    history.append((action.command, result.output))
                    texts.append(result.output)
        finally:
            await sandbox.close()
    return texts


async def scripted_attempts(
    host: SandboxHost,
    chat: ChatFormat,
    limits: AgentLimits,
    tasks: Sequence[Task],
    count: int,
    *,
    seed: int,
    concurrent: int,
    retry_message: str,
    path: Path,
    progress: Progress,
) -> list[Attempt]:
    """`count` scripted attempts on `tasks`; read from `path` where it exists, else written there.

    Every second one goes on with another attempt from the state that it left, if it failed.
    """
    if path.exists():
        return [Attempt.from_dict(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    gate, done = asyncio.Semaphore(concurrent), 0

    def roller(actions: Sequence[families.Action]) -> Roller:
        return Roller(host, ScriptedPolicy(chat, actions), chat, limits, concurrent, retry_message)

    async def one(index: int) -> Attempt:
        nonlocal done
        task = tasks[index % len(tasks)]
        rng = random.Random(f"{seed}/first/{index}")
        first = roller(families.first_attempt(task, rng))
        attempt, state = await first.attempt(task, f"first/{index}", gate, start=None, keep=index % 2 == 1)
        if state is not None:
            try:
                second = roller(families.next_attempt(task, rng))
                attempt, _ = await second.attempt(task, f"next/{index}", gate, start=state, keep=False)
            finally:
                await host.release(state.snapshot)
        done += 1
        progress(done, count)
        return attempt

    attempts = await asyncio.gather(*(one(index) for index in range(count)))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text("".join(json.dumps(a.to_dict()) + "\n" for a in attempts), encoding="utf-8")
    partial.replace(path)
    return list(attempts)


async def recoveries(
    host: SandboxHost,
    chat: ChatFormat,
    limits: AgentLimits,
    tasks: Sequence[Task],
    failures: FailureSource | None,
    *,
    seed: int,
    wanted: int,
    concurrent: int,
    retry_message: str,
    path: Path,
    progress: Progress,
) -> list[Row]:
    """Demonstrations of the expert's recoveries; read from `path` where it exists, else collected and written there.

    Args:
      failures: whose failed attempts the expert takes over; None: scripted ones.
      wanted: at most this many rows, over tasks in a seeded order.
    """
    if path.exists():
        return read_rows(path)
    source = failures or scripted_failures(
        chat, lambda task, attempt_seed: families.failure(task, random.Random(attempt_seed))
    )
    collector = Collector(
        host,
        chat,
        source,
        lambda task, history, attempt_seed: families.expert(task, history, random.Random(attempt_seed)),
        limits,
        concurrent=concurrent,
        retry_message=retry_message,
    )
    order = random.Random(f"{seed}/recoveries").sample(list(tasks), len(tasks))
    rows: list[Row] = []
    counts: dict[str, int] = {}
    start, attempt_seed = 0, seed
    while len(rows) < wanted:
        chunk = order[start : start + max(concurrent, wanted - len(rows))]
        collection = await collector.collect(chunk, seed=attempt_seed, progress=_kept(len(rows), wanted, progress))
        rows += collection.rows
        for name, count in collection.counts.items():
            counts[name] = counts.get(name, 0) + count
        start += len(chunk)
        if start >= len(order):
            start, attempt_seed = 0, attempt_seed + 1
            if attempt_seed > seed + 20:
                raise RuntimeError(
                    f"only {len(rows)} of {wanted} demonstrations after 20 rounds over {len(order)} tasks ({counts}); "
                    "ask for fewer, or give more tasks"
                )
    rows = rows[:wanted]
    write_rows(path, rows)
    print("  " + "  ".join(f"{name} {count}" for name, count in counts.items() if count))
    return rows


def _kept(before: int, wanted: int, progress: Progress) -> Callable[[int, int, int], None]:
    """A collector's progress that tells of each new row, on top of those `before` it."""
    last = 0

    def told(kept: int, done: int, total: int) -> None:
        nonlocal last
        if kept > last and before + kept <= wanted:
            progress(before + kept, wanted)
        last = kept

    return told


def warm_up_examples(attempts: Sequence[Attempt]) -> list[Example]:
    """Loss on everything after the prompt, what terminals answer included.

    This stands in for pretraining: a model from scratch learns to copy names from seeing them repeated, and terminals
    repeat them.
    """
    examples = []
    for attempt in attempts:
        ids, _, _, _ = attempt.transcript.arrays()
        prompt = len(attempt.transcript.spans[0].ids)
        examples.append(Example(ids=ids, loss_mask=np.arange(len(ids)) >= prompt, name=attempt.id))
    return examples


def renamed(examples: Sequence[Example], chat: ChatFormat, *, copies: int, seed: int) -> list[Example]:
    """`copies` versions of each example: itself, and others with the generated tasks' names exchanged throughout.

    A model from scratch would sooner remember which name stands where than learn to copy it; where each version has
    other names, only copying helps. Each name is one token of the tiny tokenizer, so a version is a permutation of ids.
    """
    if copies == 1:
        return list(examples)
    pools = [
        np.array([chat.tokenizer.convert_tokens_to_ids(word) for word in pool])
        for pool in (names.NOUNS, names.PLACES, names.COLORS, names.KEYS, names.TOOLS, names.SCRIPTS)
    ]
    rng = np.random.default_rng(seed)
    versions = list(examples)
    for copy in range(1, copies):
        for example in examples:
            table = np.arange(len(chat.tokenizer))
            for pool in pools:
                table[pool] = rng.permutation(pool)
            versions.append(dataclasses.replace(example, ids=table[example.ids], name=f"{example.name}/{copy}"))
    return versions


def recovery_examples(rows: Sequence[Row], chat: ChatFormat, *, row_length: int) -> list[Example]:
    """Loss on the recovery's policy tokens only, from `train_from_message_index` on.

    Rows of more than `row_length` tokens are left out, and their number is printed.

    Raises DatasetError where none is left, or a row cannot be rendered.
    """
    examples = []
    for row in rows:
        ids, loss_mask, _, _ = row_transcript(row, chat).arrays()
        if len(ids) <= row_length:
            examples.append(Example(ids=ids, loss_mask=loss_mask, name=row.id))
    if len(examples) < len(rows):
        print(
            f"sft data: {len(rows) - len(examples)} of {len(rows)} rows are longer than {row_length} tokens, left out"
        )
    if not examples:
        raise DatasetError(
            "sft data", "rows", f"none of {len(rows)} has at most config.sft.row_length = {row_length} tokens"
        )
    return examples
