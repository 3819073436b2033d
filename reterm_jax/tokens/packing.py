"""Packing documents of different lengths into rows of one length: little padding, few shapes to compile."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import numpy as np


class PackingError(ValueError):
    """A document that cannot be packed. The message names it."""


@dataclass(frozen=True)
class Example:
    """One document to train on.

    Attributes:
        ids: token ids, [n] with n ≥ 2.
        loss_mask: [n] bool, true where the token itself is trained on; false for the first one, which nothing predicts.
        advantage: one number for the document, or [n].
        old_logprobs: [n] the sampler's log-probabilities of the tokens; None where there is no sampler (SFT).
        weight: factor on the document's loss, for example to mix root and recovery attempts.
        name: what errors call it.
        ref_logprobs: [n] log-probabilities under a frozen reference; None where there is none.
        group: examples with the same group may begin alike; `forking.pack_forked` then stores the beginning once.
    """

    ids: np.ndarray | Sequence[int]
    loss_mask: np.ndarray | Sequence[bool]
    advantage: float | np.ndarray = 0.0
    old_logprobs: np.ndarray | Sequence[float] | None = None
    weight: float = 1.0
    name: str = ""
    group: int | None = None
    ref_logprobs: np.ndarray | None = None


@dataclass(frozen=True)
class Batch:
    """Packed rows, numpy [B,T]. Position t holds an input token and everything about the token that follows it."""

    tokens: np.ndarray  # int32
    targets: np.ndarray  # int32, the next token of the same document
    segments: np.ndarray  # int32, 0 is padding, documents count from 1 in each row
    positions: np.ndarray  # int32, from 0 in each document
    loss_mask: np.ndarray  # bool, on targets
    advantages: np.ndarray  # float32
    old_logprobs: np.ndarray  # float32, 0 where there is none
    weights: np.ndarray  # float32, the document's weight
    # int32, the segment that a token's segment continues, or its own (`policy.documents`); None: no segment does.
    trunks: np.ndarray | None = None
    ref_logprobs: np.ndarray | None = None  # float32, of the targets; None: there is no reference

    @classmethod
    def empty(cls, rows: int, length: int, *, reference: bool = False) -> "Batch":
        """Rows of nothing but padding; with `reference` they have `ref_logprobs`."""
        arrays = {name: np.zeros((rows, length), dtype) for name, dtype in _DTYPES.items()}
        return cls(**arrays, ref_logprobs=np.zeros((rows, length), np.float32) if reference else None)

    @property
    def rows(self) -> int:
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        return self.tokens.shape[1]

    @property
    def used_tokens(self) -> int:
        """Positions that are not padding."""
        return int(np.count_nonzero(self.segments))

    @property
    def loss_tokens(self) -> int:
        return int(np.count_nonzero(self.loss_mask))

    @property
    def padding_fraction(self) -> float:
        return 1.0 - self.used_tokens / max(1, self.segments.size)

    def arrays(self) -> dict[str, np.ndarray]:
        """All arrays by name, without `trunks` and `ref_logprobs` where there are none."""
        return {field.name: value for field in fields(self) if (value := getattr(self, field.name)) is not None}

    def take(self, rows: Sequence[int] | np.ndarray, *, count: int | None = None) -> "Batch":
        """The given rows, in that order, followed by empty rows up to `count`."""
        rows = np.asarray(rows, np.int64)
        missing = 0 if count is None else count - len(rows)
        if missing < 0:
            raise ValueError(f"{len(rows)} rows do not fit into a batch of {count}")
        return Batch(**{k: np.pad(v[rows], ((0, missing), (0, 0))) for k, v in self.arrays().items()})


_DTYPES = {
    "tokens": np.int32,
    "targets": np.int32,
    "segments": np.int32,
    "positions": np.int32,
    "loss_mask": np.bool_,
    "advantages": np.float32,
    "old_logprobs": np.float32,
    "weights": np.float32,
}
assert (*_DTYPES, "trunks", "ref_logprobs") == tuple(field.name for field in fields(Batch))


@dataclass(frozen=True)
class Placement:
    """Where an example lies: its row, its first column and its number of positions (one less than its tokens)."""

    row: int
    start: int
    size: int


def pack(
    examples: Sequence[Example], *, length: int, rows_multiple: int = 1, rows: int | None = None
) -> tuple[Batch, list[Placement]]:
    """Packs every example, longest first, each into the first row with room (first-fit decreasing).

    A document of n tokens takes n − 1 positions: its last token is only ever a target.

    Args:
        length: positions in a row (T).
        rows_multiple: the number of rows is rounded up to a multiple of it (the rows of a micro-batch).
        rows: exactly this number of rows, if given.

    Returns:
        (batch, placements); placements[i] says where examples[i] went, so that scores can be read back.

    Raises:
        PackingError: for an example that is malformed or longer than a row (the caller decides whether to cut or to
            drop it), or if the examples need more than `rows` rows.
    """
    if length < 1 or rows_multiple < 1:
        raise ValueError(f"length {length} and rows_multiple {rows_multiple} must be at least 1")
    sizes = [checked_size(example, index, length) for index, example in enumerate(examples)]
    placements, needed = first_fit_decreasing(sizes, length)
    if rows is None:
        rows = max(1, -(-needed // rows_multiple)) * rows_multiple
    elif needed > rows:
        raise PackingError(f"{len(examples)} examples need {needed} rows of {length} tokens, only {rows} are allowed")

    batch = Batch.empty(rows, length, reference=has_reference(examples))
    documents_in_row = np.zeros(rows, np.int32)
    # In order of columns, so that segments count from left to right.
    for index in sorted(range(len(examples)), key=lambda i: (placements[i].row, placements[i].start)):
        row = placements[index].row
        documents_in_row[row] += 1
        write(batch, examples[index], row, placements[index].start, int(documents_in_row[row]))
    return batch, placements


def unpack(values_BT: np.ndarray, placement: Placement) -> np.ndarray:
    """The values of one document in a [B,T] array, aligned to its tokens: [n], 0 for the first token."""
    values = values_BT[placement.row, placement.start : placement.start + placement.size]
    return np.concatenate([np.zeros(1, values.dtype), values])


def has_reference(examples: Sequence[Example]) -> bool:
    """Whether the examples have logprobs of a reference: all of them or none.

    Raises PackingError naming one that lacks them.
    """
    lacking = [i for i, example in enumerate(examples) if example.ref_logprobs is None]
    if lacking and len(lacking) < len(examples):
        raise PackingError(f"{_label(examples[lacking[0]], lacking[0])} has no ref_logprobs, others have")
    return bool(examples) and not lacking


def _label(example: Example, index: int) -> str:
    return f"example {index}" + (f" ({example.name})" if example.name else "")


def checked_size(example: Example, index: int, length: int) -> int:
    """The positions that an example takes; raises PackingError if it is malformed or does not fit into a row."""
    n = len(example.ids)
    label = _label(example, index)
    if n < 2:
        raise PackingError(f"{label} has {n} tokens; at least 2 are needed to predict one")
    for field in ("loss_mask", "old_logprobs", "ref_logprobs", "advantage"):
        value = getattr(example, field)
        if value is not None and np.ndim(value) and len(value) != n:
            raise PackingError(f"{label}: {field} has length {len(value)}, ids have {n}")
    if example.loss_mask[0]:
        raise PackingError(f"{label}: loss_mask is true on the first token, which nothing predicts")
    if n - 1 > length:
        raise PackingError(
            f"{label} has {n} tokens, a row holds {length + 1}; raise the row length, or cut or drop the example"
        )
    return n - 1


def first_fit_decreasing(sizes: Sequence[int], length: int) -> tuple[list[Placement], int]:
    """Where things of these sizes go in bins of `length`, and how many bins they need."""
    placements: list[Placement | None] = [None] * len(sizes)
    filled: list[int] = []
    for index in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        size = sizes[index]
        row = next((r for r, used in enumerate(filled) if used + size <= length), len(filled))
        if row == len(filled):
            filled.append(0)
        placements[index] = Placement(row, filled[row], size)
        filled[row] += size
    return placements, len(filled)


def write(batch: Batch, example: Example, row: int, start: int, segment: int, first: int = 0) -> None:
    """Puts positions `first`.. of an example into a row of the batch, from column `start` on."""
    ids = np.asarray(example.ids, np.int32)[first:]
    where = (row, slice(start, start + len(ids) - 1))
    batch.tokens[where] = ids[:-1]
    batch.targets[where] = ids[1:]
    batch.segments[where] = segment
    batch.positions[where] = first + np.arange(len(ids) - 1)
    batch.loss_mask[where] = np.asarray(example.loss_mask, bool)[first + 1 :]
    advantage = np.asarray(example.advantage, np.float32)
    batch.advantages[where] = advantage[first + 1 :] if advantage.ndim else advantage
    if example.old_logprobs is not None:
        batch.old_logprobs[where] = np.asarray(example.old_logprobs, np.float32)[first + 1 :]
    if example.ref_logprobs is not None:
        batch.ref_logprobs[where] = np.asarray(example.ref_logprobs, np.float32)[first + 1 :]
    batch.weights[where] = example.weight
