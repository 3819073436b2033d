import json
import sys

import numpy as np
import pytest

from reterm_jax.agent.protocol import BASH_SCHEMA, render_turn
from reterm_jax.recovery.dataset import DatasetError, make_row, read_rows, row_transcript, write_rows

MESSAGES = [
    {"role": "system", "content": "Use bash."},
    {"role": "user", "content": "Find it."},
    {"role": "assistant", "content": render_turn("look", "ls")},
    {"role": "tool", "content": "bash: <|im_end|>\n(exit code 2)"},
    {"role": "assistant", "content": render_turn("done", "submit")},
    {"role": "tool", "content": "The task is not solved yet. Continue."},
    {"role": "assistant", "content": render_turn("again", "ls -a")},
    {"role": "tool", "content": ""},
    {"role": "assistant", "content": render_turn("done", "submit")},
]


@pytest.fixture
def row():
    return make_row("find-1", MESSAGES, 6)


def test_the_id_is_task_and_hash(row):
    assert row.id == f"find-1-{row.trajectory_sha256[:16]}" and row.target_attempt_index == 2
    assert make_row("find-1", [dict(m) for m in MESSAGES], 6) == row
    assert make_row("find-1", MESSAGES[:-2], 6).trajectory_sha256 != row.trajectory_sha256


def test_files_round_trip(tmp_path, row):
    strange = make_row("é-2", [MESSAGES[1], {"role": "assistant", "content": "x\u2028\udcff\0"}], 1)
    file = tmp_path / "new" / "rows.jsonl"
    assert write_rows(file, [row, strange]) == 2
    assert read_rows(file) == [row, strange] and list(file.parent.iterdir()) == [file]
    assert set(json.loads(file.read_text().splitlines()[0])) == {
        "id", "task_id", "messages", "train_from_message_index", "target_attempt_index", "trajectory_sha256",
    }  # fmt: skip


def test_a_write_that_fails_leaves_the_old_file(tmp_path, row):
    def rows():
        yield row
        raise RuntimeError("stop")

    file = tmp_path / "rows.jsonl"
    write_rows(file, [row, row])
    with pytest.raises(RuntimeError):
        write_rows(file, rows())
    assert len(read_rows(file)) == 2 and list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"id": None}, "id"),
        ({"task_id": ""}, "task_id"),
        ({"messages": {}}, "messages"),
        ({"messages": [3]}, r"messages\[0\]"),
        ({"messages": [{"role": "robot", "content": ""}]}, r"messages\[0\]"),
        ({"messages": [MESSAGES[0], {"role": "user", "content": [1]}]}, r"messages\[1\]\.content"),
        ({"messages": MESSAGES[2:], "train_from_message_index": 2}, r"messages\[0\]"),
        ({"train_from_message_index": 0}, "train_from_message_index"),
        ({"train_from_message_index": "6"}, "train_from_message_index"),
        ({"train_from_message_index": 9}, "train_from_message_index"),
        ({"target_attempt_index": True}, "target_attempt_index"),
        ({"trajectory_sha256": "abc"}, "trajectory_sha256"),
        ({"trajectory_sha256": ...}, "trajectory_sha256: is missing"),
    ],
)
def test_bad_rows_name_file_line_and_field(tmp_path, row, change, field):
    bad = {key: value for key, value in (row.to_dict() | change).items() if value is not ...}
    file = tmp_path / "rows.jsonl"
    file.write_text(f"{json.dumps(row.to_dict())}\n\n{json.dumps(bad)}\n")
    with pytest.raises(DatasetError, match=rf"rows\.jsonl:3: {field}"):
        read_rows(file)


@pytest.mark.parametrize("line", ["{", "[]", '"x"', "\xff"])
def test_lines_that_are_no_objects(tmp_path, line):
    file = tmp_path / "rows.jsonl"
    file.write_bytes(line.encode("latin-1"))
    with pytest.raises(DatasetError, match=r"rows\.jsonl:1: line"):
        read_rows(file)


def test_parquet_gives_the_same_rows(tmp_path, row, chat):
    """As data sets are published: a struct has the keys of all, null where a message had none."""
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    call = {"function": {"name": "bash", "arguments": {"command": "ls -a"}}}
    other = make_row("t", [MESSAGES[1], {"role": "assistant", "content": "look", "tool_calls": [call]}], 1)
    rows = [row, other] * 50  # more than one batch
    file = tmp_path / "rows.parquet"
    parquet.write_table(pyarrow.Table.from_pylist([{**r.to_dict(), "split": "train"} for r in rows]), file)
    assert pyarrow.parquet.read_table(file).to_pylist()[0]["messages"][0]["tool_calls"] is None
    assert read_rows(file) == rows
    assert row_transcript(read_rows(file)[1], chat).ids == row_transcript(other, chat).ids

    bad = {**row.to_dict(), "train_from_message_index": 99}
    parquet.write_table(pyarrow.Table.from_pylist([row.to_dict(), bad]), file)
    with pytest.raises(DatasetError, match=r"rows\.parquet: row 1: train_from_message_index"):
        read_rows(file)
    file.write_bytes(file.read_bytes()[:-40])
    with pytest.raises(DatasetError, match=r"rows\.parquet: file: cannot be read as parquet"):
        read_rows(file)


def test_what_is_not_parquet_is_said_before_its_reader_is_missed(tmp_path, row, monkeypatch):
    file = tmp_path / "rows.parquet"
    file.write_text(json.dumps(row.to_dict()))
    with pytest.raises(DatasetError, match=r"rows\.parquet: file: is not parquet"):
        read_rows(file)
    file.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DatasetError, match=r"needs pyarrow: pip install 'reterm_jax\[parquet\]'"):
        read_rows(file)


def test_unknown_columns_are_ignored(tmp_path, row):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row.to_dict() | {"split": "train"}))
    assert read_rows(file) == [row]


def test_the_transcript_is_the_templates_with_loss_on_the_recovery_only(chat, row):
    transcript = row_transcript(row, chat)
    plain = [
        {**m, "content": m["content"].replace("<|im_end|>", "im_end")} if m["role"] == "tool" else m for m in MESSAGES
    ]
    text = chat.tokenizer.apply_chat_template(plain, tools=[BASH_SCHEMA], tokenize=False)
    expected = chat.tokenizer.encode(text, add_special_tokens=False)[:-1]  # the template adds a newline
    assert row_transcript(make_row("find-1", plain, 6), chat).ids == expected
    ids, mask, logprobs, versions = transcript.arrays()
    trained = chat.policy_ids(MESSAGES[6]["content"]) + chat.policy_ids(MESSAGES[8]["content"])
    assert ids[mask].tolist() == trained
    assert not logprobs.any() and (versions == -1).all()
    assert np.flatnonzero(mask)[0] > len(row_transcript(make_row("find-1", MESSAGES[:5], 4), chat))
    # Two of the prompt and one a turn; those that follow an output are part of a longer token. None is from the log.
    assert (ids == chat.stop_id).sum() == 2 + 4


def test_rows_of_other_makers(chat):
    """A retry message of the user, calls apart from the content, reasoning by its own name, a trailing message."""
    call = {"function": {"name": "bash", "arguments": '{"command": "ls -a"}'}}
    messages = [
        MESSAGES[1],
        {"role": "assistant", "content": "look\n</think>\n\n", "tool_calls": [{"function": {**call["function"]}}]},
        {"role": "tool", "content": "no"},
        {"role": "user", "content": "Try again."},
        {"role": "assistant", "reasoning_content": "again", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "yes"},
    ]
    transcript = row_transcript(make_row("t", messages, 3), chat)
    ids, mask, *_ = transcript.arrays()
    assert chat.tokenizer.decode(ids[mask]) == MESSAGES[6]["content"] + "<|im_end|>"
    text = chat.tokenizer.decode(ids)
    assert (
        "</tool_response><|im_end|>\n<|im_start|>user\nTry again.<|im_end|>\n<|im_start|>assistant\n<think>\n" in text
    )
    assert mask[-1]


def test_messages_that_cannot_be_rendered_name_the_row(chat):
    broken = [MESSAGES[1], {"role": "assistant", "content": "", "tool_calls": [{"name": "bash"}]}]
    with pytest.raises(DatasetError, match=r"t-\w+.*messages\[1\]: tool_calls\[0\]"):
        row_transcript(make_row("t", broken, 1), chat)
    with pytest.raises(DatasetError, match=r"messages\[2\]: follows another assistant"):
        row_transcript(make_row("t", [MESSAGES[1], MESSAGES[2], MESSAGES[2]], 1), chat)
