"""What a set of recovery demonstrations consists of."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence

from reterm_jax.recovery.dataset import Row, row_transcript
from reterm_jax.tokens.chat import ChatFormat


@dataclasses.dataclass(frozen=True)
class Spread:
    """Smallest, median, 95th percentile and largest of some lengths."""

    low: int
    median: float
    p95: float
    high: int

    @classmethod
    def of(cls, values: Sequence[int]) -> Spread:
        """Raises ValueError for no values."""
        if not values:
            raise ValueError("no lengths to summarise")
        ordered = sorted(values)
        p95 = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
        return cls(ordered[0], statistics.median(ordered), p95, ordered[-1])

    def __str__(self) -> str:
        return f"{self.low} to {self.high}, median {self.median:g}, 95 % up to {self.p95:g}"


@dataclasses.dataclass(frozen=True)
class DatasetStatistics:
    """Counts and lengths of a data set.

    Attributes:
      rows, tasks: numbers of rows, and of different tasks among them.
      families: rows of each family, the largest first.
      messages: messages of a row. failed_turns, recovery_turns: its assistant messages before and after the fork.
      tokens, recovery_tokens: ids of a row, and those that carry loss; None where no chat format was given.
    """

    rows: int
    tasks: int
    families: Mapping[str, int]
    messages: Spread
    failed_turns: Spread
    recovery_turns: Spread
    tokens: Spread | None = None
    recovery_tokens: Spread | None = None

    def __str__(self) -> str:
        lines = [f"{self.rows} demonstrations of {self.tasks} tasks"]
        lines += [f"  {name}: {count} ({count / self.rows:.1%})" for name, count in self.families.items()]
        for field in ("messages", "failed_turns", "recovery_turns", "tokens", "recovery_tokens"):
            spread = getattr(self, field)
            if spread is not None:
                lines.append(f"  {field.replace('_', ' ')}: {spread}")
        return "\n".join(lines)


def describe(
    rows: Sequence[Row], family_of: Callable[[str], str] | Mapping[str, str], chat: ChatFormat | None = None
) -> DatasetStatistics:
    """Counts a data set.

    Args:
      rows: not empty.
      family_of: family (or domain) of a task id; ids that a mapping lacks count as `unknown`.
      chat: with it tokens are counted too.
    """
    if not rows:
        raise ValueError("no rows to describe")
    lookup = (lambda task_id: family_of.get(task_id, "unknown")) if isinstance(family_of, Mapping) else family_of
    families = collections.Counter(lookup(row.task_id) for row in rows)
    turns = [
        [index >= row.train_from_message_index for index, m in enumerate(row.messages) if m["role"] == "assistant"]
        for row in rows
    ]
    transcripts = [row_transcript(row, chat) for row in rows] if chat is not None else []
    return DatasetStatistics(
        rows=len(rows),
        tasks=len({row.task_id for row in rows}),
        families=dict(families.most_common()),
        messages=Spread.of([len(row.messages) for row in rows]),
        failed_turns=Spread.of([len(flags) - sum(flags) for flags in turns]),
        recovery_turns=Spread.of([sum(flags) for flags in turns]),
        tokens=Spread.of([len(transcript) for transcript in transcripts]) if transcripts else None,
        recovery_tokens=Spread.of([int(t.arrays()[1].sum()) for t in transcripts]) if transcripts else None,
    )
