"""The evaluation of policies that are scripts, in real sandboxes whose snapshots are lost."""

import asyncio
import shutil

import numpy as np
import pytest
from ml_collections import ConfigDict
from transformers import AutoTokenizer

from reterm_jax.agent.attempt import AgentLimits
from reterm_jax.agent.scripted import ScriptedPolicy
from reterm_jax.rollout.groups import Roller
from reterm_jax.sandbox import SnapshotLost, make_host
from reterm_jax.tasks import families
from reterm_jax.tokens import tiny_tokenizer
from reterm_jax.tokens.chat import ChatFormat
from reterm_jax.training import judging
from reterm_jax.training.workdir import Workdir

LIMITS = AgentLimits(max_turns=4, max_tokens=2048, max_turn_tokens=128, command_timeout=5, attempt_timeout=60)
CONFIG = {
    "seed": 0,
    "sandbox": {"kind": "bubblewrap"},
    "eval": {"temperature": 1.0, "states": 1, "attempts": 1, "own_forks": 0, "forks": 3, "trees": 0},
}


class Scripted(ScriptedPolicy):
    def update(self, params, version):
        pass


@pytest.fixture
def tasks(tmp_path):
    return families.generate(tmp_path / "tasks", split="test", per_family=1, seed=0, families=("write",))


@pytest.fixture
def roller(tmp_path):
    if shutil.which("bwrap") is None:
        pytest.skip("bubblewrap is not installed")
    chat = ChatFormat(AutoTokenizer.from_pretrained(tiny_tokenizer.build(["true"], tmp_path / "tokenizer")))
    host = make_host("bubblewrap", tmp_path / "run", max_concurrent=2, run_id="test")
    yield Roller(host, Scripted(chat, [families.Action("try", "true"), families.SUBMIT]), chat, LIMITS, 2, "again")
    asyncio.run(host.close())


def test_a_lost_state_is_made_again_once_for_all_seeds_and_policies(roller, tasks, monkeypatch, tmp_path):
    starts, real_start, real_states = [], roller.host.start, judging.fixed_states

    async def start(task):
        starts.append(task.id)
        return await real_start(task)

    async def lost_states(*args):
        states = await real_states(*args)
        for state in states:
            await roller.host.release(state.snapshot)
        starts.clear()
        return states

    monkeypatch.setattr(roller.host, "start", start)
    monkeypatch.setattr(judging, "fixed_states", lost_states)
    policies = {name: ({"w": np.zeros(1)}, 0) for name in ("one", "other")}
    work = Workdir(tmp_path / "work")
    results = asyncio.run(
        judging.evaluate(ConfigDict(CONFIG), work, roller, roller.sampler, tasks, policies, model="scripts")
    )
    assert [[attempt.status for attempt in result.recoveries] for result in results] == [["failed"] * 3] * 2
    assert len(starts) == 2 * 1 + 1, "an attempt of each policy, and the state"
    assert list((roller.host.directory.path / "snapshots").iterdir()) == []


def test_a_tree_whose_state_is_lost_stops_nothing(roller, tasks, monkeypatch):
    async def fork(snapshot, task):
        raise SnapshotLost(f"snapshot {snapshot.id} is gone")

    monkeypatch.setattr(roller.host, "fork", fork)
    (tree,) = asyncio.run(judging.fork_trees(roller, tasks, 1, seed=0))
    assert tree.state_listing.startswith("(its files cannot be listed: snapshot ")
    assert [recovery.status for recovery in tree.recoveries] == ["env_error"] * 4
    assert list((roller.host.directory.path / "snapshots").iterdir()) == []
