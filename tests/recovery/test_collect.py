"""Collecting over a host that keeps files in a dictionary: a task is solved once its fix was run."""

import asyncio
import random
from pathlib import Path
from types import SimpleNamespace

import pytest

from reterm_jax.agent.episode import RETRY_MESSAGE, AgentLimits
from reterm_jax.recovery.collect import REJECTIONS, Collector, scripted_failures
from reterm_jax.recovery.dataset import read_rows, row_transcript, write_rows
from reterm_jax.rollout.samplers.base import SamplerError
from reterm_jax.sandbox import SandboxUnavailable, make_host
from reterm_jax.sandbox.base import ExecResult, SandboxError, Snapshot
from reterm_jax.sandbox.jail import find_bwrap
from reterm_jax.tasks import families
from reterm_jax.tasks.config import TaskConfig, VerifierConfig
from reterm_jax.tasks.families import Action

LIMITS = AgentLimits(max_turns=5, max_tokens=3000, max_turn_tokens=200, command_timeout=10.0, attempt_timeout=60.0)


class FakeHost:
    """Counts sandboxes; a fork starts from the commands that led to its snapshot."""

    def __init__(self):
        self.open = self.most = 0
        self.snapshots = {}

    async def start(self, task, done=()):
        if task.id == "broken":
            raise SandboxError("no image")
        self.open += 1
        self.most = max(self.most, self.open)
        return FakeSandbox(self, list(done))

    async def fork(self, snapshot, task):
        return await self.start(task, self.snapshots[snapshot.id])

    async def release(self, snapshot):
        self.snapshots.pop(snapshot.id)


class FakeSandbox:
    workdir = "/app"
    lingers = False

    def __init__(self, host, done):
        self.host, self.done = host, done

    async def exec(self, command, *, timeout, user=None, env=None, fresh=False, private=False):
        await asyncio.sleep(0)
        if not fresh:
            self.done.append(command)
        return ExecResult("" if fresh else f"ran {command}\n", int(command == "bad"), 0.0, False)

    async def upload(self, source, target, *, private=False):
        pass

    async def download(self, source, target, *, private=False):
        target.mkdir()
        (target / "reward.txt").write_text(str(int("fix" in self.done)))

    async def snapshot(self):
        snapshot = Snapshot(str(random.random()), "bubblewrap", "test")
        self.host.snapshots[snapshot.id] = list(self.done)
        return snapshot

    async def close(self):
        self.host.open -= 1


def task(name):
    config = TaskConfig(verifier=VerifierConfig(timeout_sec=5.0))
    return SimpleNamespace(id=name, instruction=f"look {name}", tests_dir=Path("/none"), config=config)


def play(*commands):
    return [Action("look", command) for command in commands]


def collect(chat, tasks, failed, teacher, host=None, **options):
    host = host or FakeHost()
    failures = failed if callable(failed) else scripted_failures(chat, lambda task, seed: failed)
    collector = Collector(host, chat, failures, teacher, LIMITS, concurrent=2)
    result = asyncio.run(collector.collect(tasks, seed=0, **options))
    # Whatever happens, no sandbox and no snapshot is left.
    assert host.open == 0 and not host.snapshots and host.most <= 2
    return result


def test_a_demonstration(chat, tmp_path):
    seen = []

    def teacher(task, history, seed):
        seen.append(history)
        return play("fix")

    result = collect(chat, [task("a")], play("ls", "bad"), teacher)
    assert seen == [[("ls", "ran ls\n"), ("bad", "ran bad\n")]]
    (row,) = result.rows
    assert [m["role"] for m in row.messages] == ["system", "user"] + ["assistant", "tool"] * 4 + ["assistant"]
    assert row.messages[5]["content"] == "ran bad\n(exit code 1)"
    assert row.messages[7]["content"] == RETRY_MESSAGE and row.train_from_message_index == 8
    assert "fix" in row.messages[8]["content"] and row.messages[9]["content"] == "ran fix\n"
    write_rows(tmp_path / "rows.jsonl", result.rows)
    assert read_rows(tmp_path / "rows.jsonl") == result.rows


def test_filters_and_their_counts(chat):
    scripts = {
        "good": play("ls"), "good-too": play("ls"), "solved": play("fix"), "unsolved": play("ls"), "long": play("ls"),
        "idle": play("ls"), "broken": play("ls"),
    }  # fmt: skip
    recoveries = {"unsolved": play("ls"), "long": play("fix", *["ls"] * 9), "idle": []}
    seen, rows = [], []
    result = collect(
        chat,
        [task(name) for name in scripts],
        scripted_failures(chat, lambda task, seed: scripts[task.id]),
        lambda task, history, seed: recoveries.get(task.id, play("fix")),
        progress=lambda kept, done, total: seen.append((done, total)) or rows.append(kept),
    )
    assert [row.task_id for row in result.rows] == ["good", "good-too"]
    expected = {"kept": 2, "first_solved": 1, "unsolved": 2, "not_submitted": 1, "env_error": 1}
    assert result.counts == {name: 0 for name in REJECTIONS} | expected
    assert seen == [(n, 7) for n in range(1, 8)]
    assert rows == sorted(rows) and rows[-1] == 2


def test_the_same_messages_are_kept_once(chat):
    result = collect(chat, [task("a")], play("ls"), lambda *_: play("fix"), attempts=3)
    assert len(result.rows) == 1 and (result.counts["kept"], result.counts["duplicate"]) == (1, 2)


def test_every_attempt_has_its_own_seed_and_a_repeat_has_the_same(chat):
    """With one seed for all tasks, a sampler would draw the same noise on each, and a script fail in the same way."""

    def seeds():
        seen = []

        def failures(task, seed):
            seen.append((task.id, seed))
            return scripted_failures(chat, lambda *_: play("ls"))(task, seed)

        collect(chat, [task(name) for name in "abcd"], failures, lambda *_: play("fix"), attempts=2)
        return sorted(seen)

    first = seeds()
    assert len({seed for _, seed in first}) == 8
    assert seeds() == first


def test_a_recovery_that_ran_nothing_is_no_demonstration(chat):
    class Flaky(FakeHost):
        async def fork(self, snapshot, task):
            return await self.start(task, ["fix"])

    result = collect(chat, [task("a")], play("ls"), lambda *_: [], host=Flaky())
    assert result.counts["no_op"] == 1 and not result.rows


def test_sampled_failures(chat):
    """A policy that babbles: its turns are kept as the text that they were."""

    class Babbler:
        async def generate(self, ids, *, max_tokens, **_):
            from reterm_jax.rollout.samplers.base import Completion

            new = chat.policy_ids("look look") if len(ids) % 2 else chat.policy_ids("look")[:-1]
            return Completion(new, [-1.0] * len(new), "stop" if new[-1] == chat.stop_id else "length", 4)

        async def end(self, session):
            pass

    result = collect(chat, [task("a")], lambda task, seed: Babbler(), lambda *_: play("fix"))
    (row,) = result.rows
    assert row.messages[2]["content"] in ("look", "look look") and "Error" in row.messages[3]["content"]
    trained = row_transcript(row, chat).arrays()
    assert "fix" in chat.tokenizer.decode(trained[0][trained[1]])


def test_a_sampler_that_fails_costs_one_demonstration(chat):
    class Gone:
        async def generate(self, ids, **_):
            raise SamplerError("gone")

        async def end(self, session):
            pass

    result = collect(chat, [task("a"), task("b")], lambda task, seed: Gone(), lambda *_: play("fix"))
    assert result.counts["env_error"] == 2


def test_a_bug_in_a_script_comes_out_and_leaves_nothing(chat):
    host = FakeHost()

    def teacher(task, history, seed):
        raise KeyError("bug")

    with pytest.raises(ExceptionGroup):
        collect(chat, [task(str(n)) for n in range(4)], play("ls"), teacher, host=host)
    assert host.open == 0 and not host.snapshots


def test_generated_tasks_in_real_sandboxes(chat, tmp_path):
    """The expert recovers from failures of every family, and what is stored is what the episode loop saw."""
    try:
        find_bwrap()
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    tasks = families.generate(tmp_path / "tasks", split="train", per_family=1, seed=5)

    async def run():
        host = make_host("bubblewrap", tmp_path / "run", max_concurrent=2, run_id="collect")
        try:
            failures = scripted_failures(chat, lambda task, seed: families.failure(task, random.Random(seed)))
            teacher = lambda task, history, seed: families.expert(task, history)  # noqa: E731
            return await Collector(host, chat, failures, teacher, LIMITS, concurrent=2).collect(tasks, seed=1)
        finally:
            await host.close()

    result = asyncio.run(run())
    assert result.counts["kept"] == len(tasks) == 10, result.counts
    for row in result.rows:
        ids, mask, *_ = row_transcript(row, chat).arrays()
        assert chat.tokenizer.decode(ids[mask]).count("<|im_end|>") == sum(
            m["role"] == "assistant" for m in row.messages[row.train_from_message_index :]
        )
