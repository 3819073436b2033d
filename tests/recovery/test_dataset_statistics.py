import pytest

from reterm_jax.agent.protocol import render_turn
from reterm_jax.recovery.dataset import make_row, row_transcript
from reterm_jax.recovery.statistics import Spread, describe

USER = {"role": "user", "content": "look"}
TURN = {"role": "assistant", "content": render_turn("look", "ls")}
TOOL = {"role": "tool", "content": ""}


def row(task_id, failed, recovery):
    messages = [USER] + [TURN, TOOL] * (failed + recovery)
    return make_row(task_id, messages, 1 + 2 * failed)


def test_counts_and_lengths(chat):
    rows = [row("copy-1", 1, 2), row("copy-2", 2, 1), row("copy-1", 1, 1), row("find-1", 3, 4)]
    found = describe(rows, {"copy-1": "copy", "copy-2": "copy"}, chat)
    assert (found.rows, found.tasks, found.families) == (4, 3, {"copy": 3, "unknown": 1})
    assert found.messages == Spread(5, 7.0, 15, 15)
    assert (found.failed_turns.high, found.recovery_turns.high) == (3, 4)
    assert found.tokens.high == len(row_transcript(rows[3], chat))
    assert found.recovery_tokens.high == 4 * len(chat.policy_ids(TURN["content"]))
    assert "copy: 3 (75.0%)" in str(found) and "recovery turns: 1 to 4" in str(found)


def test_families_by_function_and_without_tokens():
    found = describe([row("copy-1", 1, 1)], lambda task_id: task_id.split("-")[0])
    assert found.families == {"copy": 1} and found.tokens is None and "tokens" not in str(found)


def test_nothing_to_describe():
    with pytest.raises(ValueError, match="no rows"):
        describe([], {})
