import json

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from reterm_jax.training.metrics import (
    FILE_NAME,
    MetricsWriter,
    format_number,
    format_progress,
    format_seconds,
    read_metrics,
)


def test_lines_hold_step_time_and_values(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        assert writer.write(1, {"train/loss": np.float32(0.5), "n": 1}) == {"train/loss": 0.5, "n": 1}
        writer.write(2, {"train/loss": float("nan")})
        # Every line is on disk at once: a killed run keeps all of its steps.
        first, second = [json.loads(line) for line in (tmp_path / FILE_NAME).read_text().splitlines()]
    assert first["step"] == 1 and first["train/loss"] == 0.5 and first["time"] > 1e9
    assert second["train/loss"] is None


def test_resuming_drops_what_will_be_computed_again(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        for step in range(1, 6):
            writer.write(step, {"loss": step})
    with (tmp_path / FILE_NAME).open("a") as file:
        file.write('{"step": 6, "lo')  # cut short by a kill
    with MetricsWriter(tmp_path, resume_step=3, tensorboard=False) as writer:
        writer.write(4, {"loss": 40})
    assert [(line["step"], line["loss"]) for line in read_metrics(tmp_path)] == [(1, 1), (2, 2), (3, 3), (4, 40)]


def test_a_new_run_starts_a_new_file(tmp_path):
    with MetricsWriter(tmp_path, tensorboard=False) as writer:
        writer.write(1, {"loss": 1})
    MetricsWriter(tmp_path, tensorboard=False).close()
    assert read_metrics(tmp_path) == []


def test_damage_in_the_middle_is_an_error(tmp_path):
    (tmp_path / FILE_NAME).write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics.jsonl, line 2"):
        read_metrics(tmp_path / FILE_NAME)


def test_tensorboard_gets_the_same_values(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {"train/loss": 0.25})
    (path,) = tmp_path.glob("events.out.tfevents.*")
    assert [(e.step, v.tag, v.simple_value) for e in events(path) for v in e.summary.value] == [(3, "train/loss", 0.25)]


def events(path):
    """The records of a TFRecord file: length, its checksum, data, its checksum."""
    data, at = path.read_bytes(), 0
    while at < len(data):
        size = int.from_bytes(data[at : at + 8], "little")
        yield event_pb2.Event.FromString(data[at + 12 : at + 12 + size])
        at += 12 + size + 4


def test_console_line():
    line = format_progress("sft", 40, 120, {"loss": 0.8123, "tokens/s": 12345.0, "eta": format_seconds(80)})
    assert line == "sft     40/120  loss 0.812  tokens/s 12.3k  eta 1m20s"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (2.5e6, "2.5M"), (9876, "9876"), (-0.5, "-0.5"), (2e-5, "2.0e-05"), (float("nan"), "nan")],
)
def test_numbers(value, text):
    assert format_number(value) == text


@pytest.mark.parametrize(("seconds", "text"), [(7.6, "8s"), (185, "3m05s"), (7500, "2h05m"), (-1, "0s")])
def test_seconds(seconds, text):
    assert format_seconds(seconds) == text
