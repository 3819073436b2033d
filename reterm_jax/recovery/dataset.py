"""Recovery demonstrations in the schema of ReTerm-10K, one failed attempt and its recovery each.

Written as JSON lines; read from those or from parquet, the form in which data sets are published.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from reterm_jax.agent.protocol import BASH_SCHEMA, render_message
from reterm_jax.tokens.chat import ChatFormat
from reterm_jax.tokens.transcript import Span, Transcript

ROLES = ("system", "user", "assistant", "tool")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class DatasetError(ValueError):
    """A row that does not follow the schema; names file, line and field."""

    def __init__(self, place: str, field: str, problem: str):
        super().__init__(f"{place}: {field}: {problem}")


@dataclasses.dataclass(frozen=True)
class Row:
    """One demonstration.

    Attributes:
      id: the task's id and the first 16 hex digits of the hash.
      messages: system, user, assistant/tool pairs of the failed attempt, a message that asks to go on, the recovery.
      train_from_message_index: the first message of the recovery; assistant messages from there on carry loss.
      target_attempt_index: which attempt is the recovery, counted from 1.
      trajectory_sha256: hash of the messages.
    """

    id: str
    task_id: str
    messages: tuple[Mapping[str, Any], ...]
    train_from_message_index: int
    trajectory_sha256: str
    target_attempt_index: int = 2

    def __post_init__(self):
        _check(self, f"row {self.id!r}")

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "task_id": self.task_id,
            "messages": [dict(message) for message in self.messages],
            "train_from_message_index": self.train_from_message_index,
            "target_attempt_index": self.target_attempt_index,
            "trajectory_sha256": self.trajectory_sha256,
        }


def make_row(task_id: str, messages: Sequence[Mapping[str, Any]], train_from_message_index: int) -> Row:
    """A row with its hash and id filled in. Rows with the same messages have the same hash."""
    canonical = json.dumps(list(messages), sort_keys=True, ensure_ascii=False, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()
    return Row(f"{task_id}-{digest[:16]}", task_id, tuple(messages), train_from_message_index, digest)


def write_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> int:
    """Writes a JSONL file, complete or not at all. Returns the number of rows."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial")
    count = 0
    try:
        with partial.open("w", encoding="utf-8") as file:
            for row in rows:
                # ASCII with escapes: also carries lone surrogates, which UTF-8 cannot.
                file.write(json.dumps(row.to_dict()) + "\n")
                count += 1
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    return count


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Reads a .jsonl or .parquet file; blank lines are skipped, unknown columns ignored.

    Raises:
      DatasetError: at the first line (of parquet: row, from 0) that is not a row; the file is no parquet file, or the
        reader of such files is missing.
      OSError: the file cannot be read.
    """
    if Path(path).suffix == ".parquet":
        return list(_parquet_rows(Path(path)))
    rows = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                rows.append(_parse(line, f"{path}:{number}"))
    return rows


def row_transcript(
    row: Row, chat: ChatFormat, tools: Sequence[Mapping[str, Any]] | None = (BASH_SCHEMA,)
) -> Transcript:
    """The row as a token history, rendered as the episode loop would have made it.

    Assistant messages from `train_from_message_index` on are `policy` spans (logprobs 0, version -1), so these and
    nothing else carry loss; the failed attempt's are `observation` spans. What follows the last assistant message is
    left out.

    Raises:
      DatasetError: a message that cannot be rendered.
    """
    starts = [index for index, message in enumerate(row.messages) if message["role"] == "assistant"]
    transcript = Transcript([Span("prompt", tuple(chat.prompt_ids(row.messages[: starts[0]], tools)))])
    previous = None
    for index in starts:
        if previous is not None:
            between = row.messages[previous + 1 : index]
            if not between:
                raise DatasetError(
                    f"row {row.id!r}", f"messages[{index}]", "follows another assistant message directly"
                )
            transcript.append(Span("observation", tuple(chat.boundary_ids(between, stop_token_included=True))))
        try:
            ids = tuple(chat.policy_ids(render_message(row.messages[index])))
        except ValueError as error:
            raise DatasetError(f"row {row.id!r}", f"messages[{index}]", str(error)) from error
        if index >= row.train_from_message_index:
            transcript.append(Span("policy", ids, (0.0,) * len(ids), -1))
        else:
            transcript.append(Span("observation", ids))
        previous = index
    return transcript


def _parquet_rows(path: Path) -> Iterator[Row]:
    with path.open("rb") as file:
        if file.read(4) != b"PAR1":
            raise DatasetError(str(path), "file", "is not parquet (it does not begin with PAR1)")
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise DatasetError(
            str(path), "file", "is parquet, which needs pyarrow: pip install 'reterm_jax[parquet]', or give JSON lines"
        ) from None
    try:
        number = 0
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=64):
                for data in batch.to_pylist():
                    # Every struct of a column has the keys of all of them, null where a message had none.
                    yield _row(_without_nulls(data), f"{path}: row {number}")
                    number += 1
    except pyarrow.ArrowException as error:
        raise DatasetError(str(path), "file", f"cannot be read as parquet ({error})") from None


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parse(line: bytes, place: str) -> Row:
    try:
        data = json.loads(line)
    except ValueError as error:
        raise DatasetError(place, "line", f"is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise DatasetError(place, "line", "is not a JSON object")
    return _row(data, place)


def _row(data: Mapping[str, Any], place: str) -> Row:
    fields = [field.name for field in dataclasses.fields(Row)]
    missing = [name for name in fields if name not in data]
    if missing:
        raise DatasetError(place, missing[0], f"is missing; a row has {', '.join(fields)}")
    values = {name: data[name] for name in fields}
    if not isinstance(values["messages"], list):
        raise DatasetError(place, "messages", "must be a list")
    values["messages"] = tuple(values["messages"])
    try:
        return Row(**values)
    except DatasetError as error:
        detail = str(error).split(": ", 1)[1]
        field, problem = detail.split(": ", 1)
        raise DatasetError(place, field, problem) from None


def _check(row: Row, place: str) -> None:
    def fail(field: str, problem: str):
        raise DatasetError(place, field, problem)

    for field in ("id", "task_id", "trajectory_sha256"):
        if not isinstance(getattr(row, field), str) or not getattr(row, field):
            fail(field, f"must be text, not {getattr(row, field)!r}")
    if not _SHA256.fullmatch(row.trajectory_sha256):
        fail("trajectory_sha256", "must be 64 hex digits")
    for field in ("train_from_message_index", "target_attempt_index"):
        value = getattr(row, field)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            fail(field, f"must be a positive integer, not {value!r}")
    for index, message in enumerate(row.messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            fail(f"messages[{index}]", f"must be an object with a role of {', '.join(ROLES)}")
        content = message.get("content")
        if content is not None and not isinstance(content, str):
            fail(f"messages[{index}].content", "must be text")
    if not any(message["role"] == "assistant" for message in row.messages[row.train_from_message_index :]):
        fail(
            "train_from_message_index",
            f"no assistant message from {row.train_from_message_index} on among {len(row.messages)} messages",
        )
    if not row.messages or row.messages[0]["role"] not in ("system", "user"):
        fail("messages[0]", "must be of the system or the user")
