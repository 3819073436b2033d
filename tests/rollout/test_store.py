"""Groups survive a kill, are consumed by an acknowledgement, and belong to one run."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import made_up
import pytest

from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.store import GroupStore, StoreError


def group(name):
    return Group("root", "t", tuple(made_up.attempt(f"{name}/{i}", "t", float(i)) for i in range(2)))


def test_a_group_and_a_batch_come_back(tmp_path):
    with GroupStore(tmp_path / "new" / "groups", {"seed": 1}) as store:
        assert store.get(0, "root0") is None and store.finished(0) is None and store.data(0, "root0") is None
        store.put(0, "root0", group("a"), ["a/0"])
        store.put(0, "root0", group("b"), ["b/0"])
        assert store.get(0, "root0") == (group("b"), ["b/0"])
        store.finish(0, ["root0"], {"metrics": {"x": 1.5}})
    with GroupStore(tmp_path / "new" / "groups", {"seed": 1}) as store:
        assert store.finished(0) == (["root0"], {"metrics": {"x": 1.5}})
        assert store.group(0, "root0") == group("b") and store.counts() == {0: 1}


def test_what_a_checkpoint_consumed_is_gone_and_no_older_trainer_may_come(tmp_path):
    with GroupStore(tmp_path / "groups", {}) as store:
        for step in range(3):
            store.put(step, "root0", group(str(step)), [])
            store.finish(step, ["root0"], {})
        store.acknowledge(2)
        assert store.counts() == {2: 1} and store.finished(0) is None and store.finished(2) is not None
        assert store.finished(1) is not None  # its facts alone
    with GroupStore(tmp_path / "groups", {}) as store:
        assert store.acknowledged == 2
        store.acknowledge(2)
        with pytest.raises(StoreError, match="at step 1, but the groups of the steps before 2 were consumed"):
            store.acknowledge(1)


def test_what_was_put_is_there_after_a_kill(tmp_path):
    script = (
        "from test_store import *\n"
        f"store = GroupStore({str(tmp_path / 'groups')!r}, {{}})\n"
        "store.put(0, 'root0', group('a'), []); store.put(0, 'root1', group('b'), [])\n"
        f"os.kill(os.getpid(), {int(signal.SIGKILL)})"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    with GroupStore(tmp_path / "groups", {}) as store:
        assert store.counts() == {0: 2} and store.get(0, "root1") == (group("b"), [])


def test_threads_share_a_store(tmp_path):
    with GroupStore(tmp_path / "groups", {}) as store:
        threads = [
            threading.Thread(target=lambda n=n: [store.put(n, f"root{i}", group("a"), []) for i in range(20)])
            for n in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert store.counts() == {0: 20, 1: 20, 2: 20, 3: 20}


def test_another_run_another_process_and_another_file_are_refused(tmp_path):
    with GroupStore(tmp_path / "groups", {"seed": 1, "tasks": ["a"]}) as held:
        held.set_note("weights", [1, "x"])
        assert held.note("weights") == [1, "x"]
        with pytest.raises(StoreError, match="groups is in use by another process"):
            GroupStore(tmp_path / "groups", {"seed": 1, "tasks": ["a"]})
    with pytest.raises(StoreError, match="holds groups of another run: seed is 1 there and 2 here; use another dir"):
        GroupStore(tmp_path / "groups", {"seed": 2, "tasks": ["a"]})
    (tmp_path / "text").write_text("not a database, but long enough to be taken for one" * 100)
    with pytest.raises(StoreError, match="text: file is not a database; .* remove it"):
        GroupStore(tmp_path / "text", {})


def test_damage_is_named(tmp_path):
    with GroupStore(tmp_path / "groups", {}) as store:
        store.put(0, "root0", group("a"), [])
        store._run("UPDATE groups SET data = ?", (b"junk",))
        with pytest.raises(StoreError, match="groups: group root0 of step 0: not a group"):
            store.get(0, "root0")
