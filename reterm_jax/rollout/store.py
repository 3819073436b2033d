"""Finished groups on disk until the trainer's checkpoint has consumed them: an SQLite file in WAL mode.

A batch is named by the step that trains on it. That makes "exactly once" simple: a trainer that resumes from the
checkpoint of step s asks for batches from s on, and is given those that it had before; what it acknowledges, after its
checkpoint is on disk, is gone. Each group is written when it is finished, so that whoever rolled it may be killed.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from reterm_jax.rollout.groups import Group
from reterm_jax.rollout.wire import WireError, decode_group, encode_group

_SCHEMA = """
CREATE TABLE IF NOT EXISTS groups (
  step INTEGER NOT NULL, key TEXT NOT NULL, states TEXT NOT NULL, data BLOB NOT NULL, PRIMARY KEY (step, key));
CREATE TABLE IF NOT EXISTS batches (step INTEGER PRIMARY KEY, keys TEXT NOT NULL, facts TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS notes (name TEXT PRIMARY KEY, value TEXT NOT NULL);
"""
_IDENTITY, _ACKNOWLEDGED = "identity", "acknowledged"


class StoreError(RuntimeError):
    """A store that cannot be used or is of another run. The message names the file and the remedy."""


class GroupStore:
    """The groups of one run. Its calls are short and may come from several threads.

    Args:
      path: the file; made with its directory. A process holds it alone.
      identity: what the groups depend on, as JSON values. A file with another identity is refused.

    Raises StoreError.
    """

    def __init__(self, path: str | Path, identity: Mapping[str, Any]) -> None:
        self.path = Path(path)
        self._lock = threading.Lock()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db: sqlite3.Connection | None = None
        try:
            self._db = sqlite3.connect(self.path, timeout=1.0, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA locking_mode = EXCLUSIVE")
            self._db.execute("PRAGMA journal_mode = WAL")
            # A killed process loses nothing; a machine that loses power loses the last groups, which are rolled again.
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_SCHEMA)
        except sqlite3.Error as error:
            self.close()
            raise self._unusable(error) from error
        wanted = json.loads(json.dumps(identity))
        known = self.note(_IDENTITY)
        if known is None:
            self.set_note(_IDENTITY, wanted)
        elif known != wanted:
            self.close()
            field = next(key for key in sorted({*known, *wanted}) if known.get(key) != wanted.get(key))
            raise StoreError(
                f"{self.path} holds groups of another run: {field} is {known.get(field)!r} there and "
                f"{wanted.get(field)!r} here; use another directory, or remove the file"
            )

    def put(self, step: int, key: str, group: Group, states: Sequence[str]) -> None:
        """Keeps a finished group; in place of the one of that key, if there is one.

        Args:
          states: ids of the attempts whose failure states may be recovered from.
        """
        row = (step, key, json.dumps(list(states)), encode_group(group))
        self._run("INSERT OR REPLACE INTO groups VALUES (?, ?, ?, ?)", row)

    def get(self, step: int, key: str) -> tuple[Group, list[str]] | None:
        """The group and its failure states, as given to `put`."""
        rows = self._run("SELECT data, states FROM groups WHERE step = ? AND key = ?", (step, key))
        return (self._decoded(step, key, rows[0][0]), json.loads(rows[0][1])) if rows else None

    def finish(self, step: int, keys: Sequence[str], facts: Mapping[str, float]) -> None:
        """Says that the batch of `step` is whole: its groups, in order, and numbers about it."""
        row = (step, json.dumps(list(keys)), json.dumps(dict(facts)))
        self._run("INSERT OR REPLACE INTO batches VALUES (?, ?, ?)", row)

    def finished(self, step: int) -> tuple[list[str], dict[str, float]] | None:
        """Keys and facts of a whole batch; None where it is not whole."""
        rows = self._run("SELECT keys, facts FROM batches WHERE step = ?", (step,))
        return (json.loads(rows[0][0]), json.loads(rows[0][1])) if rows else None

    def data(self, step: int, key: str) -> bytes | None:
        """A group as `wire.encode_group` made it."""
        rows = self._run("SELECT data FROM groups WHERE step = ? AND key = ?", (step, key))
        return rows[0][0] if rows else None

    def group(self, step: int, key: str) -> Group:
        """A group of a whole batch."""
        data = self.data(step, key)
        if data is None:
            raise StoreError(f"{self.path}: group {key} of step {step} is missing; remove the file to roll anew")
        return self._decoded(step, key, data)

    def acknowledge(self, step: int) -> None:
        """Forgets the groups of the batches before `step`: a checkpoint holds what they taught. The facts of the last
        one stay, as what follows may depend on them.

        Raises StoreError where batches from `step` on were acknowledged already, and cannot be given again.
        """
        if step < self.acknowledged:
            raise StoreError(
                f"{self.path}: the trainer is at step {step}, but the groups of the steps before {self.acknowledged} "
                "were consumed by a checkpoint that it no longer has; go on from that one, or remove the file"
            )
        if step == self.acknowledged:
            return
        with self._lock:
            try:
                self._connection.execute("BEGIN")
                self._connection.execute("DELETE FROM groups WHERE step < ?", (step,))
                self._connection.execute("DELETE FROM batches WHERE step < ?", (step - 1,))
                self._connection.execute("REPLACE INTO notes VALUES (?, ?)", (_ACKNOWLEDGED, str(step)))
                self._connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    @property
    def acknowledged(self) -> int:
        """The first step whose groups are still to be consumed."""
        return self.note(_ACKNOWLEDGED) or 0

    def note(self, name: str) -> Any:
        """A JSON value kept beside the groups; None where there is none."""
        rows = self._run("SELECT value FROM notes WHERE name = ?", (name,))
        return json.loads(rows[0][0]) if rows else None

    def set_note(self, name: str, value: Any) -> None:
        self._run("REPLACE INTO notes VALUES (?, ?)", (name, json.dumps(value)))

    def counts(self) -> dict[int, int]:
        """Groups on disk, by step."""
        return dict(self._run("SELECT step, COUNT(*) FROM groups GROUP BY step ORDER BY step", ()))

    def close(self) -> None:
        with self._lock:
            if self._db is not None:
                self._db.close()
                self._db = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        if self._db is None:
            raise StoreError(f"{self.path} is closed")
        return self._db

    def _run(self, statement: str, values: tuple[Any, ...]) -> list[Any]:
        with self._lock:
            try:
                return self._connection.execute(statement, values).fetchall()
            except sqlite3.Error as error:
                raise self._unusable(error) from error

    def _decoded(self, step: int, key: str, data: bytes) -> Group:
        try:
            return decode_group(data)
        except WireError as error:
            raise StoreError(
                f"{self.path}: group {key} of step {step}: {error}; remove the file to roll anew"
            ) from error

    def _unusable(self, error: sqlite3.Error) -> StoreError:
        if "locked" in str(error):
            return StoreError(f"{self.path} is in use by another process; wait for it, or choose another directory")
        return StoreError(f"{self.path}: {error}; free space or correct its permissions, or remove it to roll anew")
