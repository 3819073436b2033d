"""Finished attempts of an evaluation on disk, so that a killed run goes on where it was."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from reterm_jax.evaluation.json_codec import RecordError, decode, encode
from reterm_jax.evaluation.records import AttemptRecord


class JournalError(ValueError):
    """The journal is damaged or belongs to another evaluation."""


class Journal:
    """An append-only JSONL file: a header with the evaluation's identity, then one finished attempt a line.

    Args:
        path: the file; made with its directory when absent.
        identity: what the attempts depend on (policy version, seed, task set). A file with another identity is an
            error, never overwritten and never mixed.

    Raises:
        JournalError: another identity, or a damaged line before the last one. A torn last line, which a kill leaves,
            is cut off.
    """

    def __init__(self, path: Path, identity: Mapping[str, Any]):
        self._path = path
        self.finished: dict[str, AttemptRecord] = {}
        path.parent.mkdir(parents=True, exist_ok=True)
        header = {"identity": dict(identity)}
        keep = self._load(header) if path.exists() else 0
        self._file = open(path, "ab")
        # What stood behind the last whole line would otherwise run into the next one.
        self._file.truncate(keep)
        if keep == 0:
            self._write(header)

    def append(self, key: str, record: AttemptRecord) -> None:
        """Returns once the attempt is on disk."""
        self._write({"key": key, "record": encode(record)})
        self.finished[key] = record

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *exc_info) -> None:
        self.close()

    def _write(self, row: Mapping[str, Any]) -> None:
        self._file.write(_line(row))
        self._file.flush()
        os.fsync(self._file.fileno())

    def _load(self, header: Mapping[str, Any]) -> int:
        """Fills `finished` and returns the length in bytes of the part that is whole."""
        whole = 0
        lines = self._path.read_bytes().splitlines(keepends=True)
        for number, line in enumerate(lines, start=1):
            try:
                row = json.loads(line)
            except ValueError as error:  # not JSON, or not UTF-8
                if number == len(lines) and (number > 1 or _line(header).startswith(line)):
                    break
                raise JournalError(f"{self._path}: line {number} is damaged; delete the file to start anew") from error
            if not line.endswith(b"\n"):
                break
            if number == 1:
                self._check_identity(row, header["identity"])
            else:
                self._take(row, number)
            whole += len(line)
        return whole

    def _check_identity(self, row: Any, identity: Mapping[str, Any]) -> None:
        found = row.get("identity") if isinstance(row, dict) else None
        if not isinstance(found, dict):
            raise JournalError(f"{self._path}: line 1 has no field 'identity'; this is not an evaluation journal")
        # Through JSON, so that tuples compare equal to the lists that they became.
        wanted = json.loads(json.dumps(identity))
        for field in sorted(found.keys() | wanted.keys()):
            if found.get(field) != wanted.get(field):
                raise JournalError(
                    f"{self._path}: belongs to another evaluation: {field} is {found.get(field)!r} there and "
                    f"{wanted.get(field)!r} here; use another workdir or delete the file"
                )

    def _take(self, row: Any, number: int) -> None:
        where = f"{self._path}: line {number}"
        if not isinstance(row, dict) or not isinstance(row.get("key"), str):
            raise JournalError(f"{where} has no field 'key'; delete the file to start anew")
        try:
            self.finished[row["key"]] = decode(AttemptRecord, row.get("record"), where)
        except RecordError as error:
            raise JournalError(f"{error}; delete the file to start anew") from error


def _line(row: Mapping[str, Any]) -> bytes:
    return json.dumps(row, allow_nan=False).encode() + b"\n"
