import pytest
from evaluation_demo import attempt

from reterm_jax.evaluation.journal import Journal, JournalError

IDENTITY = {"policy": "sft", "seed": 0, "families": ("a", "b")}


def fill(path, count):
    with Journal(path, IDENTITY) as journal:
        for i in range(count):
            journal.append(f"t{i}#0", attempt(f"t{i}", float(i)))


def test_finished_attempts_come_back(tmp_path):
    fill(tmp_path / "x" / "eval.jsonl", 3)
    with Journal(tmp_path / "x" / "eval.jsonl", IDENTITY) as journal:
        assert journal.finished == {f"t{i}#0": attempt(f"t{i}", float(i)) for i in range(3)}


def test_a_kill_at_any_byte_loses_at_most_the_last_attempt(tmp_path):
    path = tmp_path / "eval.jsonl"
    fill(path, 2)
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for cut in range(0, len(whole) + 1, 7):
        path.write_bytes(whole[:cut])
        with Journal(path, IDENTITY) as journal:
            assert len(journal.finished) == max(0, sum(end <= cut for end in ends) - 1)
            journal.append("new#0", attempt("new", None))
        with Journal(path, IDENTITY) as journal:
            assert "new#0" in journal.finished


def test_another_identity_is_an_error_and_overwrites_nothing(tmp_path):
    path = tmp_path / "eval.jsonl"
    fill(path, 1)
    before = path.read_bytes()
    with pytest.raises(JournalError, match=r"eval\.jsonl: belongs to another evaluation: seed is 0 there and 1 here"):
        Journal(path, {**IDENTITY, "seed": 1})
    assert path.read_bytes() == before


@pytest.mark.parametrize("content", ["my notes", "my notes\n", '{"a": 1}\n', "[]\n"])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    path = tmp_path / "eval.jsonl"
    path.write_text(content)
    with pytest.raises(JournalError, match=r"eval\.jsonl: .*line 1"):
        Journal(path, IDENTITY)
    assert path.read_text() == content


@pytest.mark.parametrize("line", ["garbage", '{"record": 1}', '{"key": "k", "record": {"id": 3}}'])
def test_damage_in_the_middle_names_the_line(tmp_path, line):
    path = tmp_path / "eval.jsonl"
    fill(path, 2)
    lines = path.read_text().splitlines()
    lines[1] = line
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(JournalError, match=r"eval\.jsonl: line 2.*delete the file"):
        Journal(path, IDENTITY)
