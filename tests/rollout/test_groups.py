"""Root groups and recoveries in real sandboxes, played by scripts instead of a policy."""

import asyncio
import dataclasses
import shutil

import pytest
from transformers import AutoTokenizer

from reterm_jax.agent.attempt import AgentLimits
from reterm_jax.agent.scripted import ScriptedPolicy
from reterm_jax.rollout.groups import Roller
from reterm_jax.rollout.pool import FailurePool, PoolConfig
from reterm_jax.rollout.restore import restore_state
from reterm_jax.rollout.scheduler import Schedule, Scheduler
from reterm_jax.rollout.store import GroupStore
from reterm_jax.sandbox import make_host
from reterm_jax.sandbox.base import SandboxError
from reterm_jax.tasks import families
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat

LIMITS = AgentLimits(max_turns=4, max_tokens=2048, max_turn_tokens=128, command_timeout=5, attempt_timeout=60)
# Solved only by who comes second: the first attempt leaves a mark and fails, its recovery finds the mark.
BY_MARK = "[ -e /app/mark ] && touch /app/done; touch /app/mark"


async def roll_steps(path, roller, task, count=1, pool=PoolConfig(), after=lambda pool: None, **counts):  # noqa: B008
    """The groups of so many steps; `after` is called with the pool at the end of each."""
    states = FailurePool(pool, roller.release)
    schedule, batches = Schedule(seed=0, steps=count, tasks=1, **counts), []
    with GroupStore(path / "groups", {}) as store:
        async with Scheduler(schedule, [task], roller, states, store, first_step=0) as scheduler:
            for step in range(count):
                scheduler.serve(step)
                batches.append((await scheduler.batch(step)).groups)
                after(states)
    return batches


@pytest.fixture
def task(tmp_path):
    made = families.generate(tmp_path / "tasks", split="train", per_family=1, seed=0, families=("write",))[0]
    (made.tests_dir / "test.sh").write_text("[ -e /app/done ]; echo $((1 - $?)) > /logs/verifier/reward.txt\n")
    return made


@pytest.fixture
def roller(tmp_path):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    chat = ChatFormat(AutoTokenizer.from_pretrained(tiny_tokenizer.build([BY_MARK], tmp_path / "tokenizer")))
    policy = ScriptedPolicy(chat, [families.Action("try", BY_MARK), families.SUBMIT])
    host = make_host("bubblewrap", tmp_path / "run", max_concurrent=3, run_id="test")
    yield Roller(host, policy, chat, LIMITS, 3, "again")
    asyncio.run(host.close())


def test_recoveries_start_from_the_state_that_the_failure_left(roller, task, tmp_path):
    (groups,) = asyncio.run(roll_steps(tmp_path, roller, task, attempts=2, states=2, forks=3))
    assert [(group.kind, group.rewards) for group in groups] == [
        ("root", [0.0, 0.0]),
        ("recovery", [1.0, 1.0, 1.0]),
        ("recovery", [1.0, 1.0, 1.0]),
    ]
    for group in groups[1:]:
        failed = next(a for a in groups[0].attempts if a.id == group.state.attempt_id)
        for attempt in group.attempts:
            assert attempt.prefix_len == len(failed.transcript)
            assert attempt.transcript.ids[: attempt.prefix_len] == failed.transcript.ids


def test_a_fork_at_an_error_finds_the_files_of_that_moment(roller, task):
    """What the attempt did after its unrepaired error is not in the sandbox that a recovery gets."""
    actions = [families.Action("try", command) for command in ("touch /app/early", "false", "touch /app/late")]
    policy = ScriptedPolicy(roller.chat, [*actions, families.SUBMIT])
    roller = dataclasses.replace(roller, sampler=policy, fork_at="error")

    async def go():
        gate = asyncio.Semaphore(3)
        _, state = await roller.attempt(task, "failed", gate, start=None, keep=True)
        sandbox = await roller.host.fork(state.snapshot, task)
        listed = await sandbox.exec("ls /app", timeout=5)
        await sandbox.close()
        await roller.host.release(state.snapshot)
        return state, listed.output.split()

    state, files = asyncio.run(go())
    assert [turn.command for turn in state.turns] == ["touch /app/early", "false"]
    assert "early" in files and "late" not in files


def test_no_snapshot_outlives_the_step(roller, task, monkeypatch, tmp_path):
    kept, real_release = set(), roller.host.release

    async def release(snapshot):
        kept.discard(snapshot.id)
        await real_release(snapshot)

    def spied(start):
        async def wrapped(*args):
            sandbox = await start(*args)
            snapshot_of = sandbox.snapshot

            async def snapshot():
                taken = await snapshot_of()
                kept.add(taken.id)
                return taken

            sandbox.snapshot = snapshot
            return sandbox

        return wrapped

    monkeypatch.setattr(roller.host, "release", release)
    monkeypatch.setattr(roller.host, "start", spied(roller.host.start))
    asyncio.run(roll_steps(tmp_path, roller, task, attempts=4, states=1, forks=1))
    assert kept == set()


def test_without_states_there_are_root_groups_only(roller, task, tmp_path):
    (groups,) = asyncio.run(roll_steps(tmp_path, roller, task, attempts=2, states=0, forks=3))
    assert [group.kind for group in groups] == ["root"]


@pytest.mark.parametrize(
    ("faults", "spares", "rewards"),
    [(1, 0, [0.0, 0.0, 0.0]), (9, 0, [0.0, 0.0, None]), (9, 2, [0.0, 0.0, 0.0, None])],
)
def test_an_environment_that_fails_is_tried_again_then_not_graded(
    roller, task, monkeypatch, tmp_path, faults, spares, rewards
):
    """And with spares another attempt takes its place."""
    real, failed = roller.host.start, []

    async def start(task):
        attempt = asyncio.current_task()
        # The first attempt, and its second try: what the same lane runs after that is a spare.
        if len(failed) < min(faults, 2) and failed in ([], [attempt]):
            failed.append(attempt)
            raise SandboxError("no room")
        return await real(task)

    monkeypatch.setattr(roller.host, "start", start)
    roller = dataclasses.replace(roller, spares=spares)
    (groups,) = asyncio.run(roll_steps(tmp_path, roller, task, attempts=3, states=0, forks=0))
    assert sorted(groups[0].rewards, key=str) == rewards
    assert len(failed) == min(faults, 2)


def test_failed_recoveries_are_forked_in_the_step_after(roller, task, tmp_path):
    """Nobody solves it: the failures of depth 0 and 1 are forked, those of depth 2 are not kept."""
    (task.tests_dir / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt\n")

    waiting = []
    counts = {"attempts": 1, "states": 9, "forks": 1, "pool": PoolConfig(max_depth=2, max_staleness=9)}
    counts["after"] = lambda pool: waiting.append([state.depth for state in pool.states])
    steps = asyncio.run(roll_steps(tmp_path, roller, task, 3, **counts))
    assert [sorted(g.state.depth for g in groups if g.state) for groups in steps] == [[0], [0, 1], [0, 1]]
    assert waiting == [[1], [1], [1]]
    deepest = next(group for group in steps[1] if group.state and group.state.depth == 1)
    assert deepest.attempts[0].depth == 2 and deepest.state.attempt_id == steps[0][1].attempts[0].id
    assert list((roller.host.directory.path / "snapshots").iterdir()) == []


def test_a_lost_state_is_made_again_from_its_commands(roller, task, tmp_path):
    """The fork of what was made again holds what the failed attempt left; one whose terminal differs is given up."""

    async def go():
        gate = asyncio.Semaphore(3)
        failed, lost = await roller.attempt(task, "failed", gate, start=None, keep=True)
        await roller.host.release(lost.snapshot)
        state = await restore_state(roller, task, failed, gate)
        assert dataclasses.replace(state, snapshot=lost.snapshot) == lost
        group, _ = await roller.recovery_group(task, state, 1, "fork", gate)
        await roller.host.release(state.snapshot)
        failed.turns[0] = dataclasses.replace(failed.turns[0], output="another")
        assert await restore_state(roller, task, failed, gate) is None
        return group

    assert asyncio.run(go()).rewards == [1.0]
    assert list((roller.host.directory.path / "snapshots").iterdir()) == []


def test_recoveries_whose_snapshot_is_lost_start_from_one_that_is_made_again(roller, task, monkeypatch):
    """Once for the whole group, and not where it would be another state: those recoveries are no verdict."""
    starts, real_start = [], roller.host.start

    async def counted(of):
        starts.append(of.id)
        return await real_start(of)

    async def go():
        gate = asyncio.Semaphore(1)  # no room for a sandbox beside those of the recoveries
        _, state = await roller.attempt(task, "failed", gate, start=None, keep=True)
        await roller.host.release(state.snapshot)
        monkeypatch.setattr(roller.host, "start", counted)
        groups = [(await roller.recovery_group(task, state, 3, "fork", gate))[0]]
        assert len(starts) == 1
        another = dataclasses.replace(state.turns[0], output="another")
        for lost in (dataclasses.replace(state, turns=(another,)), dataclasses.replace(state, depth=1)):
            groups.append((await roller.recovery_group(task, lost, 1, "lost", gate))[0])
        return groups

    again, differs, deeper = asyncio.run(go())
    assert again.rewards == [1.0, 1.0, 1.0]
    for group in (differs, deeper):
        (lost,) = group.attempts
        assert lost.outcome.status == "env_error" and "not held by this host" in lost.outcome.detail
    assert list((roller.host.directory.path / "snapshots").iterdir()) == []


@pytest.mark.parametrize(("away", "status"), [(5.0, "failed"), (0.0, "timeout")])
def test_time_that_the_sampler_was_away_is_not_the_policys(roller, task, away, status):
    """The attempt is done again; one that was slow by itself has failed."""

    class Slow(ScriptedPolicy):
        away_seconds = 0.0

        async def generate(self, ids, **options):
            if not self.away_seconds:
                self.away_seconds += away
                await asyncio.sleep(60)
            return await super().generate(ids, **options)

    policy = Slow(roller.chat, [families.Action("try", BY_MARK), families.SUBMIT])
    roller = dataclasses.replace(roller, sampler=policy, limits=dataclasses.replace(LIMITS, attempt_timeout=1.0))
    attempt, _ = asyncio.run(roller.attempt(task, "a", asyncio.Semaphore(3), start=None, keep=False))
    assert attempt.outcome.status == status


def test_a_snapshot_that_cannot_be_removed_stops_nothing(roller, task, tmp_path, monkeypatch):
    async def release(snapshot):
        raise SandboxError("the daemon is busy")

    monkeypatch.setattr(roller.host, "release", release)
    (groups,) = asyncio.run(roll_steps(tmp_path, roller, task, attempts=2, states=1, forks=1))
    assert [group.kind for group in groups] == ["root", "recovery"]
