"""A group comes back from bytes as it was, to the last bit."""

import json
import zlib

import made_up
import numpy as np
import pytest

from reterm_jax.agent.attempt import Attempt, FailureState
from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.wire import WireError, decode_group, encode_group
from reterm_jax.sandbox.base import Snapshot
from reterm_jax.tasks.outcome import Outcome


def recovery_group():
    failed = made_up.attempt("s/root0/0", "t", 0.0, version=3)
    state = FailureState.of(failed, Snapshot("snap", "docker", "host", ("sleep 9",)))
    prefix = state.transcript.spans
    inherited = {"parent": state.id, "depth": 1, "timings": {"sampling": 0.1 + 0.2}}
    run = [made_up.attempt(f"s/fork0/{i}", "t", float(i), 4 + i, prefix, **inherited) for i in range(2)]
    lost = Attempt.not_run("s/fork0/2", "t", Outcome(None, "env_error", "gone \x1b[0m ä"), parent=state.id, depth=1)
    return Group("recovery", "t", (*run, lost), state)


def test_ids_logprobs_versions_and_everything_else_are_the_same():
    group = recovery_group()
    back = decode_group(encode_group(group))
    assert back == group
    for before, after in zip(group.attempts, back.attempts, strict=True):
        for expected, found in zip(before.transcript.arrays(), after.transcript.arrays(), strict=True):
            np.testing.assert_array_equal(found, expected)
    # Shared, not copied: a long prefix is in memory once.
    assert back.attempts[0].transcript.spans[0] is back.state.transcript.spans[0]


def test_the_prefix_of_a_recovery_group_is_written_once():
    record = json.loads(zlib.decompress(encode_group(recovery_group())))
    assert len(record["state"]["transcript"]) == 2
    assert [len(attempt["transcript"]) for attempt in record["attempts"]] == [2, 2, 0]


@pytest.mark.parametrize("data", [b"", b"junk", zlib.compress(b"[]"), zlib.compress(b'{"kind": "root"}')])
def test_other_bytes_are_refused(data):
    with pytest.raises(WireError, match="not a group"):
        decode_group(data)
