import dataclasses
import json
import types

import numpy as np
import pytest
from evaluation_demo import attempt, report, tree

from reterm_jax.evaluation.json_codec import RecordError, decode, encode
from reterm_jax.evaluation.records import (
    AttemptRecord,
    ForkTree,
    RunReport,
    TurnRecord,
    by_family,
    curve,
    read_curves,
    write_text,
)


def test_every_record_survives_json():
    made = tree()
    assert decode(ForkTree, json.loads(json.dumps(encode(made))), "x") == made


def test_report_keeps_verdicts_of_all_attempts_and_turns_of_trees(tmp_path):
    made = report()
    turn = TurnRecord("t", "c", "o", 0)
    made.results[0].attempts[0] = dataclasses.replace(made.results[0].attempts[0], turns=[turn])
    made.save(tmp_path / "report.json")
    loaded = RunReport.load(tmp_path / "report.json")
    assert loaded.trees == made.trees and loaded.results[1:] == made.results[1:]
    assert loaded.results[0].attempts[0].turns == []
    assert list(tmp_path.iterdir()) == [tmp_path / "report.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda row: row.pop("failed"), "report.json: field 'failed' of ForkTree is missing"),
        (lambda row: row.update(extra=1), "report.json: unknown field 'extra'"),
        (lambda row: row["failed"].update(version="3"), r"report.json: failed: version: expected int, found str '3'"),
        (lambda row: row["failed"].update(depth=True), "depth: expected int, found bool"),
        (lambda row: row["failed"]["turns"][1].update(output=None), r"turns\[1\]: output: expected str, found null"),
        (lambda row: row.update(recoveries={}), "recoveries: expected a list"),
        (lambda row: row.update(failed=[]), "failed: expected an object"),
    ],
)
def test_malformed_records_name_file_and_field(change, message):
    row = encode(tree())
    change(row)
    with pytest.raises(RecordError, match=message):
        decode(ForkTree, row, "report.json")


@pytest.mark.parametrize("text", ["{", b"\xff\xfe"])
def test_unreadable_report_names_the_file(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(RecordError, match=r"report\.json: not"):
        RunReport.load(path)


def test_grades():
    assert attempt("t", 1.0).solved and not attempt("t", 0.99).solved and attempt("t", 0.0).graded
    assert not attempt("t", None).graded and not attempt("t", float("nan")).graded


def test_from_attempt_counts_own_policy_tokens_only():
    mask_T = np.array([0, 1, 1, 0, 0, 1, 1, 1, 0], bool)
    agent_attempt = types.SimpleNamespace(
        id="a",
        task_id="t",
        transcript=types.SimpleNamespace(arrays=lambda: (None, mask_T, None, None)),
        prefix_len=4,
        outcome=types.SimpleNamespace(reward=1, status="solved", detail=""),
        turns=[types.SimpleNamespace(**dataclasses.asdict(TurnRecord("th", "ls", "out", 0, 0.5)))],
        timings={"sampling": 1.0, "sandbox": 0.5},
        ended="submit",
        parent="s",
        depth=1,
        version=7,
    )
    record = AttemptRecord.from_attempt(agent_attempt, "files", seed=5)
    assert (record.tokens, record.seconds, record.reward, record.parent, record.seed) == (3, 1.5, 1.0, "s", 5)
    assert record.turns == [TurnRecord("th", "ls", "out", 0, 0.5)]
    agent_attempt.outcome = None
    assert AttemptRecord.from_attempt(agent_attempt, "files").status == "env_error"


def test_curves_take_the_last_value_of_a_step_and_skip_what_is_no_number(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        '{"step": 2, "a": 1, "note": "x"}\n{"step": 1, "a": 5}\n\n{"step": 2, "a": 3, "b": null}\n'
        '{"step": 3, "a": NaN}\n{"step": 4, "a"'
    )
    assert curve(read_curves(path), "a") == {1: 5.0, 2: 3.0}
    assert curve(read_curves(path), "b") == {}


@pytest.mark.parametrize("line", ['{"step": 4, "a"', '{"a": 1}', "[1]"])
def test_damaged_metrics_name_the_line(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n')
    with pytest.raises(RecordError, match=r"metrics\.jsonl: line 2"):
        read_curves(path)


def test_write_text_carries_lone_surrogates_and_leaves_nothing_after_a_failure(tmp_path):
    write_text(tmp_path / "new" / "a.txt", "x\ud800y")
    assert (tmp_path / "new" / "a.txt").read_text() == "x?y"
    (tmp_path / "dir").mkdir()
    (tmp_path / "dir" / "full").touch()
    with pytest.raises(OSError):
        write_text(tmp_path / "dir", "text")
    assert not (tmp_path / "dir.part").exists()


def test_by_family_sorts():
    groups = by_family([attempt("text-1", 1.0), attempt("git-1", 0.0), attempt("text-2", 0.0)])
    assert [(family, len(group)) for family, group in groups.items()] == [("git", 1), ("text", 2)]
